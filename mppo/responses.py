"""Responses to a request: what every rank knows of each, and the tokens where they arrived."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mppo.batch import Prompt, Trajectory


@dataclass(frozen=True)
class ResponseRow:
    """What every rank knows of one response.

    Args:
        prompt: the prompt.
        finish_reason: see ``Trajectory``.
        parts: (version of the weights, number of tokens) of its parts, in order.
        home: the rank that holds its tokens.
    """

    prompt: Prompt
    finish_reason: str
    parts: tuple[tuple[int, int], ...]
    home: int

    @classmethod
    def of(cls, trajectory: Trajectory, home: int) -> ResponseRow:
        """The row of a trajectory."""
        return cls(trajectory.prompt, trajectory.finish_reason, trajectory.parts, home)

    @property
    def length(self) -> int:
        """Number of generated tokens."""
        return sum(tokens for _, tokens in self.parts)


@dataclass(frozen=True)
class Responses:
    """Some responses, by index.

    Args:
        rows: of all responses, the same on every rank, in ascending order of the index.
        held: trajectories of the responses whose home is this rank.
    """

    rows: Mapping[int, ResponseRow]
    held: Mapping[int, Trajectory]

    @classmethod
    def of_one_rank(cls, trajectories: Sequence[Trajectory], home: int = 0) -> Responses:
        """Responses that all lie on this rank, whose number is ``home``."""
        rows = {index: ResponseRow.of(each, home) for index, each in enumerate(trajectories)}
        return cls(rows, dict(enumerate(trajectories)))

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

    def select(self, indices: Iterable[int]) -> Responses:
        """The responses at some indices, numbered from 0 in this order."""
        chosen = list(enumerate(indices))
        return Responses(
            {place: self.rows[index] for place, index in chosen},
            {place: self.held[index] for place, index in chosen if index in self.held},
        )


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
