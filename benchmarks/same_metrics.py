"""Compare every metric of the same recipe between the checkouts of two commits.

    python benchmarks/same_metrics.py OTHER_CHECKOUT [--recipe RECIPE] [section.key=value ...]

Both checkouts use the environment of this script. Metrics with times or sizes of this machine are
not compared; all others must be equal to the last digit. Exit code 1 if one differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
OF_THE_MACHINE = (
    "timing", "perf/", "eps", "conversation/agent_s/", "conversation/generation_s/",
)  # fmt: skip


def train(checkout: Path, recipe: str, run_dir: Path, overrides: list[str]) -> list[dict]:
    """Train on two processes; the metrics of every step."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    keys = [f"trainer.default_local_dir={run_dir}", "trainer.export_hf=false", *overrides]
    subprocess.run(
        [*launcher, "mppo/train.py", "--config", recipe, *keys],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]


def differences(here: list[dict], there: list[dict]) -> list[str]:
    """Metrics that differ, by step, and metrics that only one has."""
    found = [] if len(here) == len(there) else [f"{len(here)} and {len(there)} steps"]
    for mine, other in zip(here, there):
        names = {n for n in mine.keys() | other.keys() if not n.startswith(OF_THE_MACHINE)}
        found += [
            f"step {mine['step']}: {name}: {mine.get(name)} and {other.get(name)}"
            for name in sorted(names)
            if mine.get(name) != other.get(name)
        ]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path, help="checkout of the other commit")
    parser.add_argument("--recipe", default="recipes/demo.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            train(checkout.resolve(), options.recipe, Path(folder) / name, options.overrides)
            for name, checkout in (("here", ROOT), ("there", options.other))
        ]
    found = differences(*runs)
    print("\n".join(found) or f"all metrics of {len(runs[0])} rows are equal")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
