"""The checks that one GPU allows; called by one_gpu.sh.

    tests/gpu/one_gpu.sh [--out DIR] [--wheels DIR] [--only NAME ...] [--device cpu]

Several ranks share the GPU (``MPPO_SHARE_GPU``), so that TP2 and PP2 execute CUDA code. Versions
that differ from the tested ones are recorded, not refused. ``DIR/report.md`` is written anew after
every check. ``--device cpu`` runs the same checks on a CPU, to test them themselves.

The exit code is 0 if all checks pass, 1 if one fails, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gpu_machine import describe_machine
from gpu_report import FAILED, report_text, run_checks, selected
from small_checks import Place, small_checks


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks; see the module's text."""
    parser = argparse.ArgumentParser(
        prog="tests/gpu/one_gpu.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("gpu_report"), help="folder for results")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="checks whose names contain NAME")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args(argv)
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("mppo: torch sees no GPU (see nvidia-smi)", file=sys.stderr)
        return 2
    folder: Path = arguments.out.absolute()
    (folder / "numbers").mkdir(parents=True, exist_ok=True)
    stages = selected(small_checks(Place(folder, arguments.device, share=True)), arguments.only)
    if not stages:
        print(f"mppo: --only {' '.join(arguments.only)}: no check has such a name", file=sys.stderr)
        return 2
    machine, report = describe_machine(), folder / "report.md"
    results = run_checks(stages, folder, lambda got: report.write_text(report_text(machine, got)))
    for result in results:
        print(f"{result.state:8} {result.check.name:20} {result.seconds:5.0f} s  {result.found}")
    print(f"report: {report}")
    return 1 if any(result.state == FAILED for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
