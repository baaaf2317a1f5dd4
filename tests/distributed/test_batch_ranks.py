"""A batch of a fixed size takes fewer bytes on each rank the more ranks there are."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from ranks import start_ranks

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from batch_ranks import path

PROMPTS = 4


def largest(folder: Path, world: int, tensor_parallel: int = 1) -> dict[str, float]:
    """The bytes of the rank that has most, from the servers' answers to a pass."""
    folder.mkdir()
    start_ranks(path, (world, folder, PROMPTS, tensor_parallel), world)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
    return {name: max(numbers[name] for numbers in ranks) for name in ("bytes/held", "bytes/share")}


@pytest.mark.distributed
def test_bytes_of_a_rank_are_those_of_the_batch_over_the_ranks(tmp_path):
    alone = largest(tmp_path / "1", 1)
    apart = largest(tmp_path / "4", 4)
    for name, found in apart.items():
        assert found < 1.1 * alone[name] / 4
    pairs = largest(tmp_path / "pairs", 4, tensor_parallel=2)
    assert pairs["bytes/held"] == apart["bytes/held"]
    assert pairs["bytes/share"] < 2.1 * apart["bytes/share"]
