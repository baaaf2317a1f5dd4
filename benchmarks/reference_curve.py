"""A run of ``recipes/qwen2.5_0.5b_gsm8k.yaml`` beside verl's own run, step by step.

    python benchmarks/reference_curve.py RUN_FOLDER [--out curve.svg]

Prints a table: each metric at the steps that ``verl_gsm8k_curve.json`` has, verl's value and the
run's; ``-`` where the run has none (yet). ``--out`` draws both curves.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from mppo.report.history import read_history
from mppo.safety.input_error import InputError

REFERENCE = Path(__file__).with_name("verl_gsm8k_curve.json")
Curve = dict[int, float]


def read_reference() -> dict[str, Curve]:
    """verl's values by metric and steps done."""
    facts = json.loads(REFERENCE.read_text())
    return {
        name: {int(step): value for step, value in curve.items()}
        for name, curve in facts.items()
        if isinstance(curve, dict)
    }


def read_run(folder: Path) -> dict[str, Curve]:
    """The run's values of the same metrics.

    Raises:
        InputError: the folder has no metrics.jsonl, or it is damaged.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise InputError(f"{path} is no file: name the folder of a run (trainer.default_local_dir)")
    rows = read_history(path)
    return {
        name: {step: row[name] for step, row in rows if name in row} for name in read_reference()
    }


def table(reference: dict[str, Curve], run: dict[str, Curve]) -> list[str]:
    """Lines of metric, step, verl's value and the run's."""
    lines = [f"{'metric':36}{'step':>6}{'verl':>10}{'run':>10}"]
    for name, curve in reference.items():
        for step, value in sorted(curve.items()):
            own = run[name].get(step)
            shown = "-" if own is None else f"{own:.4g}"
            lines.append(f"{name:36}{step:>6}{value:>10.4g}{shown:>10}")
    return lines


def draw(reference: dict[str, Curve], run: dict[str, Curve], out: Path) -> None:
    """One plot per metric: verl's points, the run's line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(reference), figsize=(5 * len(reference), 4))
    for axis, (name, curve) in zip(axes, reference.items(), strict=True):
        own = sorted(run[name].items())
        axis.plot([s for s, _ in own], [v for _, v in own], label="run")
        axis.plot(list(curve), list(curve.values()), "o", label="verl")
        axis.set(title=name, xlabel="step")
        axis.legend()
    figure.tight_layout()
    figure.savefig(out)


def main() -> int:
    """Print the table; 2 if the folder is not that of a run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--out", type=Path, help="file of a plot")
    arguments = parser.parse_args()
    reference = read_reference()
    try:
        run = read_run(arguments.run)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(table(reference, run)))
    if arguments.out:
        draw(reference, run, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
