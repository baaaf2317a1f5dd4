"""What an agent gets after each turn of the policy, and what it returns."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from mppo.rewards.result import NoScore, number
from mppo.safety.foreign_text import json_line
from mppo.safety.python_file import describe_error

Message = Mapping[str, Any]
"""A chat message: ``role`` and ``content``."""
KEYS = ("done", "text", "messages", "reward", "numbers", "state")
"""Keys of an agent's reply."""
_SHOWN = 80
_LONGEST = 1 << 20
"""Most characters of an environment's turn: a longer one would only cost time and memory."""


@dataclass(frozen=True)
class Conversation:
    """A conversation after a turn of the policy.

    Args:
        text: the policy's last turn, without special tokens.
        messages: the prompt's messages (its text as a user's message if it has none), then the
            turns of policy and environment; the last message is the assistant's ``text``.
        turn: number of the policy's turns so far, from 1.
        is_last: no further turn follows, whatever the agent returns: ``rollout.agent.max_turns`` is
            reached, or the policy's turn was cut off.
        is_cut: the last turn was cut off by ``data.max_response_length``.
        data_source, ground_truth: of the data row.
        extra_info: of the data row, as a reward function gets it.
        state: what the agent returned under ``state`` after the turn before; None at first.
    """

    text: str
    messages: Sequence[Message]
    turn: int
    is_last: bool
    is_cut: bool
    data_source: str
    ground_truth: str
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    state: Any = None


@dataclass(frozen=True)
class Reply:
    """An agent's reply.

    Args:
        environment: the text or the messages that follow the policy's turn; None: the conversation
            has ended.
        reward: the score if the conversation ends here; None: that of an earlier reply.
        numbers: further numbers by name.
        state: for the agent's next call.
    """

    environment: str | list[dict[str, Any]] | None = None
    reward: float | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    state: Any = None

    def to_json(self) -> str:
        """The reply as JSON, without halves of surrogate pairs: a tool may return the policy's.
        NoScore if the state or a message is not JSON."""
        values = [self.environment, self.reward, dict(self.numbers), self.state]
        try:
            return json_line(values)
        except (TypeError, ValueError) as error:
            raise NoScore(f"holds a state or a message that is not JSON: {error}") from None

    @classmethod
    def from_json(cls, text: str) -> Reply:
        """The inverse of ``to_json``."""
        return cls(*json.loads(text))


def read_reply(result: Any) -> Reply:
    """Read what an agent returned: None, a text, a list of messages, or a dict with ``KEYS``.
    NoScore if it returned something else; the message continues "its reply"."""
    if result is None:
        return Reply()
    if isinstance(result, str | list | tuple):
        return Reply(_environment(result))
    if not isinstance(result, Mapping):
        forms = "neither None nor a text, a list of messages or a dict"
        raise NoScore(f"is {_shown(result)}, {forms}")
    unknown = [str(key) for key in result if key not in KEYS]
    if unknown:
        raise NoScore(f"holds {', '.join(unknown)}; its keys are {', '.join(KEYS)}")
    given = [result[key] for key in ("text", "messages") if result.get(key) is not None]
    done = result.get("done", not given)
    if not isinstance(done, bool) or len(given) != (not done):
        raise NoScore("is unclear: give either done: true, or text, or messages")
    given_numbers = result.get("numbers") or {}
    if not isinstance(given_numbers, Mapping):
        raise NoScore(f"has the numbers {_shown(given_numbers)}, not a mapping")
    numbers = {str(name): number(value) for name, value in given_numbers.items()}
    finite = {name: value for name, value in numbers.items() if value is not None}
    environment = _environment(given[0]) if given else None
    return Reply(environment, _reward(result.get("reward")), finite, result.get("state"))


def describe_failure(error: BaseException) -> str:
    """What an agent's call raised, or why its reply is none."""
    return f"its reply {error}" if isinstance(error, NoScore) else describe_error(error)


def _environment(value: Any) -> str | list[dict[str, Any]]:
    """A text, or messages; NoScore if it is neither, or empty, or too long."""
    said = value if isinstance(value, list | tuple) else [{"content": value}]
    texts = [each.get("content") for each in said if isinstance(each, Mapping)]
    if sum(len(text) for text in texts if isinstance(text, str)) > _LONGEST:
        raise NoScore(f"has more than {_LONGEST} characters")
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list | tuple) and value and all(map(_is_message, value)):
        return [dict(message) for message in value]
    why = "neither a text nor messages with role and content, or is empty"
    raise NoScore(f"is {_shown(value)}, which is {why}")


def _is_message(value: Any) -> bool:
    if not isinstance(value, Mapping) or not isinstance(value.get("content"), str):
        return False
    return isinstance(value.get("role"), str) and value["role"] != "assistant"


def _reward(value: Any) -> float | None:
    found = number(value)
    if value is not None and (found is None or not math.isfinite(found)):
        raise NoScore(f"has the reward {_shown(value)}, not a finite number")
    return found


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def make_agent(found: Any, arguments: Mapping[str, Any]) -> Callable[[Conversation], Any]:
    """A callable of one conversation, which may return a coroutine, from the user's function or
    class; TypeError if the arguments do not fit."""
    if inspect.isclass(found):
        agent = cast("Callable[[Conversation], Any]", found(**arguments))
        inspect.signature(agent).bind(None)
        return agent
    inspect.signature(found).bind(None, **arguments)
    return partial(found, **arguments)


def is_async(agent: Callable[..., Any]) -> bool:
    """Whether calls of an agent are coroutines."""
    called = (agent, getattr(agent, "__call__", None))  # noqa: B004  # an object's own
    return any(map(inspect.iscoroutinefunction, called))
