"""The tokens of some dumped episodes for the report; an episode of several sequences is a tree."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mppo.dumps.step_dump import UNREADABLE, SequenceRow, dumped_steps, read_header_of
from mppo.report.history import evenly_spaced
from mppo.report.html.reduced import rounded
from mppo.safety.redact import redact_text

if TYPE_CHECKING:  # imports torch
    from mppo.dumps.token_table import TokenTable

_DUMPS, _EPISODES, _BRANCHES, _TOKENS = 4, 4, 4, 400
"""Dumped steps in a page, episodes of each, and the most sequences of an episode and tokens of a
sequence."""

Plain = dict[str, Any]


def token_trees(folder: Path, last: int) -> list[Plain]:
    """Sequences of some dumped steps up to ``last``: of the best and the worst episode, and of
    others between.

    ``parent`` is the earlier sequence of its episode (None: it is the first) with which a sequence
    has the most tokens in common at the beginning: ``shared``. ``sequences`` is the number of the
    episode's sequences.
    """
    steps = {step: path for step, path in dumped_steps(folder).items() if step <= last}
    numbers, found = list(steps), []
    for step in [numbers[place] for place in evenly_spaced(len(numbers), _DUMPS)]:
        try:
            found += _trees_of(step, steps[step])
        except UNREADABLE as error:
            why = redact_text(" ".join(str(error).split()))
            found.append({"step": step, "error": f"the dump cannot be read: {why}"})
    return found


def _trees_of(step: int, folder: Path) -> list[Plain]:
    from mppo.dumps.token_table import read_token_tables  # imports torch

    header = read_header_of(folder)
    episodes = _episodes(header.rows)
    order = sorted(episodes, key=lambda members: -header.rows[members[0]].score)
    chosen = sorted(order[place] for place in evenly_spaced(len(order), _EPISODES))
    indices = sorted(index for members in chosen for index in members[:_BRANCHES])
    tables = read_token_tables(folder, header, indices, _TOKENS)
    table_of = dict(zip(indices, tables, strict=True))
    found: list[Plain] = []
    for members in chosen:
        for place, index in enumerate(members[:_BRANCHES]):
            parent, shared = _parent(table_of, members[:place], index)
            tree = {"parent": parent, "shared": shared, "sequences": len(members)}
            found.append(_plain(step, index, table_of[index]) | tree)
    return found


def _episodes(rows: Sequence[SequenceRow]) -> list[list[int]]:
    """The indices of each episode's sequences; of an older dump, each sequence is an episode."""
    members: dict[tuple[bool, int], list[int]] = {}
    for index, row in enumerate(rows):
        key = (False, index) if row.episode is None else (True, row.episode)
        members.setdefault(key, []).append(index)
    return list(members.values())


def _parent(
    tables: dict[int, TokenTable], earlier: Sequence[int], index: int
) -> tuple[int | None, int]:
    """The earlier sequence with the longest common beginning, and its length in tokens."""
    if not earlier:
        return None, 0
    shared = {}
    for other in earlier:
        pairs = zip(tables[other].tokens, tables[index].tokens)
        shared[other] = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    parent = max(earlier, key=lambda other: shared[other])  # the first of equal ones
    return parent, shared[parent]


def _plain(step: int, index: int, table: TokenTable) -> Plain:
    return {
        "step": step,
        "sequence": index,
        "source": redact_text(table.row.data_source),
        "truth": redact_text(table.row.ground_truth),
        "score": rounded([table.row.score])[0],
        "end": table.row.finish_reason,
        "prompt_tokens": table.prompt_tokens,
        "by_environment": [i for i, flag in enumerate(table.by_environment) if flag],
        "pieces": list(table.pieces),
        "numbers": {name: rounded(values) for name, values in table.numbers.items()},
    }
