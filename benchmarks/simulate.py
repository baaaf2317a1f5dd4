"""Memory, operations and host waits of the shipped cluster recipes on a simulated GPU.

    python benchmarks/simulate.py [RECIPE ...] [--stages first last] [--full] [--out FILE]
        [--table FILE] [--transformer-engine FOLDER]

Simulates the first and last pipeline stage of each recipe in quick mode (``--full``: at full depth
and batch). Times are processor seconds, because wall-clock times vary on a shared machine.
"""

from __future__ import annotations

import resource
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import record
from mppo_simulate.case import RankCase
from mppo_simulate.gpu import te_stand_in
from mppo_simulate.isolated import isolated
from mppo_simulate.quick import quick_result
from mppo_simulate.rank import RankResult, simulate_rank
from mppo_simulate.run import import_simulated_code

from mppo.hub.model_config import ModelConfigs
from mppo.planning.fit import plan_fit
from mppo.planning.residency import GENERATION
from mppo.planning.run_plan import plan_roles, plan_use
from mppo.recipe.gpu_types import GIB, find_gpu
from mppo.recipe.rules.rule import world_size_of
from mppo.trainer.start.loading import load_checked

RECIPES = Path(__file__).parents[1] / "recipes"
SMALL = ("tiny_", "demo", "smollm2")


def cases(path: Path, stages: list[str], gpu: str) -> dict[str, RankCase]:
    """The ranks of a recipe to simulate, by stage."""
    configs = ModelConfigs(path)
    recipe = load_checked(path, [], None, configs.read, files=False)
    world = world_size_of(recipe)
    hf_configs = {role.name: configs.read(role.path) for role in recipe.roles()}
    plans = plan_roles(recipe, world, hf_configs)
    fit = plan_fit(recipe, plans, find_gpu(gpu))
    layouts = [role.megatron.layout(world) for role in recipe.roles()]
    layout = max(layouts, key=lambda layout: layout.pp)
    wanted = {"first": 0, "last": layout.pp - 1}
    found = {}
    for stage in stages if layout.pp > 1 else ("first",):
        rank = next(r for r in range(world) if layout.coordinates(r).pp == wanted[stage])
        found[stage] = RankCase(recipe, hf_configs, world, rank, 1, fit.gpu, table=fit.table)
    return found


def measured(case: RankCase, full: bool) -> dict[str, Any]:
    """A rank's numbers, and the processor seconds they took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    once = partial(isolated, simulate_rank)
    result: RankResult = once(case) if full else quick_result(case, once)
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    plans = plan_roles(case.recipe, case.world_size, case.hf_configs)
    use = plan_use(case.recipe, plans, case.rank)
    assert case.table is not None
    waiting = next(one for one in use.uses if one.name == GENERATION)
    return {
        "rank": case.rank,
        "world": case.world_size,
        "processor_seconds": round(seconds, 1),
        "resident_gib": round(result.resident.total() / GIB, 2),
        "planned_resident_gib": round(use.peak(waiting, case.table) / GIB, 2),
        "host_gib": round(result.pinned.total() / GIB, 2),
        "planned_host_gib": round(use.host(case.table) / GIB, 2),
        "phases": {
            phase.name: {
                "peak_gib": round(phase.peak / GIB, 2),
                "at": phase.line,
                "operations": round(phase.operations),
                "micro_batches": round(phase.micro_batches),
                "waits": sum(phase.waits.values()),
                "gib_moved": round(sum(phase.nbytes.values()) / GIB, 1),
            }
            for phase in result.phases
        },
    }


def table(ranks: dict[str, dict[str, Any]]) -> str:
    """The results as a Markdown table.

    Args:
        ranks: results of ``measured`` by recipe and stage.
    """
    heads = ["recipe, stage", "CPU s", "resident, plan GiB", "largest peak GiB, phase"]
    heads += ["actor update: operations, waits", "critic update", "weight sync"]
    lines = [f"| {' | '.join(heads)} |", "|-" * len(heads) + "|"]
    for name, found in ranks.items():
        phases = found["phases"]
        at = max(phases, key=lambda phase: phases[phase]["peak_gib"])
        cells = [name, f"{found['processor_seconds']:.0f}"]
        cells.append(f"{found['resident_gib']:.2f}, {found['planned_resident_gib']:.2f}")
        cells.append(f"{phases[at]['peak_gib']:.2f}, {at}")
        for phase in ("updating actor", "updating critic", "weight sync"):
            counts = phases[phase]
            by = counts["micro_batches"] or 1
            cells.append(f"{counts['operations'] / by:,.0f}, {counts['waits'] / by:,.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Simulate and record."""
    parser = record.parser(__doc__)
    parser.add_argument("recipes", nargs="*", help="names; default: all cluster recipes")
    parser.add_argument("--stages", nargs="+", choices=("first", "last"), default=["first", "last"])
    parser.add_argument("--full", action="store_true", help="full depth and batch")
    parser.add_argument("--gpu", default="h100-80gb")
    parser.add_argument("--table", type=Path, help="Markdown file for the results as a table")
    parser.add_argument("--transformer-engine", type=Path, help="as for mppo-simulate")
    arguments = parser.parse_args()
    names = arguments.recipes or sorted(
        path.stem for path in RECIPES.glob("*.yaml") if not path.stem.startswith(SMALL)
    )
    with_te = arguments.transformer_engine is not None
    if with_te:
        te_stand_in.install(arguments.transformer_engine)
    import_simulated_code()
    found: dict[str, Any] = {}
    for name in names:
        for stage, case in cases(RECIPES / f"{name}.yaml", arguments.stages, arguments.gpu).items():
            case = replace(case, transformer_engine=with_te)
            found[f"{name} {stage}"] = measured(case, arguments.full)
            print(name, stage, found[f"{name} {stage}"], flush=True)
    if arguments.table:
        arguments.table.write_text(table(found))
    record.record({"mode": "full" if arguments.full else "quick", "ranks": found}, arguments.out)


if __name__ == "__main__":
    main()
