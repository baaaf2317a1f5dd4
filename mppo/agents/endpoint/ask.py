"""What every API asks of the policy, and what it answers, apart from their JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mppo.agents.conversation import Message
from mppo.agents.endpoint.refusal import Refusal, invalid
from mppo.agents.endpoint.tree import TurnNode
from mppo.recipe.sections.rollout import SamplingConfig

_REFUSED = {
    "logit_bias", "min_tokens", "ignore_eos", "stop_token_ids", "bad_words", "regex", "ebnf",
    "json_schema", "structural_tag", "guided_json", "guided_regex", "guided_grammar",
    "structured_outputs", "guided_choice", "use_beam_search", "best_of",
}  # fmt: skip
"""Parameters that would change the distribution that the policy is trained on."""
_NEUTRAL = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class Ask:
    """A request for turns of the policy. ``prompt``: a text or token ids to continue without a chat
    template; ``max_tokens``: of a turn, None: the session's limit; ``stop``: texts that end it."""

    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    prompt: str | tuple[int, ...] | None = None
    max_tokens: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Choice:
    """A turn of the policy as a client sees it; ``finish_reason``: "stop", "length" or
    "tool_calls"; ``stop``: the text of ``Ask.stop`` that ended it."""

    message: Message
    finish_reason: str
    stop: str | None
    node: TurnNode

    @property
    def text(self) -> str:
        return self.message["content"]

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        return self.message.get("tool_calls", ())


@dataclass(frozen=True)
class PolicyAnswer:
    """The turns, and the tokens before them."""

    context: Sequence[int]
    choices: Sequence[Choice]

    @property
    def generated(self) -> int:
        return sum(len(choice.node.turn.ids) for choice in self.choices)


@dataclass(frozen=True)
class HttpReply:
    """A reply to a client: ``content`` as JSON, or ``events`` of a stream if the client asked for
    one. ``nodes`` are the policy's turns in it."""

    content: Mapping[str, Any]
    events: str | None = None
    nodes: Sequence[TurnNode] = field(default=())


class Body(BaseModel):
    """Parameters that several APIs share."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    n: int | None = Field(default=None, ge=1, le=128)
    stream: bool | None = None
    return_token_ids: bool | None = None
    """Add ``prompt_token_ids``, ``generation_token_ids`` and ``generation_log_probs``."""

    @classmethod
    def read(cls, content: Mapping[str, Any], sampling: SamplingConfig):
        """The parameters of a request; Refusal if one has a wrong type, or differs from the
        sampling of training."""
        try:
            body = cls.model_validate(content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"][:2])
            raise invalid(f"{where}: {first['msg']}", where) from None
        body._check_sampling(sampling)
        return body

    def _check_sampling(self, sampling: SamplingConfig) -> None:
        trained = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "top_k": max(sampling.top_k, 0),
            **_NEUTRAL,
        }
        for key, value in trained.items():
            given = getattr(self, key)
            given = max(given, 0) if key == "top_k" and given is not None else given
            if given is not None and given != value:
                why = f"{key} {given:g} differs from training's {value:g}"
                raise Refusal(400, f"{why}: leave it out", param=key)
        for key, value in (self.model_extra or {}).items():
            if key in _REFUSED and value not in (None, False, {}, [], 0):
                raise invalid(f"{key} would change the policy's distribution: leave it out", key)


def data_events(contents: Iterable[Mapping[str, Any]]) -> str:
    """OpenAI's server-sent events: without a name, and with a last one."""
    return "".join(f"data: {json.dumps(each)}\n\n" for each in contents) + "data: [DONE]\n\n"


def named_events(contents: Iterable[Mapping[str, Any]]) -> str:
    """Server-sent events named by the ``type`` of their content."""
    return "".join(f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in contents)


def stop_texts(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    given = [stop] if isinstance(stop, str) else stop or []
    return tuple(text for text in given if text)
