"""``mppo-replay``: repeat a mini-batch whose loss or gradient was not finite.

``torchrun -m mppo.replay RUN/nonfinite/step_12`` restores the roles of that step, runs the
mini-batch forward and backward, and prints where numbers that are not finite first appear: in the
batch, a layer's output, the loss, or a parameter's gradient.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mppo.safety.redact import redacted_output
from mppo.supervision import exit_report
from mppo.supervision.rank_guard import start_guarded


@redacted_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings of every rank; exit code 2 for a folder without a case, or with pickles
    that would run code."""
    parser = argparse.ArgumentParser(prog="mppo-replay", description=__doc__)
    parser.add_argument("folder", type=Path, help="RUN/nonfinite/step_N")
    folder = parser.parse_args(argv).folder
    try:
        info, guard = start_guarded()
    except ValueError as error:
        return exit_report.refuse_recipe(error)
    from mppo.trainer.update.case_replay import has_case, replay_case  # it imports torch

    if not has_case(folder):
        parser.error(f"{folder} has no case; give a folder RUN/nonfinite/step_N")
    return replay_case(folder, info, guard)


if __name__ == "__main__":
    sys.exit(main())
