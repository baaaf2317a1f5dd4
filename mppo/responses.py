"""Responses to a request: what every rank knows of each, and the tokens where they arrived."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from mppo.batch import NO_WEIGHTS, OPEN, Prompt, Trajectory, inserted_tokens

K = TypeVar("K")


@dataclass(frozen=True)
class ResponseRow:
    """What every rank knows of one response.

    Args:
        prompt: the prompt.
        finish_reason: see ``Trajectory``.
        parts: (version of the weights, number of tokens) of its parts, in order.
        home: the rank that holds its tokens.
        routed: shape of its routed experts, (tokens, layers, k); None: the engine reports none.
    """

    prompt: Prompt
    finish_reason: str
    parts: tuple[tuple[int, int], ...]
    home: int
    routed: tuple[int, int, int] | None = None

    @classmethod
    def of(cls, trajectory: Trajectory, home: int) -> ResponseRow:
        """The row of a trajectory."""
        known = trajectory.prompt, trajectory.finish_reason, trajectory.parts
        return cls(*known, home, shape_of_experts(trajectory))

    @property
    def length(self) -> int:
        """Number of tokens after the prompt."""
        return sum(tokens for _, tokens in self.parts)

    @property
    def inserted(self) -> int:
        """Number of the environment's tokens among them."""
        return inserted_tokens(self.parts)

    @property
    def turns(self) -> int:
        """Number of turns of the policy."""
        return 1 + sum(version == NO_WEIGHTS for version, _ in self.parts)

    @property
    def is_unfinished(self) -> bool:
        """Whether more tokens are to be generated."""
        return self.finish_reason in ("abort", OPEN)


def shape_of_experts(trajectory: Trajectory) -> tuple[int, int, int] | None:
    """``ResponseRow.routed`` of a trajectory."""
    if trajectory.routed_experts is None:
        return None
    tokens, layers, chosen = trajectory.routed_experts.shape
    return tokens, layers, chosen


@dataclass(frozen=True)
class KeyedResponses(Generic[K]):
    """Some responses, each under a key.

    Args:
        rows: of all responses, the same on every rank, in the same order.
        held: trajectories of the responses whose home is this rank.
    """

    rows: Mapping[K, ResponseRow]
    held: Mapping[K, Trajectory]

    @staticmethod
    def of_one_rank(trajectories: Sequence[Trajectory]) -> Responses:
        """Responses that all lie on this rank, the only one."""
        rows = {index: ResponseRow.of(each, 0) for index, each in enumerate(trajectories)}
        return Responses(rows, dict(enumerate(trajectories)))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def table(self) -> list[ResponseRow]:
        """The rows, in order."""
        return list(self.rows.values())

    @property
    def trajectories(self) -> list[Trajectory]:
        """The trajectories on this rank, in order."""
        return [self.held[index] for index in self.rows if index in self.held]

    def select(self, keys: Iterable[K]) -> Responses:
        """The responses under some keys, numbered from 0 in this order."""
        chosen = list(enumerate(keys))
        return Responses(
            {place: self.rows[index] for place, index in chosen},
            {place: self.held[index] for place, index in chosen if index in self.held},
        )


Responses = KeyedResponses[int]
"""Responses by index, in ascending order."""
ResponsesBySample = KeyedResponses[tuple[int, int]]
"""Responses by prompt uid and sample number."""


def no_responses() -> ResponsesBySample:
    """No response."""
    return ResponsesBySample({}, {})


@dataclass
class PartialResponses:
    """Responses that no step has trained on yet.

    A response is kept because it was aborted when a batch was full, because other samples of its
    prompt are missing, or because it was generated ahead. The run owns these responses: engines
    read them and return the ones they did not use.

    Args:
        responses: by prompt uid and sample number.
    """

    responses: ResponsesBySample = field(default_factory=no_responses)


def concatenate_responses(parts: Iterable[Responses]) -> Responses:
    """All responses of several requests, numbered from 0."""
    rows: dict[int, ResponseRow] = {}
    held: dict[int, Trajectory] = {}
    for part in parts:
        first = len(rows)
        rows.update({first + place: row for place, row in enumerate(part.rows.values())})
        held.update(
            {
                first + place: part.held[index]
                for place, index in enumerate(part.rows)
                if index in part.held
            }
        )
    return Responses(rows, held)
