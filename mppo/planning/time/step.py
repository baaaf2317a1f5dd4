"""Seconds of the phases of one PPO step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mppo.config.schedule import ScheduleKind
from mppo.pipeline.actions import RoleWork
from mppo.pipeline.schedule import make_schedule
from mppo.planning.time.cost import Cost
from mppo.planning.time.generation import EnginePasses, GenerationTime, Servers
from mppo.planning.time.kernels import Kernels
from mppo.planning.time.layer import BYTES, STREAMED
from mppo.planning.time.links import EFFICIENCY, Group, collective_seconds
from mppo.planning.time.role_load import RoleLoad, RolePasses, StepSequences

PASSES = {
    "actor": "old log-probabilities",
    "ref": "reference",
    "critic": "values",
    "reward_model": "reward model",
}
"""What a role's pass before the update computes."""
_SIMULATED = 3
"""Mini-batches of an update whose schedule is simulated; the others take as long."""


@dataclass(frozen=True)
class Phase:
    """A phase of a step.

    Args:
        name: what it does.
        seconds: predicted seconds.
        spent: the same by what they are spent on.
        role: the role that computes; None: none does.
        operations: operations that count for its MFU, over all ranks.
    """

    name: str
    seconds: float
    spent: Mapping[str, float]
    role: str | None = None
    operations: float = 0.0

    @property
    def bound(self) -> str:
        """What takes the most of its time."""
        return max(self.spent, key=lambda kind: self.spent[kind])


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a step.

    Args:
        phases: its phases, in order.
        tokens: tokens of prompts and responses.
        gpus: number of GPUs.
        peak: peak of a GPU, operations per second.
        source: where the times of kernels come from.
        overlapped: generation runs beside training, on other GPUs.
    """

    phases: tuple[Phase, ...]
    tokens: float
    gpus: int
    peak: float
    source: str
    overlapped: bool = False

    @property
    def seconds(self) -> float:
        """Seconds of the step: the sum of its phases, or of the longer of both sides."""
        generation = sum(phase.seconds for phase in self.phases if phase.name == "generation")
        rest = sum(phase.seconds for phase in self.phases) - generation
        return max(generation, rest) if self.overlapped else generation + rest

    @property
    def throughput(self) -> float:
        """Tokens per second and GPU."""
        return self.tokens / self.seconds / self.gpus

    def utilization(self, phase: Phase) -> float | None:
        """Share of the peak that a phase's operations reach on all GPUs (MFU)."""
        if not phase.operations:
            return None
        return phase.operations / (phase.seconds * self.gpus * self.peak)


@dataclass(frozen=True)
class StepLoad:
    """What a step computes.

    Args:
        sequences: its sequences.
        roles: its roles, the actor first.
        servers: the engines that generate.
        schedule: the kind of schedule of an update.
        measured: roles that pass over all sequences before the update.
        gpus: number of all GPUs, those of generation included.
        copied: bytes that a rank copies from its host in a step.
        overlapped: generation runs beside training, on other GPUs.
    """

    sequences: StepSequences
    roles: Sequence[RoleLoad]
    servers: Servers
    schedule: ScheduleKind
    measured: Sequence[str]
    gpus: int
    copied: float = 0.0
    overlapped: bool = False


def predict_step(load: StepLoad, kernels: Kernels) -> Prediction:
    """Predict the time of a step.

    Rewards of functions, agents' time, checkpoints and validation are not in it.

    Args:
        load: what it computes.
        kernels: the GPU.
    """
    phases = (predict_generation(load, kernels), *predict_training(load, kernels))
    return Prediction(
        *(phases, load.sequences.tokens, load.gpus, kernels.system.flops, kernels.source),
        load.overlapped,
    )


def predict_generation(load: StepLoad, kernels: Kernels) -> Phase:
    """Predict the time of generation. For the arguments see ``predict_step``."""
    actor = load.roles[0]
    engine = EnginePasses(kernels, actor.shape, actor.active, load.servers)
    return _generation(engine.generate(load.sequences))


