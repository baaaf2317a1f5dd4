"""One rank of a run, executed on a simulated GPU at the recipe's size."""

from __future__ import annotations

import gc
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from mppo.planning.residency import REWARD
from mppo.planning.verdict import CHECKPOINT
from mppo.supervision.phase import current, phase
from mppo_simulate.case import RankCase
from mppo_simulate.gpu import (
    attention_kernels,
    cuda_namespace,
    te_stand_in,
    torch_guard,
    world,
)
from mppo_simulate.gpu.counters import Collective, Counters, Wait
from mppo_simulate.gpu.device_mode import SimulatedGpu
from mppo_simulate.gpu.ledger import Allocation, Ledger, Peak
from mppo_simulate.gpu.recorder import RankRecorder
from mppo_simulate.inputs import by_role, longest_batch
from mppo_simulate.records import RankRecord

if TYPE_CHECKING:
    from mppo.models.role import Role
    from mppo.trainer.run_roles import Roles

_STEP = re.compile(r", step (\d+)")
LOWEST_PEAK = 0.6
"""A source line is kept in ``PhaseResult.by_line`` if its own peak exceeds this share of the
phase's peak, because it may be the largest at another depth."""
SMALL = "small allocations"
"""Purpose of allocations that are too small for the ledger's list."""
GATHER_BUFFER = "gather buffer"
"""Purpose of Megatron's permanent buffer for gathered sequence-parallel activations."""
TE_BUFFERS = "Transformer Engine's buffers"
"""Purpose of the tensors that Transformer Engine keeps (``te_stand_in.permanent_buffers``)."""
LASTING_BUFFERS = (GATHER_BUFFER, TE_BUFFERS)
"""Purposes of what a pass allocates when it first needs it and never frees."""
_PLACING = "placing every part"
_TOTAL_STEPS = 100
"""Length of the learning-rate schedule in PPO steps; it affects no tensor's size."""


@dataclass
class PhaseResult:
    """Memory and counts of a phase on this rank; the counts are those of the last step.

    Args:
        name: name of the phase.
        peak: largest number of allocated bytes in the phase, over all steps.
        composition: bytes by purpose at the peak.
        moment: time of the peak, as the number of allocations before it.
        line: source line whose allocation reached the peak.
        operations: number of kernels started.
        micro_batches: number of micro-batches that the rank processed.
        waits: number of times that the host waited for the GPU, by place.
        calls: number of collectives, by kind.
        nbytes: bytes of the tensors passed to collectives, inputs and outputs, by kind.
        by_line: bytes by purpose at the peak of each source line with large allocations.
    """

    name: str
    peak: int = 0
    composition: Counter[str] = field(default_factory=Counter)
    moment: int = 0
    line: str = ""
    operations: float = 0
    micro_batches: float = 0
    waits: Counter[Wait] = field(default_factory=Counter)
    calls: Counter[Collective] = field(default_factory=Counter)
    nbytes: Counter[Collective] = field(default_factory=Counter)
    by_line: dict[str, Counter[str]] = field(default_factory=dict)


@dataclass
class RankResult:
    """The result of simulating a rank.

    Args:
        rank: the rank.
        coordinates: its coordinates in each role's layout, by role name.
        phases: the phases in order.
        resident: bytes by purpose that are allocated during generation.
        complete: most bytes of every purpose between the passes of any phase.
        communicators: number of NCCL's communicators that it uses.
        attention: number of calls by attention kernel.
        unknown: number of reads of an unknown floating-point number, by source line.
        seconds: duration of the simulation.
        allocations: the ledger's list of allocations, for a timeline.
        pinned: bytes of host memory that the parts of each role have taken.
        record: what the rank did, in order, and its races; empty without ``RankCase.record``.
    """

    rank: int
    coordinates: dict[str, Any]
    phases: list[PhaseResult]
    resident: Counter[str]
    complete: Counter[str]
    communicators: int
    attention: Counter[str]
    unknown: Counter[str]
    seconds: float
    allocations: list[Allocation] = field(default_factory=list)
    pinned: Counter[str] = field(default_factory=Counter)
    record: RankRecord = field(default_factory=lambda: RankRecord(0))

    @property
    def peak(self) -> PhaseResult:
        """The phase with the largest peak."""
        return max(self.phases, key=lambda found: found.peak)

    def lasting_peak(self, phase: PhaseResult) -> int:
        """A phase's peak from the second step on, when every lasting buffer exists.

        Another moment than the first step's may then be the largest.
        """
        if phase.name.startswith("building"):
            return phase.peak
        moments = [(phase.peak, phase.composition)]
        moments += [(found.total(), found) for found in phase.by_line.values()]
        return max(
            nbytes + sum(self.resident[b] - found[b] for b in LASTING_BUFFERS)
            for nbytes, found in moments
        )


