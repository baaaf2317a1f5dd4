"""Options of reward servers, by ``reward.format``: the keys of ``reward.kwargs``."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from mppo.recipe.sections.section import Section

_Text = Annotated[str, Field(min_length=1)]


class RemoteOptions(Section):
    """Requests to a reward server, in every format."""

    model_config = ConfigDict(strict=True)

    batch_size: int = Field(default=256, ge=1)
    """Most responses per request."""
    concurrency: int = Field(default=32, ge=1, le=1024)
    """Most requests of the run at the same time; every rank sends its part of them, at least
    one."""
    retries: int = Field(default=3, ge=0)
    """Further attempts after a failure that a retry may cure."""
    backoff_s: float = Field(default=0.5, ge=0)
    """Seconds before the first retry, doubled each time; a random part of up to a half is left
    out, so that requests that failed together are not sent again together."""
    max_backoff_s: float = Field(default=30.0, ge=0)
    """Most seconds before a retry."""
    max_failures: int | None = Field(default=3, ge=1)
    """Requests that fail in a row, each after its retries, until no more are sent. null: no
    limit."""
    cool_down_s: float = Field(default=30.0, ge=0)
    """Seconds until then one request tries the server again."""
    api_key_env: _Text | None = None
    """Environment variable whose value is sent as ``Authorization: Bearer``."""


class OpenRLHFOptions(RemoteOptions):
    """OpenRLHF's ``remote_rm_url``."""

    batch_size: int = Field(default=1, ge=1)
    """Most responses per request. The format has no identifiers: with more than one, only the
    number of scores can be checked, and not their order."""


class SandboxFusionOptions(RemoteOptions):
    """SandboxFusion's ``/run_code``: one program and test per request."""

    batch_size: int = Field(default=1, ge=1, le=1)
    concurrency: int = Field(default=64, ge=1, le=1024)
    language: _Text = "python"
    """Language of the programs."""
    compile_timeout_s: float = Field(default=10.0, gt=0)
    """Time limit of the compilation."""
    run_timeout_s: float = Field(default=10.0, gt=0)
    """Time limit of a test."""
    memory_limit_mb: int | None = Field(default=None, gt=0)
    """Memory limit of a test in MiB. null: the service's."""
    partial_credit: bool = False
    """Score the share of passed tests (as verl does) instead of 1 for all and 0 otherwise."""


class ClassifierOptions(RemoteOptions):
    """SGLang's ``/classify``: a sequence classification model."""

    batch_size: int = Field(default=32, ge=1)
    tokenizer_path: _Text
    """Folder of the model's tokenizer, whose chat template renders prompt and response."""
    apply_chat_template: bool = True
    """false: the actor's prompt and the response, with the end-of-sequence token behind them."""
    max_length: int | None = Field(default=None, gt=0)
    """Most tokens of a text; of a longer one, only the last tokens are sent."""


class JudgeOptions(RemoteOptions):
    """A generative model behind an OpenAI-style ``/v1/chat/completions``."""

    batch_size: int = Field(default=1, ge=1, le=1)
    model: _Text
    """Name of the model on the server."""
    template: _Text
    """The message to the model: a text with ``{response}``, and ``{prompt}`` and
    ``{ground_truth}`` where wanted."""
    pattern: _Text = r"(?i)score\D{0,20}?(-?\d+(?:\.\d+)?)"
    """Regular expression whose first group is the score; the last match in the answer counts."""
    range: list[float] | None = Field(default=None, min_length=2, max_length=2)
    """Lowest and highest score; any other is an error. null: every number is accepted."""
    temperature: float = Field(default=0.0, ge=0)
    """Of the judge's sampling."""
    max_tokens: int = Field(default=512, ge=1)
    """Most tokens of an answer."""


REMOTE_FORMATS: dict[str, type[RemoteOptions]] = {
    "mppo": RemoteOptions,
    "openrlhf": OpenRLHFOptions,
    "sandbox_fusion": SandboxFusionOptions,
    "sglang": ClassifierOptions,
    "judge": JudgeOptions,
}
"""The options of each wire format."""
