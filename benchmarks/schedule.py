"""Comparison of the schedules of an update: simulated, with waits in place of models, and real.

    python benchmarks/schedule.py simulated [--out FILE.md]
    python benchmarks/schedule.py waits [--stages 4 8] [--milliseconds 20] [--repeat 3] [--out ...]
    python benchmarks/schedule.py real [--layers 8] [--tokens 384] [--repeat 3] [--out ...]
    python benchmarks/schedule.py critic [--stages 4] [--milliseconds 20] [--repeat 3] [--out ...]

``simulated``: sequential's time over flush_free's, and the idle share of flush_free, for numbers of
stages, micro-batches and mini-batches and costs of the critic; and the gain of micro-batches that
cost the same. It takes about ten minutes and 6 GiB on two cores.

``waits``: the real executor with real messages on gloo ranks. A wait, which needs no core, takes
the place of every pass. The result is measured over simulated time for each kind. It takes three
minutes.

``real``: the update of a critic and an actor on two ranks (PP2, one core each), alternating between
Megatron's own schedule, one role after the other, and the flush-free schedule; and the peak memory
of both. It takes two minutes.

``critic``: these ratios where the critic has K updates for one of the actor
(``critic.ppo_epochs``): simulated, of the real executor with waits, and of real models on two
ranks. It takes three minutes.

All tables are Markdown. ``--out`` replaces the section of the file that has the name of the mode.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of every rank, about optional packages

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from moe_step import peak_bytes, return_freed_memory, start
from record import alternate, conditions, parser

from mppo.pipeline.actions import RoleWork
from mppo.pipeline.executor import carry_out
from mppo.pipeline.links import Links
from mppo.pipeline.schedule import Schedule, make_schedule
from mppo.pipeline.streams import KINDS

STAGES, MICRO_BATCHES = (2, 4, 8, 16, 32, 64), (1, 4, 16, 64, 256)
MINI_BATCHES, COSTS = (1, 4, 16), (1.0, 0.5, 0.25)


def make_schedules(
    stages: int, count: int, mini_batches: int, cost: float, updates: int = 1
) -> dict[str, Schedule]:
    """The schedules of an update of two models, the critic's passes at ``cost`` of the actor's.

    The critic takes ``updates`` steps for each of the actor's ``mini_batches``.
    """
    counts = (count,) * mini_batches
    critic = RoleWork("critic", counts * updates, cost, 2 * cost)
    work = (critic, RoleWork("actor", counts))
    return {kind: make_schedule(kind, work, stages) for kind in KINDS}


def sequential_over_flush_free(schedules: dict[str, Schedule]) -> float:
    """Ratio of the simulated times."""
    sequential, _, free = (schedules[kind].simulation.makespan for kind in KINDS)
    return sequential / free


def simulated_cell(case: tuple[int, int, int, float]) -> str:
    """Time ratio and flush_free's idle share of one update."""
    schedules = make_schedules(*case)
    make_schedule.cache_clear()
    idle = schedules["flush_free"].simulation.idle_share
    return f"{sequential_over_flush_free(schedules):.2f} ({idle:.3f})"


def simulated() -> str:
    """Tables of the simulation, one for each cost of the critic."""
    cases = list(itertools.product(STAGES, MICRO_BATCHES, MINI_BATCHES, COSTS))
    cases.sort(key=lambda case: -case[0] * case[1] * case[2])
    with ProcessPoolExecutor() as pool:
        cells = dict(zip(cases, pool.map(simulated_cell, cases)))
    parts = ["Time of sequential over flush_free, and in brackets the idle share of flush_free."]
    for cost in COSTS:
        rows = [
            [p, k, *(cells[p, m, k, cost] for m in MICRO_BATCHES)]
            for p, k in itertools.product(STAGES, MINI_BATCHES)
        ]
        columns = ["stages", "mini-batches", *(f"{m} micro-batches" for m in MICRO_BATCHES)]
        parts += [f"The critic's passes cost {cost:g} of the actor's:", table(columns, rows)]
    parts.append(
        "Four mini-batches; the critic's micro-batches as many as the actor's, or as many fewer "
        "and larger as makes all passes cost the same (`ppo_max_token_len_per_gpu: auto`):"
    )
    columns = ["stages", "micro-batches", "critic's cost", "idle", "idle with equal cost"]
    columns.append("time with equal cost over time")
    return "\n\n".join([*parts, table(columns, balanced_rows())])


