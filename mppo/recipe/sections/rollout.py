"""The recipe's ``rollout`` section: the engine that generates, and sampling."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from mppo.recipe.sections.agent import AgentConfig, EnvironmentConfig
from mppo.recipe.sections.section import Section


class DrawingConfig(Section):
    """How tokens are sampled."""

    temperature: float = Field(default=1.0, ge=0)
    """Divides the logits; 0 is greedy decoding."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample among the most likely tokens that together have this probability; 1: all tokens."""
    top_k: int = Field(default=-1, ge=-1)
    """Sample among this many most likely tokens; -1: all tokens."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Leave out tokens less likely than this share of the most likely token's probability; 0: none
    are left out."""
    n: int = Field(default=1, gt=0)
    """Responses per prompt."""


class SamplingConfig(DrawingConfig):
    """How responses are sampled, with the tokens that end them."""

    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response, besides the model's own eos."""


class ValidationConfig(DrawingConfig):
    """How responses to validation prompts are sampled."""

    stop_token_ids: tuple[int, ...] | None = None
    """Token ids that end a response, besides the model's own eos. null:
    ``rollout.stop_token_ids``."""


class RolloutConfig(SamplingConfig):
    """The rollout engine, and how the actor's weights reach it."""

    name: Literal["local", "sglang"] = "local"
    """The engine: transformers on every rank (local), or SGLang servers."""
    batch_size: int = Field(default=256, gt=0)
    """Most responses that a rank (local) or a server (sglang) generates at the same time."""
    over_sampling: float = Field(default=0.0, ge=0)
    """Prompts requested beyond ``data.train_batch_size``, as a share of it. When the batch is full
    the slowest responses are aborted and their prompts are requested again in the next step."""
    max_staleness: int = Field(default=0, ge=0)
    """Most updates of the weights between the generation of a token and the step that trains on it.
    0: each batch is generated with the current weights. From 1 on, responses that a batch or an
    update of the weights interrupts go on from the tokens they have, and disaggregated servers
    generate during training, up to so many batches ahead."""
    agent: AgentConfig | None = None
    """Who answers the policy, for conversations of several turns. null: a response is one turn."""
    environment: EnvironmentConfig | None = None
    """An environment that has the prompts and is the agent. null: none."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of the engine's weights. null: ``model.dtype``."""
    val_kwargs: ValidationConfig = ValidationConfig(temperature=0.0)
    """Sampling for validation; greedy by default."""
    tensor_model_parallel_size: int = Field(default=1, gt=0)
    """Ranks (GPUs) of one server."""
    expert_parallel_size: int = Field(default=1, gt=0)
    """Groups of a server's GPUs over which its experts are divided; 1: every GPU holds a part of
    each expert."""
    mode: Literal["colocated", "disaggregated"] = "colocated"
    """Where servers run: on the training devices, asleep during training, or elsewhere
    (``urls``)."""
    servers: int | None = Field(default=None, gt=0)
    """Servers that the run starts. null: on GPUs one per ``tensor_model_parallel_size`` ranks, on
    a CPU one."""
    urls: tuple[str, ...] = ()
    """Addresses of running servers, http://host:port. Empty: the run starts its own."""
    sync: Literal["tensor", "distributed", "disk"] = "tensor"
    """Route of the weights to the servers: shared memory or CUDA IPC, a process group (NCCL or
    gloo), or files."""
    sync_mode: Literal["full", "sliced", "delta"] = "full"
    """What is sent: whole tensors, only the slices that each rollout rank holds, or only those
    blocks of the slices that changed since the last sync."""
    sync_bucket_mb: int = Field(default=512, gt=0)
    """Size of a bucket of weights, MiB; two are in memory."""
    verify_sync: Literal["off", "checksum", "logprob"] = "off"
    """Check after every sync: checksums of the weights, or log-probabilities against
    transformers."""
    logprob_tolerance: float | None = Field(default=None, gt=0)
    """Largest difference in nats that the check ``logprob`` accepts. null: a value for the
    engine's type."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that a server may take to answer a request; in generation, seconds without progress
    of the server."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that a server may take to start."""
    server_args: dict[str, Any] = Field(default_factory=dict)
    """Further options of SGLang's servers, such as ``mem_fraction_static``."""

    @property
    def generates_ahead(self) -> bool:
        """Whether the engine generates for later steps during training."""
        return self.max_staleness > 0 and (bool(self.urls) or self.mode == "disaggregated")

    @property
    def validation(self) -> SamplingConfig:
        """Sampling of responses to validation prompts, stop tokens filled in."""
        own = self.val_kwargs.model_dump()
        if self.val_kwargs.stop_token_ids is None:
            own["stop_token_ids"] = self.stop_token_ids
        return SamplingConfig(**own)

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """Schemas of the agent's tools, for chat templates."""
        return [] if self.agent is None else [tool.openai_schema for tool in self.agent.tools]

    @property
    def greedy(self) -> SamplingConfig:
        """Greedy decoding with the training responses' stop tokens."""
        return SamplingConfig(temperature=0.0, stop_token_ids=self.stop_token_ids)
