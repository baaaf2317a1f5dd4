"""Reports why a rank ends: to the user, and to torchrun for its own report.

torchrun ends with a report of some forty lines on the ranks that failed. The report includes what a
rank has written to the file that TORCHELASTIC_ERROR_FILE names, so its last lines give the reason;
of a user's fault, which has been told, there is no report (``torchrun_report.py``).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from mppo.recipe.errors import printable
from mppo.safety.redact import redact_text
from mppo.supervision.torchrun_report import TOLD

VARIABLE = "TORCHELASTIC_ERROR_FILE"

FIRST_RANK_REPORTS_S = 15.0
"""Seconds within which the first rank has reported an error that all ranks find."""


def say(text: str) -> None:
    """Print lines to the user on stderr, with escapes for control characters: an error may quote
    data, and a terminal would execute them."""
    print(printable(f"mppo: {text}"), file=sys.stderr, flush=True)


def refuse_recipe(error: Exception, rank: int = 0) -> int:
    """Report an error in the input, which every rank finds, once. The first rank reports it and
    ends the job. The others wait, because launchers kill the rest when one exits; they report the
    error themselves only if the first rank did not find it."""
    if rank:
        time.sleep(FIRST_RANK_REPORTS_S)
    say(str(error))
    write_reason(f"mppo: {error}")
    return 2


def write_reason(reason: str) -> None:
    """Write the reason of the exit for torchrun's report; the first call counts."""
    name = os.environ.get(VARIABLE)
    if not name:
        return
    reason = redact_text(reason)
    extra = {"py_callstack": reason, "timestamp": str(int(time.time())), TOLD: True}
    content = {"message": {"message": reason, "extraInfo": extra}}
    try:
        with Path(name).open("x") as file:
            json.dump(content, file)
    except OSError:  # one was written before, or the disk refuses it: it has been printed anyhow
        return