def balanced_rows() -> list[list]:
    """The gain of micro-batches of equal cost in the flush-free schedule."""
    rows = []
    shapes = itertools.product(((4, 4), (8, 8), (8, 16), (16, 16), (16, 32)), COSTS[1:])
    for (stages, count), cost in shapes:
        actor, larger = RoleWork("actor", (count,) * 4), round(count * cost)
        found = [
            make_schedule("flush_free", (critic, actor), stages).simulation
            for critic in (
                RoleWork("critic", (count,) * 4, cost, 2 * cost),
                RoleWork("critic", (larger,) * 4),
            )
        ]
        shares = [f"{simulation.idle_share:.3f}" for simulation in found]
        gain = found[1].makespan / found[0].makespan
        rows.append([stages, count, cost, *shares, f"{gain:.2f}"])
    return rows


class WaitingStage:
    """A role whose passes are waits; messages and sums over ranks are real (``StageWork``)."""

    def __init__(self, forward_s: float, links: Links) -> None:
        self._forward_s, self._links, self._tokens = forward_s, links, 1 << 14
        self._norm: tuple[torch.Tensor, dist.Work] | None = None

    def receive_buffer(self, mini_batch: int, micro_batch: int) -> torch.Tensor:
        return torch.empty(self._tokens)

    def forward(self, mini_batch: int, micro_batch: int, chunk: int, received):
        time.sleep(self._forward_s)
        last = self._links.stage == self._links.stages - 1
        return None if last else torch.ones(self._tokens)

    def backward(self, mini_batch: int, micro_batch: int, chunk: int, received):
        time.sleep(2 * self._forward_s)
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


WAITS = {4: ((2, 4), (4, 4)), 8: ((4, 2), (8, 2))}
"""Micro-batches and mini-batches of the updates with waits, by stages."""
WAITING_COSTS = (1.0, 0.5)


def wait_rank(rank: int, stages: int, folder: Path, milliseconds: float, repeat: int) -> None:
    """One stage's runs of every kind; the first rank writes the table's rows."""
    links, unit, rows = start_stage(rank, stages, folder), milliseconds / 1e3, []
    for (count, mini_batches), cost in itertools.product(WAITS[stages], WAITING_COSTS):
        for kind, schedule in make_schedules(stages, count, mini_batches, cost).items():
            planned = schedule.simulation.makespan * unit
            measured = median(wait_once(schedule, links, unit, cost) for _ in range(repeat))
            numbers = [f"{planned:.2f}", f"{measured:.2f}", f"{measured / planned:.3f}"]
            rows.append([stages, count, mini_batches, cost, kind, *numbers])
    if rank == 0:
        torch.save(rows, folder / f"rows_{stages}.pt")
    dist.destroy_process_group()


def start_stage(rank: int, stages: int, folder: Path) -> Links:
    """Start a rank that is a stage of a pipeline of all ranks."""
    registry = start(rank, stages, folder / f"store_{stages}")
    from mppo.parallel.layout import Layout

    return Links([registry.of(Layout(stages, pp=stages))])


