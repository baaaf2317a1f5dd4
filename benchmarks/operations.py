"""Operations and waits of the host for each layer and micro-batch, on a simulated GPU.

    python benchmarks/operations.py RECIPE [KEY=VALUE ...] [--transformer-engine FOLDER]
        [--uneven] [--lines N] [--out FILE]

A host takes about 8 us to launch an operation, so a layer's operations bound its time from below.
The recipe's first rank runs at its true width, at two depths and with few micro-batches; the
difference of the depths is a layer's. ``--uneven``: sequences of different lengths.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import record
from mppo_simulate.case import RankCase
from mppo_simulate.gpu import te_stand_in
from mppo_simulate.gpu.counters import Counters
from mppo_simulate.isolated import isolated
from mppo_simulate.quick import fewest_layers, reduced_batch, with_layers
from mppo_simulate.rank import simulate_rank
from mppo_simulate.run import import_simulated_code

from mppo.hub.model_config import ModelConfigs
from mppo.planning.fit import plan_fit, planned_gpu
from mppo.planning.run_plan import plan_roles
from mppo.recipe.rules.rule import world_size_of
from mppo.trainer.start.loading import load_checked

RECIPES = Path(__file__).parents[1] / "recipes"
WAITS = "waits of the host"
OTHERS = re.compile(r"/torch/|/mppo_simulate/|operations\.py$")
"""Files whose lines do not say what is computed."""


def first_rank(name: str, overrides: list[str], uneven: bool) -> RankCase:
    """The first rank of a recipe, with few micro-batches."""
    path = RECIPES / f"{name}.yaml"
    configs = ModelConfigs(path)
    recipe = load_checked(path, overrides, None, configs.read, files=False)
    hf_configs = {role.name: configs.read(role.path) for role in recipe.roles()}
    world, gpu = world_size_of(recipe), planned_gpu(recipe)
    fit = plan_fit(recipe, plan_roles(recipe, world, hf_configs), gpu)
    fewer = reduced_batch(recipe, world)
    return RankCase(fewer, hf_configs, world, 0, 1, gpu, table=fit.table, uneven=uneven)


def caller() -> str:
    """Source line of the code that is simulated."""
    frame = sys._getframe(1)
    while frame.f_back is not None and OTHERS.search(frame.f_code.co_filename):
        frame = frame.f_back
    *_, folder, file = Path(frame.f_code.co_filename).parts
    return f"{folder}/{file}:{frame.f_lineno}"


def counted(case: RankCase) -> dict[str, Counter[str]]:
    """Operations by phase and source line, and waits, each for one micro-batch."""
    lines: dict[str, Counter[str]] = {}
    plain = Counters.operation

    def operation(self: Counters) -> None:
        plain(self)
        lines.setdefault(self._phase(), Counter())[caller()] += 1

    Counters.operation = operation
    result = simulate_rank(case)
    found: dict[str, Counter[str]] = {}
    for phase in result.phases:
        if count := phase.micro_batches:
            whole = lines[phase.name] + Counter({WAITS: sum(phase.waits.values())})
            found[phase.name] = Counter({line: n / count for line, n in whole.items()})
    return found


def per_layer(case: RankCase) -> dict[str, Counter[str]]:
    """The same for one layer: the difference between two depths."""
    shallow = fewest_layers(case)
    one, two = (isolated(counted, with_layers(case, n)) for n in (shallow, shallow + 1))
    return {phase: two[phase] - one[phase] for phase in one}


def main() -> None:
    """Count, print and record."""
    parser = record.parser(__doc__ or "")
    parser.add_argument("recipe", help="name of a recipe")
    parser.add_argument("overrides", nargs="*", help="keys that replace the recipe's")
    parser.add_argument("--transformer-engine", type=Path, help="as for mppo-simulate")
    parser.add_argument("--uneven", action="store_true", help="sequences of different lengths")
    parser.add_argument("--lines", type=int, default=0, help="most source lines to print")
    arguments = parser.parse_args()
    case = first_rank(arguments.recipe, arguments.overrides, arguments.uneven)
    if arguments.transformer_engine is not None:
        te_stand_in.install(arguments.transformer_engine)
        case = replace(case, transformer_engine=True)
    import_simulated_code()
    found: dict[str, Any] = {}
    for phase, lines in per_layer(case).items():
        waits = lines.pop(WAITS, 0.0)
        found[phase] = {"operations": round(lines.total(), 1), WAITS: round(waits, 1)}
        print(f"{phase}: {found[phase]}")
        for line, count in lines.most_common(arguments.lines):
            print(f"  {count:6.1f}  {line}")
    record.record({"a layer in a micro-batch": found}, arguments.out)


if __name__ == "__main__":
    main()
