"""Train a recipe on two processes and keep what it learned.

    python benchmarks/recipe_run.py RECIPE [section.key=value ...] [--processes 2] [--out FILE]

Keeps, by step, held-out and training reward, the mismatch between the engine's and the actor's
probabilities, and the seconds of each stage.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from record import parser, record

ROOT = Path(__file__).resolve().parents[1]
KEPT = (
    "val/reward",
    "critic/score/mean",
    "response_length/mean",
    "training/rollout_logprob_diff_max",
    "rollout_corr/k3_kl",
    "actor/moe/replay_differing",
    "timing_s/gen",
    "timing_s/update_weights",
    "timing_s/step",
)


def train(recipe: Path, overrides: list[str], processes: int) -> list[dict[str, float]]:
    """One run; its metrics, line by line."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc_per_node={processes}", str(ROOT / "mppo/train.py"), "--config", str(recipe),
            f"trainer.default_local_dir={folder}/run", "trainer.export_hf=false", *overrides,
        ]  # fmt: skip
        subprocess.run(command, check=True, cwd=ROOT)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("recipe", type=Path)
    arguments.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments.add_argument("--processes", type=int, default=2)
    given = arguments.parse_intermixed_args()
    lines = train(given.recipe, given.overrides, given.processes)
    curves = {
        name: [[int(line["step"]), round(line[name], 6)] for line in lines if name in line]
        for name in KEPT
    }
    record({"curves": {name: curve for name, curve in curves.items() if curve}}, given.out)


if __name__ == "__main__":
    main()