def critic_rank(rank: int, stages: int, folder: Path, milliseconds: float, repeat: int) -> None:
    """One stage's runs with K updates of the critic; the first rank writes the table's rows."""
    links, unit, rows = start_stage(rank, stages, folder), milliseconds / 1e3, []
    for count, (mini_batches, updates) in itertools.product(CRITIC_COUNTS, UNEQUAL):
        schedules = make_schedules(stages, count, mini_batches, 1.0, updates)
        works = {kind: partial(wait_once, schedules[kind], links, unit, 1.0) for kind in COMPARED}
        times = alternate(works, repeat)
        measured = times["sequential"].over(times["flush_free"])
        plan = sequential_over_flush_free(schedules)
        seconds = [f"{median(times[kind].walls):.2f}" for kind in COMPARED]
        ratios = [f"{plan:.2f}", f"{measured:.2f}", f"{measured / plan:.3f}"]
        rows.append([stages, count, mini_batches, updates, *seconds, *ratios])
    if rank == 0:
        torch.save(rows, folder / f"rows_{stages}.pt")
    dist.destroy_process_group()


def wait_once(schedule: Schedule, links: Links, unit: float, cost: float) -> float:
    """Seconds of one update with waits in place of passes."""
    work = {"critic": WaitingStage(cost * unit, links), "actor": WaitingStage(unit, links)}
    dist.barrier()
    begin = time.perf_counter()
    carry_out(
        schedule.lists[links.stage],
        work,
        links,
        {name: name for name in work},
        lambda role, mini_batch: work[role].step(),
        partial(schedule.rest_after, links.stage),
    )
    dist.barrier()
    return time.perf_counter() - begin


def waiting_rows(
    worker: Callable[..., None], stages: Sequence[int], milliseconds: float, repeat: int
) -> list[list]:
    """The rows that the first rank of each pipeline writes."""
    rows: list[list] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for world in stages:
            start_ranks(worker, (world, folder, milliseconds, repeat), world)
            rows += torch.load(folder / f"rows_{world}.pt")
    return rows


def waits(stages: Sequence[int], milliseconds: float, repeat: int) -> str:
    """The table of measured and simulated times with waits in place of passes."""
    rows = waiting_rows(wait_rank, stages, milliseconds, repeat)
    missed = sum(abs(float(row[-1]) - 1) > 0.1 for row in rows)
    columns = ["stages", "micro-batches", "mini-batches", "critic's cost", "kind"]
    columns += ["simulated s", "measured s", "measured over simulated"]
    text = (
        f"An actor's forward pass is a wait of {milliseconds:g} ms; median of {repeat} updates. "
        f"{len(rows) - missed} of {len(rows)} within 10% of the simulation."
    )
    return f"{text}\n\n{table(columns, rows)}"


UNEQUAL = ((1, 2), (1, 4), (4, 2))
"""Mini-batches of the actor, and updates of the critic for each; SAO has one and two."""
CRITIC_COUNTS = (2, 8)
"""Micro-batches of a mini-batch."""


def critic(
    stages: Sequence[int], milliseconds: float, repeat: int, layers: int, tokens: int
) -> str:
    """The tables of updates in which the critic takes several steps for one of the actor."""
    rows = []
    for world, (mini_batches, updates) in itertools.product(STAGES[:4], UNEQUAL):
        cells = []
        for count, cost in itertools.product(CRITIC_COUNTS, COSTS[:2]):
            schedules = make_schedules(world, count, mini_batches, cost, updates)
            idle = schedules["flush_free"].simulation.idle_share
            cells.append(f"{sequential_over_flush_free(schedules):.2f} ({idle:.3f})")
        rows.append([world, mini_batches, updates, *cells])
    columns = ["stages", "actor's mini-batches", "critic's updates for each"]
    cases = itertools.product(CRITIC_COUNTS, COSTS[:2])
    titles = [f"{count} micro-batches, critic's cost {cost:g}" for count, cost in cases]
    measured = ["stages", "micro-batches", *columns[1:], "sequential s", "flush_free s"]
    measured += ["simulated ratio", "measured ratio", "measured over simulated"]
    with tempfile.TemporaryDirectory() as name:
        models = real_times(Path(name), layers, tokens, repeat, UNEQUAL)
    return "\n\n".join([
        "Time of sequential, one role after the other, over flush_free; in brackets the idle share "
        "of flush_free. Simulated:",
        table([*columns, *titles], rows),
        f"With waits of {milliseconds:g} ms in place of an actor's forward pass, and a critic that "
        f"costs the same; median of {repeat} updates of each kind by turns:",
        table(measured, waiting_rows(critic_rank, stages, milliseconds, repeat)),
        models,
    ])  # fmt: skip


