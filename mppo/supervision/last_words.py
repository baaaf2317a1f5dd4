"""Why a rank ends, for the user and for torchrun's report of it.

torchrun ends with a report of some forty lines on the ranks that failed, and shows in it what a
rank has left in the file that TORCHELASTIC_ERROR_FILE names. So the last lines say the reason, too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from mppo.safety.redact import redact_text

VARIABLE = "TORCHELASTIC_ERROR_FILE"

FIRST_RANK_SPEAKS_S = 15.0
"""Within this time of a fault the first rank has told it, however late it started."""


def say(text: str) -> None:
    """A line of mppo's for the user, beside what a run reports."""
    print(f"mppo: {text}", file=sys.stderr, flush=True)


def refuse_recipe(error: Exception, rank: int = 0) -> int:
    """Tell, once, what every rank finds wrong with what it was given.

    The first rank tells it and ends the job. Were another to exit first, launchers would kill the
    first before it spoke; the others wait, and speak only where the first had nothing to refuse.

    Returns:
        The exit code.
    """
    if rank:
        time.sleep(FIRST_RANK_SPEAKS_S)
    text = f"mppo: {error}"
    print(text, file=sys.stderr, flush=True)
    leave(text)
    return 2


def leave(reason: str) -> None:
    """Have torchrun's report give a reason; the first one counts. Without torchrun nothing."""
    name = os.environ.get(VARIABLE)
    if not name:
        return
    reason = redact_text(reason)
    extra = {"py_callstack": reason, "timestamp": str(int(time.time()))}
    content = {"message": {"message": reason, "extraInfo": extra}}
    try:
        with Path(name).open("x") as file:
            json.dump(content, file)
    except OSError:  # there is one already; or no place for it: the reason has been printed
        return