@cache
def _label(path: str) -> tuple[int, str]:
    """Parse step and innermost phase from the text of ``mppo.supervision.phase.current``."""
    step = _STEP.search(path)
    return int(step[1]) if step else 0, _STEP.sub("", path.split(" > ")[-1])


def current_phase() -> str:
    """Name of the innermost current phase, without the step."""
    return _label(current())[1]


def simulate_rank(case: RankCase) -> RankResult:
    """Build the roles of a rank and run PPO steps on it, with the code that runs on GPUs.

    This changes torch in the process irreversibly; call it in a process of its own (``isolated``).

    Raises:
        UnknownValue: the code reads an unknown value that decides its control flow or a shape.
        Exception: an error of the simulated code, such as tensors on different devices.
    """
    began = time.perf_counter()
    ledger, counters = Ledger(current_phase), Counters(current_phase)
    recorder = RankRecorder(current_phase, ledger, case.record)
    torch_guard.install()
    device = case.rank % case.gpus_per_node
    cuda_namespace.install(ledger, counters, recorder, case.gpu, device, case.gpus_per_node)
    world.install(case.rank, case.world_size, counters, recorder)
    if case.transformer_engine:
        te_stand_in.accept_simulated_tensors(counters.operation)
    with SimulatedGpu(ledger, counters, recorder):
        run = _Simulation(case, ledger, counters, recorder)
        run.build()
        for step in range(1, case.steps + 1):
            run.step(step)
        run.wait()
        run.save()
        run.place_everything()
    return run.result(time.perf_counter() - began)