MODEL = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 704,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
COMPARED = ("sequential", "flush_free")
ALIKE, COUNTS = (4, 1), (2, 4)
"""Mini-batches of the actor and updates of the critic for each; micro-batches of a mini-batch."""


def make_update(
    folder: Path, tokens: int, registry, kind: str, count: int, mini_batches: int, updates: int
) -> Callable[[], None]:
    """What runs an update by a kind of schedule, of mini-batches of ``count`` equal sequences."""
    from mppo.batch.episode import Episode, EpisodeTokens, with_scores
    from mppo.batch.packing import pack_episodes
    from mppo.batch.prompt import Prompt
    from mppo.batch.score import ResponseScore
    from mppo.batch.shares import share_out
    from mppo.hub.builtin import read_model_config
    from mppo.recipe.load import load_recipe
    from mppo.trainer.advantages import estimate
    from mppo.trainer.forward_phase import ForwardPhase
    from mppo.trainer.run_roles import Roles
    from mppo.trainer.update.update_stage import UpdatePhase

    size = mini_batches * count
    keys = [
        *(f"{role}.megatron.pipeline_model_parallel_size=2" for role in ("actor", "critic")),
        *(f"{role}.ppo_micro_batch_size_per_gpu=1" for role in ("actor", "critic")),
        f"actor.ppo_mini_batch_size={count}", f"data.train_batch_size={size}", "rollout.n=1",
        "model.dtype=float32", f"model.path={folder / 'model'}", f"trainer.schedule={kind}",
        f"critic.ppo_epochs={updates}",
    ]  # fmt: skip
    roles = Roles(load_recipe(None, keys), folder / "model", read_model_config, registry, 100)
    ids = torch.randint(0, MODEL["vocab_size"], (size, tokens)).tolist()
    half = tokens // 2
    episodes = [
        Episode.sampled(
            Prompt(i, row[:half], "", "", ""), EpisodeTokens(row[half:], [0.0] * half), "stop", 0
        )
        for i, row in enumerate(ids)
    ]
    scores = [ResponseScore(0.1 * i) for i in range(size)]
    batch = share_out(pack_episodes(with_scores(episodes, scores)))
    forward = ForwardPhase(roles, batch)
    for together in forward.passes:
        forward.compute(together)
    experience = estimate(forward.outputs(), roles.recipe.algorithm, 0.1)

    def run() -> None:
        update = UpdatePhase(roles, experience, 1, actor_frozen=False)
        assert update.kind == kind
        each = {done.role.name: len(done.mini_batches) for done in update.updates}
        assert each == {"critic": mini_batches * updates, "actor": mini_batches}
        update.run()
        dist.barrier()

    return run


def real_rank(
    rank: int, folder: Path, tokens: int, repeat: int, updates: Sequence[tuple[int, int]]
) -> None:
    """Times of the kinds by turns, on one core; the first rank writes the table's rows."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.manual_seed(0)
    registry, rows = start(rank, 2, folder / "store"), []
    for shape in ((count, *each) for count, each in itertools.product(COUNTS, updates)):
        runs = {kind: make_update(folder, tokens, registry, kind, *shape) for kind in COMPARED}
        times = alternate(runs, repeat)
        measured = times["sequential"].over(times["flush_free"])
        count, mini_batches, each = shape
        plan = sequential_over_flush_free(make_schedules(2, count, mini_batches, 1.0, each))
        seconds = [f"{median(times[kind].walls):.2f}" for kind in COMPARED]
        ratios = [f"{measured:.2f}", f"{plan:.2f}", f"{measured / plan:.3f}"]
        rows.append([*shape, *seconds, *ratios])
    if rank == 0:
        torch.save(rows, folder / "rows.pt")
    dist.destroy_process_group()


def memory_rank(rank: int, folder: Path, tokens: int, kind: str) -> None:
    """MiB of this rank before its updates and at their peak, with one kind only."""
    torch.manual_seed(0)
    registry = start(rank, 2, folder / f"store_{kind}")
    return_freed_memory()
    run = make_update(folder, tokens, registry, kind, max(COUNTS), *ALIKE)
    before = peak_bytes()
    for _ in range(2):
        run()
    torch.save([kind, rank, before >> 20, peak_bytes() >> 20], folder / f"{kind}_{rank}.pt")
    dist.destroy_process_group()


def real(layers: int, tokens: int, repeat: int) -> str:
    """Tables of update times of real models, and of their peak memory."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = real_times(folder, layers, tokens, repeat, [ALIKE])
        memory = []
        for kind in COMPARED:
            start_ranks(memory_rank, (folder, tokens, kind), 2)
            memory += [torch.load(folder / f"{kind}_{rank}.pt") for rank in (0, 1)]
    columns_of_memory = ["kind", "rank", "MiB before the updates", "MiB at the peak"]
    return f"{text}\n\n{table(columns_of_memory, memory)}"


