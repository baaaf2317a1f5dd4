"""The checks that one GPU allows; called by one_gpu.sh.

    tests/gpu/one_gpu.sh [--out DIR] [--wheels DIR] [--only NAME ...] [--commit HASH]
        [--device cpu]

Several ranks share the GPU (``MPPO_SHARE_GPU``), so that TP2 and PP2 execute CUDA code. Versions
that differ from the tested ones are recorded, not refused. ``DIR/report.md`` is written anew after
every check. ``--device cpu`` runs the same checks on a CPU, to test them themselves.

The exit code is 0 if all checks pass, 1 if one fails, 2 without a GPU or torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gpu_machine import torch_problem
from gpu_report import parser, report_checks
from small_checks import Place, small_checks


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks; see the module's text."""
    options = parser("tests/gpu/one_gpu.sh", __doc__ or "")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = options.parse_args(argv)
    why = torch_problem()
    if why is not None:
        print(f"mppo: {why}", file=sys.stderr)
        return 2
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("mppo: torch sees no GPU (see nvidia-smi)", file=sys.stderr)
        return 2
    folder = arguments.out.absolute()
    checks = small_checks(Place(folder, arguments.device, share=True))
    return report_checks(checks, folder, arguments.only, arguments.commit)


if __name__ == "__main__":
    sys.exit(main())
