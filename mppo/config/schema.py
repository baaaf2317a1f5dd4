"""The recipe: every key a user may set, with its default.

Keys carry verl's names. Sections are frozen and refuse unknown keys; checks that need more than one
key live in ``mppo.config.checks``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt

from mppo.config.algorithm import AlgorithmConfig, KLType
from mppo.config.section import Section
from mppo.parallel.layout import Layout


class ModelConfig(Section):
    """Which model the actor, critic and reference start from.

    ``path`` is a Hugging Face folder (config.json, tokenizer, safetensors), a Megatron
    ``torch_dist`` checkpoint with those beside it in ``hf/``, or ``builtin:tiny`` for the embedded
    byte-sized model and tokenizer. With ``hub`` a path ``owner/model`` that is no folder is
    downloaded from the Hugging Face Hub into its cache; without, nothing is ever downloaded.
    """

    path: str = "builtin:tiny"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    tokenizer_path: str | None = None
    hub: bool = False
    trust_remote_code: bool = False


class DataConfig(Section):
    """Prompts: built-in procedural tasks, jsonl or parquet files.

    ``train_size`` and ``val_size`` bound the prompts of a split; null takes files whole, and makes
    4096 and 64 prompts of a task. Several files share a bound evenly. ``val_size: 0``: no
    validation.
    ``ptx_files`` hold plain text under ``ptx_key``, for ``actor.ptx_coef``; every optimizer step of
    the actor takes ``ptx_batch_size`` documents (null: as many as its mini-batch has sequences).
    """

    train_files: tuple[str, ...] = ()
    val_files: tuple[str, ...] = ()
    task: str | None = None
    task_kwargs: dict[str, Any] = Field(default_factory=dict)
    train_size: int | None = Field(default=None, gt=0)
    val_size: int | None = Field(default=None, ge=0)
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    max_prompt_length: int = Field(default=512, gt=0)
    max_response_length: int = Field(default=512, gt=0)
    train_batch_size: int = Field(default=64, gt=0)
    val_batch_size: int | None = Field(default=None, gt=0)
    filter_overlong_prompts: bool = True
    truncation: Literal["error", "left", "right", "middle"] = "error"
    apply_chat_template: bool = True
    system_prompt: str | None = None
    shuffle: bool = True
    seed: int = 0
    ptx_files: tuple[str, ...] = ()
    ptx_key: str = "text"
    ptx_batch_size: int | None = Field(default=None, gt=0)


class OptimConfig(Section):
    """Adam with warm-up and decay. ``lr_warmup_steps`` wins over ``lr_warmup_steps_ratio``.

    A PPO step's rate is the schedule's after the steps before it, as in Megatron-LM and
    transformers: the first step decays nothing, and with a warm-up its rate is 0.
    """

    lr: float = Field(default=1e-6, ge=0)
    min_lr: float = Field(default=0.0, ge=0)
    lr_warmup_steps: int | None = Field(default=None, ge=0)
    lr_warmup_steps_ratio: float = Field(default=0.0, ge=0, le=1)
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: float = Field(default=0.01, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    clip_grad: float = Field(default=1.0, ge=0)


class MegatronConfig(Section):
    """A role's layout over the ranks, and how its activations are kept.

    ``pipeline_layers``: decoder layers of every pipeline chunk, in the order the model runs through
    them (PP x VPP numbers); null shares them evenly. ``cp_comm_type`` (Megatron-Core's key): over
    ``context_parallel_size`` ranks keys and values are gathered (``all_gather``) or travel from
    rank to rank while attention works on the last ones (``p2p``, a ring: less memory); null: p2p
    for MLA, else all_gather, and with Transformer Engine its own choice.
    ``offload_activations`` keeps what the backward pass needs in host memory meanwhile.
    ``moe_expert_capacity_factor``: an expert takes that many times its even share of a
    micro-batch's choices on a rank, the rest is dropped; null drops none.
    """

    tensor_model_parallel_size: int = Field(default=1, gt=0)
    pipeline_model_parallel_size: int = Field(default=1, gt=0)
    virtual_pipeline_model_parallel_size: int | None = Field(default=None, gt=1)
    context_parallel_size: int = Field(default=1, gt=0)
    cp_comm_type: Literal["all_gather", "p2p"] | None = None
    expert_model_parallel_size: int = Field(default=1, gt=0)
    expert_tensor_parallel_size: int = Field(default=1, gt=0)
    sequence_parallel: bool = True
    num_layers_in_first_pipeline_stage: int | None = Field(default=None, gt=0)
    num_layers_in_last_pipeline_stage: int | None = Field(default=None, gt=0)
    pipeline_layers: tuple[PositiveInt, ...] | None = None
    use_distributed_optimizer: bool = True
    recompute_granularity: Literal["none", "selective", "full"] = "none"
    offload_activations: bool = False
    overlap_grad_reduce: bool = False
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss"] = "none"
    moe_aux_loss_coeff: float = Field(default=0.0, ge=0)
    moe_z_loss_coeff: float | None = Field(default=None, ge=0)
    moe_router_bias_update_rate: float = Field(default=0.0, ge=0)
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = "alltoall"
    moe_router_dtype: Literal["fp32", "fp64"] = "fp32"
    moe_expert_capacity_factor: float | None = Field(default=None, gt=0)
    freeze_moe_router: bool = False
    override_transformer_config: dict[str, Any] = Field(default_factory=dict)

    def key_exchange(self, latent: bool) -> Literal["all_gather", "p2p"]:
        """``cp_comm_type``, or the choice for the model; ``latent``: it has MLA."""
        return self.cp_comm_type or ("p2p" if latent else "all_gather")

    def layout(self, world: int) -> Layout:
        """The layout asked for, on ``world`` ranks.

        Raises:
            ValueError: it does not fit them.
        """
        return Layout(
            world=world,
            tp=self.tensor_model_parallel_size,
            pp=self.pipeline_model_parallel_size,
            vpp=self.virtual_pipeline_model_parallel_size or 1,
            cp=self.context_parallel_size,
            ep=self.expert_model_parallel_size,
            etp=self.expert_tensor_parallel_size,
        )


class BatchingConfig(Section):
    """How a role's sequences are cut into micro-batches; changes speed and memory, no number."""

    ppo_micro_batch_size_per_gpu: int = Field(default=8, gt=0)
    use_dynamic_bsz: bool = False
    ppo_max_token_len_per_gpu: int = Field(default=16384, gt=0)
    log_prob_micro_batch_size_per_gpu: int | None = Field(default=None, gt=0)
    log_prob_max_token_len_per_gpu: int | None = Field(default=None, gt=0)
    head_chunk_tokens: int = Field(default=1024, gt=0)


class PolicyLossConfig(Section):
    """Which policy loss, and its own parameters."""

    loss_mode: Literal[
        "vanilla", "gspo", "gmpo", "cispo", "sapo", "clip_cov", "kl_cov", "gpg", "plain"
    ] = "vanilla"
    tau_pos: float = Field(default=1.0, gt=0)
    tau_neg: float = Field(default=1.05, gt=0)
    clip_cov_ratio: float = Field(default=0.0002, ge=0, le=1)
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = Field(default=0.0002, ge=0, le=1)
    ppo_kl_coef: float = Field(default=0.1, ge=0)


SEQUENCE_LOSSES = ("gspo", "gmpo", "sapo")
"""Losses defined with seq-mean-token-mean, which they take although it is not the default."""

LossAggMode = Literal[
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "token-sum",
]


class ActorConfig(BatchingConfig):
    """The policy: layout, optimizer, and the PPO update.

    ``router_replay``: in a mixture of experts, the update takes the experts chosen when
    log-probabilities were measured (R2), or update and measurement those the rollout engine chose
    (R3). ``ptx_coef`` weighs the language-model loss on ``data.ptx_files``. ``ema_decay`` keeps a
    moving average of the weights, which is checkpointed, and exported beside the actor.
    """

    ppo_mini_batch_size: int = Field(default=64, gt=0)
    ppo_epochs: int = Field(default=1, gt=0)
    shuffle: bool = False
    clip_ratio: float = Field(default=0.2, ge=0)
    clip_ratio_low: float | None = Field(default=None, ge=0)
    clip_ratio_high: float | None = Field(default=None, ge=0)
    clip_ratio_c: float | None = Field(default=3.0, gt=1)
    loss_agg_mode: LossAggMode = "token-mean"
    loss_scale_factor: float | None = Field(default=None, gt=0)
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    entropy_coeff: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = Field(default=0.001, ge=0)
    kl_loss_type: KLType = "low_var_kl"
    optim: OptimConfig = OptimConfig(lr=1e-6)
    megatron: MegatronConfig = MegatronConfig()
    router_replay: Literal["off", "R2", "R3"] = "off"
    ptx_coef: float = Field(default=0.0, ge=0)
    ema_decay: float | None = Field(default=None, ge=0, lt=1)

    @property
    def learns_full_kl(self) -> bool:
        """Whether the loss holds a KL over the whole vocabulary."""
        return self.use_kl_loss and self.kl_loss_type.startswith("full")


class CriticConfig(BatchingConfig):
    """The value model. ``path`` null starts it from ``model.path``; it may name a reward model. The
    value head is the path's, fresh where it has none.

    ``router_replay`` R2: the update takes the experts chosen when values were measured.
    """

    path: str | None = None
    ppo_mini_batch_size: int | None = Field(default=None, gt=0)
    ppo_epochs: int = Field(default=1, gt=0)
    shuffle: bool = False
    cliprange_value: float | None = Field(default=0.5, gt=0)
    value_loss_coef: float = Field(default=1.0, gt=0)
    loss_agg_mode: LossAggMode = "token-mean"
    optim: OptimConfig = OptimConfig(lr=1e-5)
    megatron: MegatronConfig = MegatronConfig()
    router_replay: Literal["off", "R2"] = "off"


class RefConfig(Section):
    """The frozen reference. ``path`` null takes the actor's initial weights; whatever else is null
    is as the actor has it."""

    path: str | None = None
    ppo_micro_batch_size_per_gpu: int | None = Field(default=None, gt=0)
    use_dynamic_bsz: bool | None = None
    ppo_max_token_len_per_gpu: int | None = Field(default=None, gt=0)
    log_prob_micro_batch_size_per_gpu: int | None = Field(default=None, gt=0)
    log_prob_max_token_len_per_gpu: int | None = Field(default=None, gt=0)
    head_chunk_tokens: int | None = Field(default=None, gt=0)
    megatron: MegatronConfig | None = None

    def batching(self, actor: ActorConfig) -> BatchingConfig:
        """The reference's micro-batch limits: its own where given, else the actor's."""
        own = {key: getattr(self, key) for key in BatchingConfig.model_fields}
        theirs = {key: getattr(actor, key) for key in own}
        return BatchingConfig(**theirs | {k: v for k, v in own.items() if v is not None})


class DrawingConfig(Section):
    """How tokens are drawn. ``top_k: -1`` means all; ``temperature: 0`` means greedy."""

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    n: int = Field(default=1, gt=0)


class SamplingConfig(DrawingConfig):
    """How responses are drawn. ``stop_token_ids`` end a response, as the model's own eos does."""

    stop_token_ids: tuple[int, ...] = ()


class ValidationConfig(DrawingConfig):
    """How responses to validation prompts are drawn. ``stop_token_ids`` null: ``rollout``'s."""

    stop_token_ids: tuple[int, ...] | None = None


class RolloutConfig(SamplingConfig):
    """The engine that generates. ``local`` is transformers on each rank; ``sglang`` a server.

    ``servers`` is how many SGLang servers a run owns: by default one per
    ``tensor_model_parallel_size`` ranks on GPUs, one on a CPU. ``expert_parallel_size`` groups of
    a server's ranks share the experts out. ``over_sampling`` asks that share of
    prompts beyond the batch; when the batch is full the slowest are aborted and come again, with
    ``partial_rollout`` from where they were. ``sync_mode: sliced`` gives each rollout rank only the
    pieces it holds, ``delta`` only those blocks of them that changed since the last sync.
    """

    name: Literal["local", "sglang"] = "local"
    batch_size: int = Field(default=256, gt=0)
    over_sampling: float = Field(default=0.0, ge=0)
    partial_rollout: bool = False
    dtype: Literal["float32", "bfloat16"] | None = None
    val_kwargs: ValidationConfig = ValidationConfig(temperature=0.0)
    tensor_model_parallel_size: int = Field(default=1, gt=0)
    expert_parallel_size: int = Field(default=1, gt=0)
    mode: Literal["colocated", "disaggregated"] = "colocated"
    servers: int | None = Field(default=None, gt=0)
    urls: tuple[str, ...] = ()
    sync: Literal["tensor", "distributed", "disk"] = "tensor"
    sync_mode: Literal["full", "sliced", "delta"] = "full"
    sync_bucket_mb: int = Field(default=512, gt=0)
    verify_sync: Literal["off", "checksum", "logprob"] = "off"
    logprob_tolerance: float | None = Field(default=None, gt=0)
    request_timeout_s: float = Field(default=600.0, gt=0)
    start_timeout_s: float = Field(default=600.0, gt=0)
    server_args: dict[str, Any] = Field(default_factory=dict)

    @property
    def validation(self) -> SamplingConfig:
        """How responses to validation prompts are drawn, the stop tokens filled in."""
        own = self.val_kwargs.model_dump()
        if self.val_kwargs.stop_token_ids is None:
            own["stop_token_ids"] = self.stop_token_ids
        return SamplingConfig(**own)

    @property
    def greedy(self) -> SamplingConfig:
        """The most likely tokens, with the training responses' stop tokens."""
        return SamplingConfig(temperature=0.0, stop_token_ids=self.stop_token_ids)


OnError = Literal["raise", "zero"]


class RewardConfig(Section):
    """Where scores come from: ``rule`` picks a verifier by the prompt's data source.

    A response that did not end by itself has ``missing_eos_score`` instead of its own score, or
    ``missing_eos_penalty`` less. ``on_error``: a response that cannot be judged (the function
    raised, or returned no finite number) ends the run, the step before being saved (``raise``), or
    scores 0 and is counted in ``reward/errors`` (``zero``).
    ``timeout_s`` is how long a server may take for an answer, and a function, or a verifier that
    runs in processes of its own, for a response; they are killed then, and it scores 0.
    ``memory_mb`` is the address space of such a process (null: 4096 for a verifier, no limit for a
    function).
    """

    name: Literal["rule", "function", "remote"] = "rule"
    verifier: str | None = None
    function: str | None = None
    url: str | None = None
    timeout_s: float = Field(default=60.0, gt=0)
    memory_mb: int | None = Field(default=None, gt=0)
    kwargs: dict[str, Any] = Field(default_factory=dict)
    on_error: OnError = "raise"
    clip: float | None = Field(default=None, gt=0)
    missing_eos_penalty: float | None = Field(default=None, ge=0)
    missing_eos_score: float | None = None
    overlong_buffer_len: int = Field(default=0, ge=0)
    overlong_penalty_factor: float = Field(default=1.0, ge=0)


class TrainerConfig(Section):
    """The run: how long, how often, where to.

    ``save_freq`` counts PPO steps (-1: none on a schedule), ``save_every_minutes`` wall-clock time;
    either may be given. ``checkpoint_must_save_by`` (``[DD:]HH:MM:SS`` since the start) saves and
    stops in time for a known limit. ``max_ckpt_to_keep`` newest checkpoints stay, and the best by
    ``best_metric`` (``-name``: lowest). ``checkpoint_hf`` also exports the actor, as a Hugging Face
    folder ``hf/global_step_N``, with every checkpoint. ``resume_mode: auto`` goes on from the
    newest complete checkpoint of ``default_local_dir``; ``resume_path`` from ``resume_from_path``.
    Results of another recipe in ``default_local_dir`` are left alone (``on_existing_run: refuse``),
    or moved to a folder ``earlier-N`` in it (``set_aside``).
    After ``max_nonfinite_in_a_row`` skipped steps (``on_nonfinite: skip``) the run stops.
    ``heartbeat_timeout_s`` is how long a silent rank counts as alive, ``hang_timeout_s`` how long
    no rank may make progress (null: nine tenths of ``collective_timeout_s``). After SIGTERM or
    Ctrl-C a step that would not end within ``stop_within_s`` is abandoned (null: never).
    ``peak_tflops_per_rank`` is what ``perf/mfu/*`` is a share of (null: the GPU's in bfloat16, by
    its name; without one there is no ``perf/mfu/*``).
    ``rollout_ahead: 1`` has servers that run apart generate a step's batch while the step before
    trains, with weights one update older (one-step off-policy).
    """

    project_name: str = "mppo"
    experiment_name: str = "run"
    default_local_dir: str | None = None
    total_epochs: int = Field(default=1, gt=0)
    total_training_steps: int | None = Field(default=None, gt=0)
    warm_start_steps: int = Field(default=0, ge=0)
    warm_start_batch_size: int = Field(default=64, gt=0)
    warm_start_lr: float = Field(default=1e-3, gt=0)
    val_before_train: bool = True
    test_freq: int = Field(default=-1, ge=-1)
    save_freq: int = Field(default=-1, ge=-1)
    save_every_minutes: float | None = Field(default=None, gt=0)
    checkpoint_must_save_by: str | None = Field(
        default=None, pattern=r"^(\d+:)?\d{1,2}:\d{2}:\d{2}$"
    )
    save_on_signal: bool = True
    stop_within_s: float | None = Field(default=20.0, ge=0)
    async_save: bool = True
    max_ckpt_to_keep: int | None = Field(default=None, gt=0)
    best_metric: str | None = None
    checkpoint_hf: bool = False
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    resume_from_path: str | None = None
    on_existing_run: Literal["refuse", "set_aside"] = "refuse"
    export_hf: bool = True
    critic_warmup: int = Field(default=0, ge=0)
    rollout_ahead: int = Field(default=0, ge=0, le=1)
    logger: tuple[Literal["console", "jsonl", "tensorboard", "wandb"], ...] = ("console", "jsonl")
    sample_table_rows: int = Field(default=4, ge=0)
    nnodes: int | None = Field(default=None, gt=0)
    n_gpus_per_node: int | None = Field(default=None, gt=0)
    collective_timeout_s: float = Field(default=600.0, gt=0)
    heartbeat_timeout_s: float = Field(default=20.0, ge=2)
    hang_timeout_s: float | None = Field(default=None, gt=0)
    on_nonfinite: Literal["skip", "stop"] = "stop"
    max_nonfinite_in_a_row: int = Field(default=3, gt=0)
    peak_tflops_per_rank: float | None = Field(default=None, gt=0)
    seed: int = 0

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return Path(self.default_local_dir or Path("runs") / self.experiment_name)


class Recipe(Section):
    """A whole recipe."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    ref: RefConfig = RefConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    reward: RewardConfig = RewardConfig()
    trainer: TrainerConfig = TrainerConfig()

    @property
    def uses_reference(self) -> bool:
        """Whether a frozen reference is needed: only a KL term looks at it."""
        return self.algorithm.use_kl_in_reward or self.actor.use_kl_loss

    @property
    def needs_actor_logprobs(self) -> bool:
        """Whether the actor's log-probabilities are measured, or the engine's taken for them."""
        correction = self.algorithm.rollout_correction
        rejects = correction.rollout_rs != "off" or correction.rollout_token_veto_threshold
        return bool(not correction.bypass_mode or rejects or self.needs_full_kl)

    @property
    def needs_full_kl(self) -> bool:
        """Whether a KL term is taken over the whole vocabulary."""
        penalty = self.algorithm.use_kl_in_reward and self.algorithm.kl_penalty.startswith("full")
        return penalty or self.actor.learns_full_kl
