"""Comparison of the schedules of an update: simulated, with waits in place of models, and real.

    python benchmarks/schedule.py simulated [--out FILE]
    python benchmarks/schedule.py waits [--stages 4 8] [--milliseconds 40] [--repeat 3] [--out FILE]
    python benchmarks/schedule.py real [--repeat 3] [--out FILE]

``simulated``: idle share of each kind, and sequential's time over flush-free's, for numbers of
stages, micro-batches, mini-batches and costs of the critic.

``waits``: the real executor with real messages on gloo ranks. A wait, which needs no core, takes
the place of every pass. The result is measured over simulated time for each kind, the smallest of
the repetitions.

``real``: the update of a critic and an actor on two ranks (PP2, one core each), alternating between
Megatron's own schedule, one role after the other, and the flush-free schedule; and the peak memory
of both.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from moe_step import start
from record import alternate, parser, record

from mppo.pipeline.actions import RoleWork
from mppo.pipeline.executor import carry_out
from mppo.pipeline.links import Links
from mppo.pipeline.schedule import Schedule, make_schedule
from mppo.pipeline.streams import KINDS

STAGES, MINI_BATCHES, COSTS = (2, 4, 8, 16, 32, 64), (1, 4, 16), (0.25, 0.5, 1.0)
MICRO_BATCHES = (1, 4, 16, 64, 256)
LARGEST = 4096
"""Of stages x micro-batches x mini-batches; with more, all kinds idle little or take the more
memory for their lists."""


def update_of(stages: int, count: int, mini_batches: int, cost: float) -> dict[str, Schedule]:
    """The schedules of an update of two models, the critic's passes at ``cost`` of the actor's."""
    counts = (count,) * mini_batches
    work = (RoleWork("critic", counts, cost, 2 * cost), RoleWork("actor", counts))
    return {kind: make_schedule(kind, work, stages) for kind in KINDS}


def simulated() -> dict:
    """Rows of the simulation."""
    rows = []
    for stages, count, mini_batches, cost in itertools.product(
        STAGES, MICRO_BATCHES, MINI_BATCHES, COSTS
    ):
        if stages * count * mini_batches > LARGEST:
            continue
        found = update_of(stages, count, mini_batches, cost)
        times = [found[kind].simulation.makespan for kind in KINDS]
        rows.append(
            [stages, count, mini_batches, cost]
            + [round(found[kind].simulation.idle_share, 3) for kind in KINDS]
            + [round(times[0] / times[-1], 3)]
        )
        make_schedule.cache_clear()
    columns = ["stages", "micro-batches", "mini-batches", "critic's cost"]
    columns += [f"idle, {kind}" for kind in KINDS] + ["sequential over flush_free"]
    return {"columns": columns, "rows": rows}


class WaitingStage:
    """A role whose passes are waits; messages and sums over ranks are real (``StageWork``)."""

    def __init__(self, forward_s: float, backward_s: float, links: Links, tokens: int) -> None:
        self._seconds, self._links, self._tokens = (forward_s, backward_s), links, tokens
        self._norm: tuple[torch.Tensor, dist.Work] | None = None

    def receive_buffer(self, mini_batch: int, micro_batch: int) -> torch.Tensor:
        return torch.empty(self._tokens)

    def forward(self, mini_batch: int, micro_batch: int, chunk: int, received):
        time.sleep(self._seconds[0])
        last = self._links.stage == self._links.stages - 1
        return None if last else torch.ones(self._tokens)

    def backward(self, mini_batch: int, micro_batch: int, chunk: int, received):
        time.sleep(self._seconds[1])
        return torch.ones(self._tokens) if self._links.stage else None

    def reduce(self, mini_batch: int) -> None:
        pass

    def norm(self, mini_batch: int) -> None:
        norm = torch.ones(1)
        self._norm = norm, dist.all_reduce(norm, async_op=True)

    def step(self) -> bool:
        norm, work = self._norm
        work.wait()
        assert norm.item() == self._links.stages
        return True


def wait_rank(
    rank: int, stages: int, folder: Path, milliseconds: float, cost: float, repeat: int
) -> None:
    """One stage's runs of every kind; the first rank writes the times."""
    registry = start(rank, stages, folder / f"store_{stages}_{cost}")
    from mppo.parallel.layout import Layout

    links = Links([registry.of(Layout(stages, pp=stages))])
    unit, rows = milliseconds / 1e3, []
    for count, mini_batches in ((stages // 2, 4), (stages, 4), (2 * stages, 2)):
        for kind, schedule in update_of(stages, count, mini_batches, cost).items():
            work = {
                name: WaitingStage(scale * unit, 2 * scale * unit, links, 1 << 14)
                for name, scale in (("critic", cost), ("actor", 1.0))
            }
            seconds = []
            for _ in range(repeat):
                dist.barrier()
                begin = time.perf_counter()
                carry_out(
                    schedule.lists[rank],
                    work,
                    links,
                    {name: name for name in work},
                    lambda role, i, w=work: w[role].step(),
                    partial(schedule.rest_after, rank),
                )
                dist.barrier()
                seconds.append(time.perf_counter() - begin)
            ratio = min(seconds) / (schedule.simulation.makespan * unit)
            rows.append([stages, count, mini_batches, cost, KINDS.index(kind), round(ratio, 4)])
    if rank == 0:
        torch.save(rows, folder / f"rows_{stages}_{cost}.pt")
    dist.destroy_process_group()


def waits(stages: list[int], milliseconds: float, repeat: int) -> dict:
    """Measured over simulated time with waits in place of passes."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for world, cost in itertools.product(stages, (0.5, 1.0)):
            mp.spawn(wait_rank, (world, folder, milliseconds, cost, repeat), world)
            rows += torch.load(folder / f"rows_{world}_{cost}.pt")
    columns = ["stages", "micro-batches", "mini-batches", "critic's cost", "kind"]
    return {
        "kinds": KINDS,
        "milliseconds of an actor's forward pass": milliseconds,
        "columns": [*columns, "measured over simulated time"],
        "rows": rows,
    }


MODEL = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
COMPARED = ("sequential", "flush_free")
TOKENS, UPDATES = 256, 4


def make_updates(folder: Path, registry, count: int):
    """What runs an update by a kind of schedule: four mini-batches of equal sequences."""
    from mppo.batch import Prompt, Trajectory, pack_trajectories
    from mppo.config.load import load_recipe
    from mppo.hub.builtin import read_model_config
    from mppo.trainer.advantages import estimate
    from mppo.trainer.forward_phase import ForwardPhase
    from mppo.trainer.roles import Roles
    from mppo.trainer.update.phase import UpdatePhase

    size = UPDATES * count
    keys = [
        *(f"{role}.megatron.pipeline_model_parallel_size=2" for role in ("actor", "critic")),
        *(f"{role}.ppo_micro_batch_size_per_gpu=1" for role in ("actor", "critic")),
        f"actor.ppo_mini_batch_size={count}", f"data.train_batch_size={size}", "rollout.n=1",
        "model.dtype=float32", f"model.path={folder / 'model'}",
    ]  # fmt: skip
    recipes = {kind: load_recipe(None, [*keys, f"trainer.schedule={kind}"]) for kind in KINDS}
    roles = Roles(recipes["sequential"], folder / "model", read_model_config, registry, 100)
    ids = torch.randint(0, MODEL["vocab_size"], (size, TOKENS)).tolist()
    half = TOKENS // 2
    trajectories = [
        Trajectory(Prompt(i, tuple(row[:half]), "", "", ""), tuple(row[half:]),
                   (0.0,) * half, "stop", 0)
        for i, row in enumerate(ids)
    ]  # fmt: skip
    forward = ForwardPhase(roles, pack_trajectories(trajectories, [0.1 * i for i in range(size)]))
    for together in forward.passes:
        forward.compute(together)
    experience = estimate(forward.outputs(), roles.recipe.algorithm, 0.1)

    def run(kind: str) -> None:
        roles.recipe = recipes[kind]
        update = UpdatePhase(roles, experience, 1, actor_frozen=False)
        assert update.kind == kind
        update.run()
        dist.barrier()

    return run


def real_rank(rank: int, folder: Path, count: int, repeat: int) -> None:
    """Times of the kinds by turns, on one core."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % os.cpu_count()]})
    torch.manual_seed(0)
    run = make_updates(folder, start(rank, 2, folder / f"store_{count}"), count)
    works = {kind: (lambda kind=kind: run(kind)) for kind in COMPARED}
    times = alternate(works, repeat)
    if rank == 0:
        torch.save(times, folder / f"times_{count}.pt")
    dist.destroy_process_group()


def memory_rank(rank: int, folder: Path, kind: str) -> None:
    """Bytes of this rank at its peak, over updates of one kind only."""
    from mppo.parallel import device

    torch.manual_seed(0)
    run = make_updates(folder, start(rank, 2, folder / f"memory_store_{kind}"), 4)
    for _ in range(2):
        run(kind)
    (folder / f"memory_{kind}_{rank}").write_text(str(device.peak_memory_bytes()))
    dist.destroy_process_group()


def real(repeat: int) -> dict:
    """Update times of real models, and their peak memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    found: dict = {"model": MODEL, "tokens of a sequence": TOKENS, "updates": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        LlamaForCausalLM(LlamaConfig(**MODEL)).save_pretrained(folder / "model")
        for count in (2, 4):
            mp.spawn(real_rank, (folder, count, repeat), 2)
            times = torch.load(folder / f"times_{count}.pt", weights_only=False)
            plans = update_of(2, count, UPDATES, 1.0)
            found["updates"][f"{count} micro-batches"] = {
                "seconds": {kind: times[kind].wall for kind in COMPARED},
                "sequential over flush_free": times["sequential"].over(times["flush_free"]),
                "simulated": plans["sequential"].simulation.makespan
                / plans["flush_free"].simulation.makespan,
            }
        peaks = {}
        for kind in COMPARED:
            mp.spawn(memory_rank, (folder, kind), 2)
            peaks[kind] = [int((folder / f"memory_{kind}_{rank}").read_text()) for rank in (0, 1)]
        found["peak bytes of ranks"] = peaks
    return found


def main() -> None:
    arguments = parser(__doc__, repeat=3)
    arguments.add_argument("what", choices=["simulated", "waits", "real"])
    arguments.add_argument("--stages", type=int, nargs="+", default=[4, 8])
    arguments.add_argument("--milliseconds", type=float, default=40.0)
    chosen = arguments.parse_args()
    if chosen.what == "simulated":
        result = simulated()
    elif chosen.what == "waits":
        result = waits(chosen.stages, chosen.milliseconds, chosen.repeat)
    else:
        result = real(chosen.repeat)
    record({chosen.what: result}, chosen.out)


if __name__ == "__main__":
    main()