class _Simulation:
    """The simulation of one rank."""

    def __init__(
        self, case: RankCase, ledger: Ledger, counters: Counters, recorder: RankRecorder
    ) -> None:
        from mppo.parallel import device
        from mppo_simulate import other_ranks

        self.case, self.ledger, self.counters, self.recorder = case, ledger, counters, recorder
        device.prepare_megatron()
        device.pinned_memory = self._pinned_memory
        roles = {role.name: (role, case.hf_configs[role.name]) for role in case.recipe.roles()}
        other_ranks.install(roles, case.world_size, counters, recorder, case.uneven)
        self.resident: Counter[str] = Counter()
        self.complete: Counter[str] = Counter()

    def _pinned_memory(self, nbytes: int) -> torch.Tensor:
        """Replacement for ``device.pinned_memory``, without content."""
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    def build(self) -> None:
        """Build the roles as ``mppo.trainer.run_setup`` does."""
        from mppo.parallel.groups import GroupRegistry
        from mppo.trainer.run_roles import Roles

        recipe = by_role(self.case.recipe)
        self.roles: Roles = Roles(
            recipe,
            Path("actor"),
            lambda path, *rest: self.case.hf_configs[str(path)],
            GroupRegistry(recipe.trainer.seed),
            _TOTAL_STEPS,
            table=self.case.table,
        )
        roles = self.roles
        present = [roles.actor, roles.critic, roles.ref, roles.reward_model]
        self.present: list[Role] = [role for role in present if role is not None]
        self._assign()

    def step(self, step: int) -> None:
        """Run an iteration as ``mppo.trainer.loop`` does, from responses to weight sync."""
        from mppo.rewards.reward_model.model_scorer import SCORING, model_scores, scoring_batch
        from mppo.trainer.advantages import estimate, kl_controller
        from mppo.trainer.forward_phase import ForwardPhase
        from mppo.trainer.update.update_stage import UpdatePhase

        self.counters.clear()
        recipe = self.case.recipe
        batch = longest_batch(recipe, self.case.hf_configs["actor"], self.case.uneven)
        if self.roles.reward_model is not None:
            with phase("reward", step), phase(SCORING):
                self.roles.placement.enter(REWARD)
                lengths = batch.lengths_B.tolist()
                held = dict(enumerate(batch.tokens_T.split(lengths)))
                scored = scoring_batch(held, lengths, batch.home_B.tolist())
                model_scores(self.roles.reward_model, scored)
            self._assign_buffers()
        with phase("log_probs", step):
            forward = ForwardPhase(self.roles, batch)
            for roles in forward.passes:
                forward.compute(roles)
                self._assign_buffers()
            outputs = forward.outputs()
        with phase("adv", step):
            kl = kl_controller(recipe.algorithm.kl_ctrl).coef
            experience = estimate(outputs, recipe.algorithm, kl)
        with phase("update", step):
            update = UpdatePhase(self.roles, experience, step, actor_frozen=False)
            update.run()
            self._assign()
            update.metrics()
        placing = self.roles.placement.sending_weights()
        with phase("update_weights", step), placing, phase("weight sync", step):
            self._stream()

    def wait(self) -> None:
        """Count what is allocated while the engine generates."""
        gc.collect()
        self.resident = self.ledger.composition()

    def _stream(self) -> None:
        """Stream the weights into the two buffers that servers read (``TensorTransport``)."""
        from mppo.parallel import device
        from mppo.rollout.transport.buckets import SharedBuffer

        buffers = [SharedBuffer(device.device()) for _ in range(2)]
        stream = self.roles.actor.weights.stream(self.case.recipe.rollout.sync_bucket_mb << 20)
        for number, bucket in enumerate(stream):
            buffers[number % 2].fill(bucket)
            self.recorder.process_reads(buffers[number % 2].content, "a server's loader")
        del buffers, bucket
        gc.collect()

    def save(self) -> None:
        """Build the sharded state of a checkpoint."""
        from mppo.checkpoint.role_state import sharded_state

        with phase(CHECKPOINT):
            for role in self.roles.trained.values():
                with role.groups.active():
                    sharded_state(role)

    def place_everything(self) -> None:
        """Count the purposes of all parts, which may never be on the GPU at the same time."""
        with phase(_PLACING):
            for name in self.roles.placement.phases:
                self.roles.placement.enter(name)
                self.complete |= self.ledger.composition()

    def _assign(self) -> None:
        """Assign purposes to the tensors that live as long as the roles."""
        self._assign_buffers()
        for role in self.present:
            name, assign = role.name, self.ledger.assign
            assign((p for stage in role.stages for p in stage.parameters()), f"{name} weights")
            if role.optimizer is None:
                continue
            for chunk in cast("list[Any]", role.chunks):  # wrapped in DDP
                for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                    assign([buffer.param_data], f"{name} weights")
                    assign([buffer.grad_data], f"{name} gradients")
            for part in role.optimizer.parts:
                groups = part.optimizer.param_groups
                assign((p for group in groups for p in group["params"]), f"{name} main weights")
                states = part.optimizer.state.values()
                assign(
                    (x for state in states for x in state.values() if isinstance(x, torch.Tensor)),
                    f"{name} moments",
                )

    def _assign_buffers(self) -> None:
        """Assign purposes to the lasting buffers; a pass that needs a larger one replaces it."""
        from megatron.core import parallel_state

        if self.case.transformer_engine:
            self.ledger.assign(te_stand_in.permanent_buffers(), TE_BUFFERS)
        for role in self.present:
            with role.groups.active():
                buffers = parallel_state.get_global_memory_buffer().buffer
                self.ledger.assign(buffers.values(), GATHER_BUFFER)

    def result(self, seconds: float) -> RankResult:
        """Collect ledger and counters in a result."""
        counters, phases = self.counters, []
        for name, peak in self.ledger.peaks.items():
            if name == _PLACING:
                continue
            found = PhaseResult(name, peak.size, self._composition(peak), peak.moment, peak.line)
            found.by_line = {
                line: self._composition(other)
                for (where, line), other in self.ledger.line_peaks.items()
                if where == name and other.size > LOWEST_PEAK * peak.size
            }
            found.operations = counters.operations[name]
            found.micro_batches = counters.micro_batches[name]
            for (where, place), count in counters.waits.items():
                found.waits[place] += count * (where == name)
            for (where, kind), count in counters.calls.items():
                found.calls[kind] += count * (where == name)
                found.nbytes[kind] += counters.bytes[where, kind] * (where == name)
            for counts in (found.waits, found.calls, found.nbytes):
                for key in [key for key, count in counts.items() if not count]:
                    del counts[key]
            phases.append(found)
        return RankResult(
            rank=self.case.rank,
            coordinates={role.name: role.groups.coordinates for role in self.present},
            phases=phases,
            resident=self.resident,
            complete=self.complete,
            communicators=len(counters.communicators),
            attention=Counter(attention_kernels.calls),
            unknown=Counter(counters.unknown),
            seconds=seconds,
            allocations=self.ledger.allocations,
            pinned=Counter(self.roles.placement.host_by_role),
            record=RankRecord(
                self.case.rank,
                self.recorder.records,
                self.recorder.races,
            ),
        )

    def _composition(self, peak: Peak) -> Counter[str]:
        found = self.ledger.composition(peak.moment)
        found[SMALL] = peak.size - found.total()
        return found