def predict_training(load: StepLoad, kernels: Kernels) -> list[Phase]:
    """Predict the time of the phases after generation. For the arguments see ``predict_step``."""
    roles = {role.name: RolePasses(kernels, role, load.sequences) for role in load.roles}
    phases: list[Phase] = []
    for name in load.measured:
        cost, operations = roles[name].measured, roles[name].operations()[0]
        phases.append(Phase(PASSES[name], cost.seconds, cost.spent(), name, operations))
    phases += _updates(load, [role for role in roles.values() if role.load.mini_batches])
    phases.append(_weight_sync(load.roles[0], kernels))
    if load.copied:
        seconds = load.copied / (EFFICIENCY * kernels.system.host)
        phases.append(Phase("copies to and from the host", seconds, {"host": seconds}))
    return phases


def _generation(found: GenerationTime) -> Phase:
    spent = (found.prefill + found.decoding).spent()
    # what the tail takes is not for want of bandwidth
    share = 1 - found.tail / found.seconds
    spent = {kind: seconds * share for kind, seconds in spent.items()}
    return Phase("generation", found.seconds, {**spent, "tail of generation": found.tail})


def _updates(load: StepLoad, trained: Sequence[RolePasses]) -> list[Phase]:
    """The update of each trained role; one phase if they share a pipeline."""
    shared = load.schedule != "sequential" and len({r.load.layout.pp for r in trained}) == 1
    together = [trained] if shared and len(trained) > 1 else [[role] for role in trained]
    return [_update(roles, load.schedule if shared else "sequential") for roles in together]


def _update(roles: Sequence[RolePasses], kind: ScheduleKind) -> Phase:
    """Simulate the update of roles that share a pipeline."""
    stages = roles[0].load.layout.pp
    repeats = max(1.0, max(role.load.mini_batches for role in roles) / _SIMULATED)
    works = tuple(_work(role, stages) for role in roles)
    seconds = make_schedule(kind, works, stages).simulation.makespan * repeats
    busy: dict[str, float] = {}
    for role in roles:
        for cost in _busy(role):
            for name, value in cost.spent().items():
                busy[name] = busy.get(name, 0.0) + value / stages
    idle = max(0.0, seconds - sum(busy.values()))
    names = " and ".join(role.load.name for role in roles)
    operations = sum(role.operations()[1] for role in roles)
    # without a pipeline, what is neither pass nor step waits for the exchange of gradients
    waiting = "idle pipeline" if stages > 1 else "network"
    spent = {**busy, waiting: busy.get(waiting, 0.0) + idle}
    return Phase(f"update of {names}", seconds, spent, names, operations)


def _work(role: RolePasses, stages: int) -> RoleWork:
    load, micro = role.load, role.training
    return RoleWork(
        load.name,
        (micro.count,) * min(load.mini_batches, _SIMULATED),
        tuple(cost.seconds for cost in role.training_forward),
        tuple(cost.seconds for cost in role.training_backward),
        reduce=max(role.reduction(stage) for stage in range(stages)),
        step=max(role.optimizer(stage).seconds for stage in range(stages)),
        chunks=load.layout.vpp,
    )


def _busy(role: RolePasses) -> list[Cost]:
    """What the stages compute in an update."""
    times = role.load.mini_batches
    passes = [*role.training_forward, *role.training_backward]
    steps = [role.optimizer(stage) * times for stage in range(role.load.layout.pp)]
    return [*(one * (role.training.count * times) for one in passes), *steps]


def _weight_sync(actor: RoleLoad, kernels: Kernels) -> Phase:
    """Every rank assembles the model's tensors from all ranks that hold a part of it."""
    layout = actor.layout
    whole = actor.model_parameters * BYTES
    parts = max(layout.tp * layout.cp, layout.ep * layout.etp) * layout.pp
    gathered = collective_seconds(kernels, "all_gather", whole, Group(parts))
    # the engine's ranks copy what they received
    copied = 2 * whole / (STREAMED * kernels.system.memory)
    seconds = gathered + copied
    return Phase("weight sync", seconds, {"network": gathered, "memory": copied})