def real_times(
    folder: Path, layers: int, tokens: int, repeat: int, updates: Sequence[tuple[int, int]]
) -> str:
    """The table of update times of real models, whose weights it draws."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**MODEL, num_hidden_layers=layers)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    start_ranks(real_rank, (folder, tokens, repeat, updates), 2)
    columns = ["micro-batches", "actor's mini-batches", "critic's updates for each"]
    columns += ["sequential s", "flush_free s", "sequential over flush_free", "simulated"]
    text = (
        f"Actor and critic of {layers} layers of width {MODEL['hidden_size']} on two stages, "
        f"micro-batches of {tokens} tokens, float32; median of {repeat} updates of each by turns."
    )
    rows = torch.load(folder / "rows.pt", weights_only=False)
    return f"{text}\n\n{table([*columns, 'measured over simulated'], rows)}"


def start_ranks(worker: Callable[..., None], arguments: tuple, world: int) -> None:
    """Run ``worker(rank, *arguments)`` in processes that share the imported libraries."""
    multiprocessing.set_forkserver_preload(["mppo.trainer.update.update_stage", "transformers"])
    mp.start_processes(worker, arguments, nprocs=world, start_method="forkserver")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def write_section(name: str, text: str, out: Path | None) -> None:
    """Print a section of the results, and replace it in a file."""
    found = conditions()
    machine = f"{found['machine']['cores']} cores, load average {found['load_average']:.1f}"
    versions = ", ".join(f"{key} {value}" for key, value in found["versions"].items())
    header = f"`{found['command']}`, {found['date']}, {machine}, {versions}."
    section = f"## {name}\n\n{header}\n\n{text}\n"
    print(section)
    if out is not None:
        old = out.read_text() if out.exists() else "# Schedules of an update\n"
        rest = re.sub(rf"\n## {name}\n.*?(?=\n## |\Z)", "", old, flags=re.DOTALL)
        out.write_text(f"{rest.rstrip()}\n\n{section}")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("what", choices=["simulated", "waits", "real", "critic"])
    arguments.add_argument("--stages", type=int, nargs="+", default=[*WAITS], choices=[*WAITS])
    arguments.add_argument("--milliseconds", type=float, default=20.0)
    arguments.add_argument("--layers", type=int, default=8)
    arguments.add_argument("--tokens", type=int, default=384)
    arguments.add_argument("--repeat", type=int, default=3)
    chosen = arguments.parse_args()
    if chosen.what == "simulated":
        text = simulated()
    elif chosen.what == "waits":
        text = waits(chosen.stages, chosen.milliseconds, chosen.repeat)
    else:
        size = chosen.layers, chosen.tokens
        waited = chosen.stages, chosen.milliseconds, chosen.repeat
        text = real(*size, chosen.repeat) if chosen.what == "real" else critic(*waited, *size)
    write_section(chosen.what, text, chosen.out)


if __name__ == "__main__":
    main()
