"""Every shipped recipe, whose ranks are simulated together.

    python benchmarks/simulate_recipes.py [--recipes NAME ...] [--at-once N] [--out FILE]

``mppo-simulate RECIPE --all --quick --steps 1`` for one of those with equal ranks
(``tests/support/recipe_list.py``), and for the recipes for CPUs. The exit code is 1 if something is
found.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import record

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
KINDS = ("communications:", "streams:", "waits:")


def simulated(name: str, at_once: int) -> dict[str, Any]:
    """What ``mppo-simulate`` says of a recipe: its exit code, and a line per kind of finding."""
    command = [sys.executable, "-W", "ignore", "-m", "mppo_simulate", f"recipes/{name}.yaml"]
    options = ["--all", "--quick", "--steps", "1", "--at-once", str(at_once)]
    begin = time.monotonic()
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    found: dict[str, Any] = {"exit_code": done.returncode, "s": round(time.monotonic() - begin)}
    found["ranks"] = next((line[2:] for line in lines if " stand for all" in line), "")
    found["found"] = [line for line in lines if line.startswith(KINDS)]
    if done.returncode:
        found["output"] = (lines + done.stderr.splitlines())[-40:]
    return found


def main() -> int:
    from recipe_list import CPU_RECIPES, simulated_recipes

    chosen = [*sorted(set(simulated_recipes().values())), *(path.stem for path in CPU_RECIPES)]
    parser = record.parser(__doc__ or "")
    parser.add_argument("--recipes", nargs="+", default=chosen, help="default: all")
    parser.add_argument("--at-once", type=int, default=2, help="ranks simulated at once")
    arguments = parser.parse_args()
    rows = {}
    for name in arguments.recipes:
        rows[name] = simulated(name, arguments.at_once)
        print(name, rows[name], file=sys.stderr, flush=True)
    bad = [name for name, row in rows.items() if row["exit_code"]]
    equal = {name: other for name, other in simulated_recipes().items() if name != other}
    record.record({"failed": bad, "recipes": rows, "equal_ranks": equal}, arguments.out)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
