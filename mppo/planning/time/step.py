"""Seconds of the phases of one PPO step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mppo.pipeline.actions import RoleWork
from mppo.pipeline.schedule import make_schedule
from mppo.planning.time.collective_time import EFFICIENCY, Group, collective_seconds
from mppo.planning.time.cost import Cost
from mppo.planning.time.generation_time import EnginePasses, GenerationTime, Servers
from mppo.planning.time.kernels import Kernels
from mppo.planning.time.layer import BYTES, STREAMED
from mppo.planning.time.role_load import RoleLoad, RolePasses, StepSequences
from mppo.recipe.schedule_kind import ScheduleKind

PASSES = {
    "actor": "old log-probabilities",
    "ref": "reference",
    "critic": "values",
    "reward_model": "reward model",
}
_SIMULATED = 3
"""Mini-batches of an update whose schedule is simulated; the others take as long."""


Spent = Mapping[str, float]
"""Seconds by what they are spent on."""
WAITS = ("network", "host", "idle pipeline", "agents", "disk")
"""What a GPU is idle for; in the tail of generation it is slow, not idle."""


@dataclass(frozen=True)
class RoleShare:
    """A role's part of a phase: operations over all ranks that count for its MFU, and mean seconds
    of a rank in the role's passes."""

    operations: float
    busy: float


@dataclass(frozen=True)
class Phase:
    """A phase of a step.

    Args:
        spent: the same by what they are spent on, the mean of its GPUs.
        stages: ``spent`` of the GPUs of each pipeline stage; empty: all GPUs alike.
    """

    name: str
    seconds: float
    spent: Spent
    gpus: int
    roles: Mapping[str, RoleShare] = field(default_factory=dict[str, RoleShare])
    stages: Sequence[Spent] = ()

    @property
    def bound(self) -> str:
        return max(self.spent, key=lambda kind: self.spent[kind])

    @property
    def operations(self) -> float:
        return sum(share.operations for share in self.roles.values())

    def seconds_of(self, role: str) -> float:
        """The role's part of its seconds: as much as of its passes."""
        if role not in self.roles:
            return 0.0
        busy = sum(share.busy for share in self.roles.values())
        return self.seconds * self.roles[role].busy / busy


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a step.

    Args:
        tokens: tokens of prompts and responses.
        peak: peak of a GPU, operations per second.
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
        return self.tokens / self.seconds / self.gpus

    def utilization(self, phase: Phase) -> float | None:
        """Share of the peak that a phase's operations reach on all GPUs (MFU)."""
        if not phase.operations:
            return None
        return phase.operations / (phase.seconds * phase.gpus * self.peak)

    def role_utilization(self) -> dict[str, float]:
        names = dict.fromkeys(name for phase in self.phases for name in phase.roles)
        found: dict[str, float] = {}
        for name in names:
            own = [phase for phase in self.phases if name in phase.roles]
            held = sum(phase.seconds_of(name) * phase.gpus for phase in own)
            found[name] = sum(phase.roles[name].operations for phase in own) / (held * self.peak)
        return found

    def idle(self) -> dict[str, float]:
        """Share of the time of all GPUs that each kind of waiting takes."""
        whole = self.seconds * self.gpus
        waits = {
            kind: sum(phase.spent.get(kind, 0.0) * phase.gpus for phase in self.phases) / whole
            for kind in WAITS
        }
        held = sum(phase.seconds * phase.gpus for phase in self.phases)
        return {**waits, "GPUs without a phase": max(0.0, 1 - held / whole)}

    @property
    def gpu_hours(self) -> float:
        """Hours of one GPU that the step takes of all."""
        return self.seconds * self.gpus / 3600


@dataclass(frozen=True)
class StepLoad:
    """What a step computes.

    Args:
        measured: roles that pass over all sequences before the update.
        gpus: number of all GPUs, those of generation included.
        copied: bytes that a rank copies from its host in a step.
        overlapped: generation runs beside training, on other GPUs.
        streamed: forward-only passes of actor, critic and reference fill one pipeline together.
    """

    sequences: StepSequences
    roles: Sequence[RoleLoad]
    servers: Servers
    schedule: ScheduleKind
    measured: Sequence[str]
    gpus: int
    copied: float = 0.0
    overlapped: bool = False
    streamed: bool = False


def predict_step(load: StepLoad, kernels: Kernels) -> Prediction:
    """Predict the time of a step.

    Rewards of functions, checkpoints and validation are not in it.
    """
    phases = (predict_generation(load, kernels), *predict_training(load, kernels))
    return Prediction(
        *(phases, load.sequences.tokens, load.gpus, kernels.system.flops, kernels.source),
        load.overlapped,
    )


def predict_generation(load: StepLoad, kernels: Kernels) -> Phase:
    actor = load.roles[0]
    engine = EnginePasses(kernels, actor.shape, actor.active, load.servers)
    servers = load.servers
    return _generation(engine.generate(load.sequences), min(load.gpus, servers.count * servers.tp))


def predict_training(load: StepLoad, kernels: Kernels, simulated: bool = True) -> list[Phase]:
    """Predict the time of the phases after generation. Simulating an update's schedule can take
    seconds; without ``simulated`` a formula estimates it."""
    roles = {role.name: RolePasses(kernels, role, load.sequences) for role in load.roles}
    phases: list[Phase] = []
    stream = [name for name in load.measured if name != "reward_model"] if load.streamed else []
    phases += [
        _measured(PASSES[name], roles[name], fills=name not in stream[1:]) for name in load.measured
    ]
    phases += _updates(load, list(roles.values()), simulated)
    phases.append(_weight_sync(load.roles[0], kernels))
    if load.copied:
        seconds = load.copied / (EFFICIENCY * kernels.system.host)
        world = load.roles[0].layout.world
        phases.append(Phase("copies to and from the host", seconds, {"host": seconds}, world))
    return phases


