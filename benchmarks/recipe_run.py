"""Train a recipe on two processes and record its rewards and times.

    python benchmarks/recipe_run.py RECIPE [section.key=value ...] [--processes 2] [--seeds 1 2 3]
                                    [--out FILE]

Records, by step, held-out and training reward, the scores of reward model and rule, the mismatch
between the engine's and the actor's probabilities, and the seconds of each stage; also the duration
of the complete run with its start. With ``--seeds`` one run after the other, by ``trainer.seed``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from record import parser, record

ROOT = Path(__file__).resolve().parents[1]
KEPT = (
    "val/reward",
    "critic/score/mean",
    "response_length/mean",
    "conversation/turns/mean",
    "training/rollout_logprob_diff_max",
    "rollout_corr/k3_kl",
    "actor/moe/replay_differing",
    "timing_s/gen",
    "timing_s/update_weights",
    "timing_s/step",
)


def train(recipe: Path, overrides: list[str], processes: int) -> tuple[list[dict], float]:
    """One run; its metrics, line by line, and its seconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc_per_node={processes}", str(ROOT / "mppo/train.py"), "--config", str(recipe),
            f"trainer.default_local_dir={folder}/run", "trainer.export_hf=false", *overrides,
        ]  # fmt: skip
        start = time.perf_counter()
        subprocess.run(command, check=True, cwd=ROOT)
        seconds = time.perf_counter() - start
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], seconds


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("recipe", type=Path)
    arguments.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments.add_argument("--processes", type=int, default=2)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[])
    given = arguments.parse_intermixed_args()
    seeds = {
        seed: measured(given.recipe, [*given.overrides, f"trainer.seed={seed}"], given.processes)
        for seed in given.seeds
    }
    one = {} if seeds else measured(given.recipe, given.overrides, given.processes)
    record({"seeds": seeds} if seeds else one, given.out)


def measured(recipe: Path, overrides: list[str], processes: int) -> dict[str, object]:
    """The result of one run."""
    lines, seconds = train(recipe, overrides, processes)
    scores = [name for name in lines[-1] if name.endswith(("/rm_score/mean", "/rule_score/mean"))]
    curves = {
        name: [[int(line["step"]), round(line[name], 6)] for line in lines if name in line]
        for name in (*KEPT, *scores)
    }
    return {"seconds": seconds, "curves": {name: curve for name, curve in curves.items() if curve}}


if __name__ == "__main__":
    main()
