"""Ranks simulated together: their communications match, and their streams are ordered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mppo.simulation.gpu.accesses import Accesses
from mppo.simulation.gpu.clocks import Host, StreamClock
from mppo.simulation.gpu.ledger import Allocation
from mppo.simulation.records import RankRecord, Recorded
from mppo.simulation.together.matching import match

ROOT = Path(__file__).parents[2]
RACES = {
    "offload_without_record_stream": ("reuses the memory", "moved_storages.py"),
    "bucket_handed_over_before_it_is_copied": ("a server's loader", "transport/buckets.py"),
    "norm_before_the_reduction": ("models/optimizer.py", "param_and_grad_buffer.py"),
    "parts_used_before_they_arrive": ("the compute stream reads", "moved_storages.py"),
    "message_used_before_it_arrives": ("the compute stream reads", "pipeline/links.py"),
}
"""Planted mistakes, and the two places that the race names."""
OTHERS = {
    "gradient_sent_twice": ("mismatches", "rank 2: send of", "rank 0: recv of"),
    "maximum_instead_of_sum": ("mismatches", "('SUM',)", "('MAX',)"),
    "sends_awaited_at_once": ("hangs", "sends that wait for their receive", "pipeline/links.py"),
}
"""Planted mistakes, the kind of the finding, and words in it."""


@pytest.fixture(scope="module")
def planted() -> dict[str, dict[str, Any]]:
    """What is found among four ranks, without a mistake and with each."""
    environment = {k: v for k, v in os.environ.items() if k != "MPPO_DEVICE"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    program = str(ROOT / "tests" / "planted.py")
    found = subprocess.run(
        [sys.executable, "-W", "ignore", program, "none", *RACES, *OTHERS],
        capture_output=True, text=True, env=environment, cwd=ROOT,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    return {row.pop("name"): row for row in map(json.loads, found.stdout.splitlines())}


@pytest.mark.timeout(600)
def test_ranks_without_a_mistake_match_and_are_ordered(planted):
    found = planted["none"]
    assert (found["mismatches"], found["races"], found["hangs"]) == ([], [], [])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", RACES)
def test_a_race_names_both_places(name, planted):
    races = planted[name]["races"]
    assert any(all(place in race for place in RACES[name]) for race in races), races


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", OTHERS)
def test_a_mistake_between_ranks_is_found(name, planted):
    kind, *words = OTHERS[name]
    assert any(all(word in one for word in words) for one in planted[name][kind])


def _sum(line: str, shape: tuple[int, ...] = (4,), reduction: str = "SUM") -> Recorded:
    return Recorded("collective", "updating", line, "compute", "7", "TP", (0, 1),
                    operation="allreduce", form=((shape, "float32"), (reduction,)))  # fmt: skip


def _message(kind: Any, peer: int, line: str, tokens: int) -> Recorded:
    return Recorded(kind, "updating", line, "compute", "8", "PP", (0, 1), peer,
                    operation=kind, form=(((tokens, 8), "bfloat16"),))  # fmt: skip


def _exchange(line: str, to: tuple[int, ...], by: tuple[int, ...]) -> Recorded:
    return Recorded("collective", "updating", line, "compute", "9", "EP", (0, 1),
                    operation="alltoall_base", splits=(to, by))  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        ([_sum("a.py:1")], [_sum("b.py:2", shape=(5,))], "collective"),
        ([_sum("a.py:1")], [_sum("b.py:2", reduction="AVG")], "collective"),
        ([_sum("a.py:1")], [], "collective"),
        ([_message("send", 1, "a.py:1", 5)], [_message("receive", 0, "b.py:2", 6)], "message"),
        ([_message("send", 1, "a.py:1", 5)], [], "message"),
        ([_exchange("a.py:1", (2, 3), (2, 4))], [_exchange("b.py:2", (4, 1), (2, 1))], "split"),
    ],
)
def test_a_mismatch_shows_both_source_lines(first, second, kind):
    (found,) = match([RankRecord(0, first), RankRecord(1, second)])
    assert found.kind == kind
    assert "a.py:1" in found.describe()
    assert ("b.py:2" if second else "nothing more") in found.describe()


def test_what_no_simulated_rank_does_is_not_checked():
    assert not match([RankRecord(0, [_sum("a.py:1"), _message("send", 1, "a.py:2", 3)])])
    equal = [_exchange("a.py:1", (2, 3), (2, 4))], [_exchange("b.py:2", (4, 1), (3, 1))]
    assert not match([RankRecord(0, equal[0]), RankRecord(1, equal[1])])


class TwoStreams:
    """A host, a compute stream that owns the memory, and a stream for copies."""

    def __init__(self) -> None:
        self.host, self.accesses = Host(), Accesses()
        self.compute, self.copies = StreamClock("compute", 0), StreamClock("copies", 1)
        self.memory = Allocation(512, "", "", 1 << 40, 0)
        self.accesses.begin(self.memory, self.compute, "phase", "new.py:1")

    def run(self, stream: StreamClock, writes: bool, line: str, part: slice = slice(None)) -> None:
        self.host.launches_on(stream)
        stream.tick()
        x = torch.zeros(128)[part]
        self.accesses.access(self.memory, x, stream, writes, "phase", line)


def test_two_streams_race_unless_one_waits_for_the_other():
    two = TwoStreams()
    two.run(two.compute, True, "a.py:1")
    two.run(two.copies, False, "b.py:2")
    (race,) = two.accesses.races
    assert (race.first.line, race.second.line) == ("a.py:1", "b.py:2")
    two = TwoStreams()
    two.run(two.compute, True, "a.py:1")
    two.copies.join(two.compute.clock)
    two.run(two.copies, False, "b.py:2")
    two.run(two.compute, False, "c.py:3")  # two reads
    assert not two.accesses.races
    two.host.join(two.copies.clock)
    two.run(two.compute, True, "d.py:4")  # the host waited for the copies
    assert not two.accesses.races


def test_other_bytes_of_the_same_storage_do_not_race():
    two = TwoStreams()
    two.run(two.compute, True, "a.py:1", slice(0, 64))
    two.run(two.copies, True, "b.py:2", slice(64, 128))
    assert not two.accesses.races
    two.run(two.copies, True, "c.py:3", slice(63, 64))
    assert [race.second.line for race in two.accesses.races] == ["c.py:3"]


@pytest.mark.parametrize("cure", ["", "record_stream", "wait"])
def test_freed_memory_races_when_it_is_used_again(cure):
    two = TwoStreams()
    two.copies.join(two.compute.clock)
    two.run(two.copies, False, "copy.py:1")
    if cure == "record_stream":
        two.accesses.record_stream(two.memory, two.copies)
    two.accesses.end(two.memory)
    if cure == "wait":
        two.compute.join(two.copies.clock)
    two.accesses.begin(Allocation(512, "", "", 2 << 40, 1), two.compute, "phase", "reuse.py:2")
    lines = [(race.first.line, race.second.line) for race in two.accesses.races]
    assert lines == ([] if cure else [("copy.py:1", "reuse.py:2")])