def _generation(found: GenerationTime, gpus: int) -> Phase:
    spent = (found.prefill + found.decoding).spent()
    # what the tail takes is not for want of bandwidth
    share = 1 - found.tail / (found.seconds - found.agents)
    spent = {kind: seconds * share for kind, seconds in spent.items()}
    spent["tail of generation"] = found.tail
    if found.agents:
        spent["agents"] = found.agents
    return Phase("generation", found.seconds, spent, gpus)


def _measured(name: str, role: RolePasses, fills: bool) -> Phase:
    """A pass over all sequences before the update, which may fill the pipeline first."""
    seconds, waiting = role.measured(fills).seconds, "idle pipeline"
    stages = [_filled((cost * role.measuring.count).spent(), seconds, waiting)
              for cost in role.forward]  # fmt: skip
    busy = sum(cost.seconds for cost in role.forward) * role.measuring.count / len(stages)
    shares = {role.load.name: RoleShare(role.operations()[0], busy)}
    return Phase(name, seconds, _mean(stages), role.load.layout.world, shares, stages)


def _filled(spent: Spent, seconds: float, waiting: str) -> Spent:
    """What a rank does in a phase, with what is left of its seconds as waiting."""
    left = max(0.0, seconds - sum(spent.values()))
    return {**spent, waiting: spent.get(waiting, 0.0) + left}


def _mean(spent: Sequence[Spent]) -> Spent:
    return {kind: sum(one[kind] for one in spent) / len(spent) for kind in spent[0]}


def _updates(load: StepLoad, roles: Sequence[RolePasses], simulated: bool) -> list[Phase]:
    trained = [role for role in roles if role.load.mini_batches]
    shared = load.schedule != "sequential" and len({r.load.layout.pp for r in trained}) == 1
    together = [trained] if shared and len(trained) > 1 else [[role] for role in trained]
    kind = load.schedule if shared else "sequential"
    return [_update(roles, kind, simulated) for roles in together]


def _update(roles: Sequence[RolePasses], kind: ScheduleKind, simulated: bool) -> Phase:
    stages = roles[0].load.layout.pp
    works = tuple(_work(role, stages) for role in roles)
    if simulated:
        repeats = max(1.0, max(role.load.mini_batches for role in roles) / _SIMULATED)
        seconds = make_schedule(kind, works, stages).simulation.makespan * repeats
    else:
        seconds = _formula(roles, works, stages)
    # without a pipeline, what is neither pass nor step waits for the exchange of gradients
    waiting = "idle pipeline" if stages > 1 else "network"
    spent = [
        _filled(_sum([one.spent() for role in roles for one in _busy(role, stage)]), seconds,
                waiting)
        for stage in range(stages)
    ]  # fmt: skip
    shares = {
        role.load.name: RoleShare(
            role.operations()[1],
            sum(one.seconds for stage in range(stages) for one in _busy(role, stage)) / stages,
        )
        for role in roles
    }
    name = f"update of {' and '.join(shares)}"
    return Phase(name, seconds, _mean(spent), roles[0].load.layout.world, shares, spent)


def _sum(spent: Sequence[Spent]) -> Spent:
    return {kind: sum(one[kind] for one in spent) for kind in spent[0]}


def _formula(roles: Sequence[RolePasses], works: Sequence[RoleWork], stages: int) -> float:
    """Seconds of an update without simulation: the slowest stage's passes and steps, the exchanges
    beside which no other role computes, and the filling of the pipeline, once in all if roles share
    it, else once for each mini-batch."""
    seconds, fills = 0.0, list[float]()
    mini_batches = max(role.load.mini_batches for role in roles)
    for role, work in zip(roles, works, strict=True):
        slowest = max(
            forward.seconds + backward.seconds
            for forward, backward in zip(role.training_forward, role.training_backward)
        )
        seconds += role.load.mini_batches * (role.training.count * slowest + work.step)
        fills.append((stages - 1) * slowest / work.chunks)
    if len(roles) > 1:
        return seconds + max(fills)
    return seconds + mini_batches * (fills[0] + works[0].reduce)


def _work(role: RolePasses, stages: int) -> RoleWork:
    load, micro = role.load, role.training
    reduce = max(role.reduction(stage) for stage in range(stages))
    step = max(role.optimizer(stage).seconds for stage in range(stages))
    if not role.beside:
        reduce, step = 0.0, step + reduce
    return RoleWork(
        load.name,
        (micro.count,) * min(load.mini_batches, _SIMULATED),
        tuple(cost.seconds for cost in role.training_forward),
        tuple(cost.seconds for cost in role.training_backward),
        reduce=reduce,
        step=step,
        chunks=load.layout.vpp,
    )


def _busy(role: RolePasses, stage: int) -> list[Cost]:
    times, passes = role.load.mini_batches, role.training.count * role.load.mini_batches
    forward, backward = role.training_forward[stage], role.training_backward[stage]
    return [forward * passes, backward * passes, role.optimizer(stage) * times]


def _weight_sync(actor: RoleLoad, kernels: Kernels) -> Phase:
    """Every rank assembles the model's tensors from all ranks that hold a part of it."""
    layout = actor.layout
    whole = actor.model_parameters * BYTES
    parts = max(layout.tp * layout.cp, layout.ep * layout.etp) * layout.pp
    gathered = collective_seconds(kernels, "all_gather", whole, Group(parts))
    # the engine's ranks copy what they received
    copied = 2 * whole / (STREAMED * kernels.system.memory)
    seconds = gathered + copied
    spent = {"network": gathered, "memory": copied}
    return Phase("weight sync", seconds, spent, layout.world)
