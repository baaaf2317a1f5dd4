"""Ranks simulated together: their communications match, and their streams are ordered."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import planted_races  # noqa: F401  adds to MISTAKES
import pytest
import torch
from mppo_simulate.gpu.accesses import Accesses
from mppo_simulate.gpu.clocks import Host, StreamClock
from mppo_simulate.gpu.ledger import Allocation
from mppo_simulate.records import RankRecord, Recorded
from mppo_simulate.together.matching import match
from planted_mistakes import MISTAKES

ROOT, HERE = Path(__file__).parents[3], Path(__file__).parent
COMPUTE = "the compute stream"
NCCL = "NCCL's stream"
FOUND = {
    # between streams: what the second access does, and the place of the first
    "offload_without_record_stream":
        ("races", "reuses the memory", "stream 1", "moved_storages.py"),
    "activations_stored_without_record_stream":
        ("races", "reuses the memory", "stream 2", "host_copies.py"),
    "activations_used_before_they_are_back":
        ("races", f"{COMPUTE} reads", "stream 2", "writes at mppo/parallel/host_copies.py"),
    "parts_used_before_they_arrive":
        ("races", f"{COMPUTE} reads", "stream 1", "writes at mppo/parallel/moved_storages.py"),
    "parts_copied_before_they_are_written":
        ("races", "moved_storages.py", COMPUTE, "writes at mppo/models/adam.py"),
    "bucket_handed_over_before_it_is_copied":
        ("races", "a server's loader", COMPUTE, "writes at mppo/rollout/transport/buckets.py"),
    "bucket_copied_before_its_broadcast_ends":
        ("races", "reads at mppo/rollout/transport/buckets.py", NCCL, "PIPELINE_MODEL_PARALLEL"),
    "norm_before_the_reduction":
        ("races", "mppo/models/optimizer.py", NCCL, "param_and_grad_buffer.py"),
    "norm_read_before_its_sum":
        ("races", "reads at mppo/models/optimizer.py", NCCL, "writes at mppo/models/optimizer.py"),
    "weights_used_before_they_are_gathered":
        ("races", ", updating ", "reads at megatron/core/tensor_parallel", NCCL,
         "writes at megatron/core/distributed/param_and_grad_buffer.py"),
    "weights_sent_before_they_are_gathered":
        ("races", "reads at mppo/weights/copies.py", NCCL,
         "writes at megatron/core/distributed/param_and_grad_buffer.py"),
    "gradients_reduced_before_the_last_pass":
        ("races", "writes at megatron/core/distributed/distributed_data_parallel.py", NCCL,
         "reads at megatron/core/distributed/param_and_grad_buffer.py"),
    "message_used_before_it_arrives":
        ("races", f"{COMPUTE} reads", NCCL, "writes at mppo/pipeline/links.py"),
    "message_buffer_reused_before_it_is_sent":
        ("races", f"{COMPUTE} writes", NCCL, "reads at mppo/pipeline/links.py"),
    "outputs_freed_while_they_are_sent":
        ("races", "reuses the memory", NCCL, "reads at mppo/pipeline/links"),
    "numbers_read_before_they_are_copied":
        ("races", "updating actor", "the host reads at mppo/models/role.py", COMPUTE, "writes at"),
    "pinned_tokens_overwritten_while_they_are_copied":
        ("races", "the host writes", COMPUTE, "reads at extras/simulate/tests/planted_races.py"),
    "weights_leave_before_they_are_sent":
        ("races", "reads at mppo/weights/copies.py", "freed at mppo/parallel/moved_storages.py"),
    "gradients_leave_before_the_step":
        ("races", "stepping actor", "mppo/models/adam.py", "freed at", "param_and_grad_buffer.py"),
    # between ranks
    "gradient_sent_twice":
        ("mismatches", "PIPELINE_BACK", "rank 2: send of ((1,)", "rank 0: recv of ((128, "),
    "gradient_sent_in_another_group":
        ("mismatches", "PIPELINE_BACK", "rank 2: nothing more", "rank 0: recv of"),
    "gradient_sent_in_float32":
        ("mismatches", "PIPELINE_BACK", "256), 'float32')", "256), 'bfloat16')"),
    "gradient_received_into_another_micro_batch":
        ("error", "invalid gradient", "[128, 1, 256]", "[116, 1, 256]"),
    "fewer_micro_batches_on_a_stage":
        ("mismatches", "from rank 0 to 2", "send of ((128, ", "recv of ((244, "),
    "maximum_instead_of_sum":
        ("mismatches", "('SUM',) at mppo/models/role.py", "('MAX',)"),
    "roles_in_another_order":
        ("mismatches", "rank 0: allreduce of ((7,)", "rank 1: allreduce of ((12,)"),
    "update_ended_by_one_rank":
        ("mismatches", "rank 0: reduce_scatter", "param_and_grad_buffer.py", "1: nothing more"),
    "barrier_of_the_first_rank":
        ("mismatches", "rank 0: barrier", "rank 1: nothing more"),
    "norm_summed_over_replicas":
        ("mismatches", "OPTIMIZER_INSTANCE", "at mppo/models/optimizer.py", "1: nothing more"),
    "bucket_broadcast_from_another_stage":
        ("mismatches", "('from', 0) at mppo/weights/stream.py", "('from', 1)"),
    "experts_reduced_over_all_replicas":
        ("mismatches", "DATA_PARALLEL_GROUP_WITH_CP", "rank 1: reduce_scatter",
         "param_and_grad_buffer.py"),
    "rows_to_and_from_experts_exchanged":
        ("error", "all-to-all of 2 ranks: splits", "tensor_parallel/mappings.py"),
    "objects_gathered_in_a_pass":
        ("mismatches", "rank 0: allreduce", "mppo/models/role.py", "rank 1: all_gather_object"),
    "tokens_left_on_the_host":
        ("error", "on the same device", "cuda:0 and cpu"),
    # waits for ever
    "sends_awaited_at_once":
        ("hangs", "1 hardware queue:", "receive in", "send in", "mppo/pipeline/links.py"),
    "device_awaited_with_a_posted_receive":
        ("hangs", "1 hardware queue:", "receive in", "simulate/tests/planted_mistakes.py"),
    "receives_posted_a_pass_early":
        ("hangs", "buffered sends", "for the device after every kernel:", "receive in",
         "mppo/pipeline/links.py"),
    "directions_share_a_group":
        ("hangs", "32 hardware queues:", "receive in", "send in", "mppo/pipeline/links.py"),
    "ring_without_a_batch":
        ("hangs", "1 hardware queue:", "rank 1: receive in", "rank 0: send in"),
}  # fmt: skip
"""By planted mistake: the kind of the finding, and words of it in their order."""
PROGRAMS = ("two roles", "one role", "interleaved", "mixture")


@pytest.fixture(scope="module")
def planted() -> dict[str, dict[str, Any]]:
    """What is found among the ranks of small programs, without a mistake and with each."""
    environment = {k: v for k, v in os.environ.items() if k != "MPPO_DEVICE"}
    environment |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}:{HERE.parent}",
    }
    program = str(HERE / "planted.py")
    found = subprocess.run(
        [sys.executable, "-W", "ignore", program, *PROGRAMS, *FOUND],
        capture_output=True, text=True, env=environment, cwd=ROOT,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    return {row.pop("name"): row for row in map(json.loads, found.stdout.splitlines())}


def test_every_planted_mistake_is_looked_for_and_documented():
    assert set(FOUND) == set(MISTAKES)
    page = (ROOT / "docs" / "simulation.md").read_text()
    table = page.partition("| planted | found as |\n")[2].partition("\n\n")[0]
    _, *rows = table.splitlines()
    assert len(rows) == len(FOUND)


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", PROGRAMS)
def test_ranks_without_a_mistake_match_and_are_ordered(name, planted):
    assert planted[name] == {"mismatches": [], "races": [], "hangs": []}


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", FOUND)
def test_a_planted_mistake_is_found_at_its_place(name, planted):
    kind, *words = FOUND[name]
    pattern = re.compile(".*".join(map(re.escape, words)), re.DOTALL)
    findings = planted[name].get(kind, [])
    assert any(map(pattern.search, [findings] if kind == "error" else findings)), planted[name]


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


def test_what_reads_memory_that_was_freed_is_found():
    two = TwoStreams()
    two.accesses.end(two.memory)
    freed = two.memory = Allocation(0, "", "", 3 << 40, 1)  # a storage that is resized to nothing
    two.accesses.begin(freed, two.compute, "phase", "free.py:1")
    two.run(two.compute, False, "read.py:2", slice(0, 0))
    two.run(two.compute, False, "read.py:2", slice(64, 64))
    assert not two.accesses.races
    two.run(two.compute, False, "read.py:3")
    (race,) = two.accesses.races
    assert "reads at read.py:3 memory that was freed at free.py:1" in race.describe()


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
