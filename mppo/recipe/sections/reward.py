"""The recipe's ``reward`` section: where scores come from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mppo.recipe.sections.section import Section


def _earlier_name(value: Any) -> Any:
    """Translate the earlier names of two values of ``reward.on_error``."""
    return {"raise": "stop", "zero": 0.0}.get(value, value) if isinstance(value, str) else value


OnError = Annotated[float | Literal["stop"], BeforeValidator(_earlier_name)]
"""The score of a response without a score; ``stop``: the run ends instead."""


class RewardConfig(Section):
    """The source of scores and their shaping.

    Shaping in this order: ``clip``, the score of a response that did not end by itself
    (``missing_eos_*``), the overlong penalty.
    """

    name: Literal["rule", "function", "remote"] = "rule"
    """Where scores come from: a verifier chosen by the prompt's data source (rule), a Python
    function, or an HTTP server (remote)."""
    weight: float | None = None
    """Factor of this score in the sum with that of the reward model; 0: the score is only logged.
    null: 1, or with a reward model no score of this section at all."""
    verifier: str | None = None
    """Verifier for all data sources, with ``name: rule``. null: chosen by data source."""
    function: str | None = None
    """``package.module:function`` or ``path/file.py:function``, with ``name: function``."""
    url: str | None = None
    """Address of the reward server, with ``name: remote``; or with ``name: rule`` that of a
    SandboxFusion service, which then runs the programs of the verifier ``code``."""
    format: Literal["mppo", "openrlhf", "sandbox_fusion", "sglang", "judge"] | None = None
    """Form of the server's requests and answers: mppo's own, that of OpenRLHF's ``remote_rm_url``,
    SandboxFusion's ``/run_code``, SGLang's ``/classify``, or ``/v1/chat/completions`` of a
    generative model that judges. null: mppo, and sandbox_fusion with ``name: rule``."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds for one request to a server, or for one response in a function or in a verifier
    that runs in its own processes. Such a process is then killed; the response scores 0 by a
    verifier, and ``on_error`` by a function."""
    memory_mb: int | None = Field(default=None, gt=0)
    """Address space, MiB, of a process that runs a verifier or function. null: 4096 for a
    verifier, no limit for a function."""
    processes: int = Field(default=1, ge=1)
    """Processes of each rank that run a function. Each has its own copy of the function's state."""
    batch_size: int | None = Field(default=None, ge=1)
    """Most responses in one call of a batched function, and in flight at once in a process with an
    async one. null: an equal part of the responses that wait, for each process."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the function, or options of the verifier or server (``partial_credit``,
    ``sandbox``, ``batch_size``...)."""
    on_error: OnError = "stop"
    """Score of a response without one: the function raised, took too long, needed too much memory,
    ended its process, or returned no finite number; or the server or reward model gave none. A
    number: the run goes on, and ``reward/errors`` counts the response. ``stop``: the run ends, and
    the last complete step is saved. The names ``zero`` and ``raise`` mean 0 and ``stop``."""
    cache: bool = False
    """Score responses of the same content once: each rank remembers its last 65,536 scores by
    prompt, data row and response."""
    clip: float | None = Field(default=None, gt=0)
    """Scores are clipped to [-clip, clip]. null: not clipped."""
    missing_eos_penalty: float | None = Field(default=None, ge=0)
    """Subtracted from the score of a response that did not end by itself. null: nothing."""
    missing_eos_score: float | None = None
    """Replaces the score of a response that did not end by itself. null: not replaced."""
    overlong_buffer_len: int = Field(default=0, ge=0)
    """DAPO's overlong penalty: length, in tokens before ``data.max_response_length``, over which
    it grows; 0 turns it off."""
    overlong_penalty_factor: float = Field(default=1.0, ge=0)
    """The overlong penalty of a response of ``data.max_response_length`` tokens."""

    @property
    def server_format(self) -> str | None:
        """The format of the server; None if there is none."""
        if self.name == "remote":
            return self.format or "mppo"
        return "sandbox_fusion" if self.name == "rule" and self.url else None
