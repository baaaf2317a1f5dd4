"""Time and size of making the HTML report, and time until Chromium has drawn it.

    python benchmarks/report.py [--steps 100 1000 10000] [--ranks 8 512] [--repeat 3] [--out FILE]

Each run folder has the metrics of a run with a critic and a mixture of 61 layers, the per-rank
metrics that so many ranks log, and a recorded update of 16 stages. ``make_s`` is the processor time
of the smallest repetition from the files to the page's file. ``drawn_ms`` is ``performance.now()``
in a headless Chromium when all plots are drawn, from the start of the navigation; the smallest
repetition; null without a browser. The machine's other work lengthens it.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from record import parser, record

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from browser import NAMES, open_browser  # noqa: E402
from recorded_update import recorded_update, schedule_of, write_timeline  # noqa: E402

LAYERS, STAGES = 61, 16
WAVES = (
    "critic/score/mean", "critic/score/min", "critic/score/max", "critic/score/equal_groups",
    "objective/kl", "actor/reward_kl_penalty", "actor/reward_kl_penalty_coeff",
    "policy/entropy_avg", "response_length/mean", "response_length/max",
    "response_length/clip_ratio", "actor/pg_clipfrac", "actor/pg_clipfrac_lower",
    "critic/vf_clipfrac", "critic/vf_explained_var", "training/rollout_logprob_diff_mean",
    "training/rollout_logprob_diff_max", "rollout_corr/kl", "actor/pg_loss", "critic/vf_loss",
    "actor/grad_norm", "critic/grad_norm", "actor/lr", "critic/lr", "perf/tokens_per_second",
    "training/skipped_steps", "timing_s/gen", "timing_s/reward", "timing_s/log_probs",
    "timing_s/adv", "timing_s/update", "timing_s/update_weights",
)  # fmt: skip


def write_run(folder: Path, steps: int, ranks: int) -> None:
    """A run folder with as many metrics as a real run logs for the plots."""
    from mppo.report.history import MEMORY, PROBE
    from mppo.trainer.metrics import by_rank

    draw = random.Random(0)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            row = {name: math.sin(step / 50 + i) + 2 for i, name in enumerate(WAVES)}
            row["timing_s/step"] = sum(v for name, v in row.items() if name.startswith("timing_s/"))
            row |= by_rank(PROBE, [1 + draw.random() / 10 for _ in range(ranks)])
            row |= by_rank(MEMORY, [60 + draw.random() for _ in range(ranks)])
            for layer in range(LAYERS):
                for key, value in (("max_vio", 1.0), ("min_vio", -0.5), ("avg_vio", 0.2)):
                    row[f"actor/moe/layer_{layer}/{key}"] = value + draw.random() / 10
            if step % 500 == 0:
                row |= {"val/reward": 0.5, "val-core/gsm8k/reward/mean": 0.5}
            file.write(json.dumps({"step": step, **row}) + "\n")
    (folder / "recipe.yaml").write_text("trainer: {project_name: p, experiment_name: e}\n")
    write_timeline(folder, steps, recorded_update(schedule_of(STAGES)))


def measure(folder: Path, repeat: int, page: Any) -> dict[str, Any]:
    """Time of making and of drawing the page of a run folder, and its size."""
    from mppo.report.html.page import page_data, page_text

    file, made, drawn = folder / "report.html", [], []
    for _ in range(repeat):
        start = time.process_time()
        file.write_text(page_text(page_data([folder])))
        made.append(time.process_time() - start)
    for _ in range(repeat if page is not None else 0):
        page.open(file.as_uri())
        drawn.append(int(page.look("document.documentElement.dataset.ready")))
        assert page.errors == [], page.errors
    return {
        "make_s": round(min(made), 3),
        "drawn_ms": min(drawn, default=None),
        "page_mb": round(file.stat().st_size / 1e6, 3),
        "metrics_mb": round((folder / "metrics.jsonl").stat().st_size / 1e6, 3),
    }


def main() -> None:
    arguments = parser(__doc__, repeat=3)
    arguments.add_argument("--steps", type=int, nargs="+", default=[100, 1000, 10_000])
    arguments.add_argument("--ranks", type=int, nargs="+", default=[8, 512])
    chosen = arguments.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        found = any(map(shutil.which, NAMES))
        with open_browser(Path(name) / "browser") if found else nullcontext() as page:
            for ranks in chosen.ranks:
                for steps in chosen.steps:
                    folder = Path(name) / f"{steps}_{ranks}"
                    folder.mkdir()
                    write_run(folder, steps, ranks)
                    results[f"{steps} steps, {ranks} ranks"] = measure(folder, chosen.repeat, page)
    setting = {"layers": LAYERS, "stages": STAGES, "repeat": chosen.repeat}
    record({**setting, "runs": results}, chosen.out)


if __name__ == "__main__":
    main()
