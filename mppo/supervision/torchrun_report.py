"""Leaves out torchrun's own report where a rank has told a user's fault.

torchrun ends with some forty lines on the ranks that failed: a traceback of its own, and a table.
Below an error of a recipe they repeat what was said, and push it off the screen. torchrun imports
the plugins of the entry points ``torchrun.handlers`` before it starts ranks, and this module is
one: it needs no option and no other launcher. It adds no way to meet, the purpose of that group.

Reports of all other failures, and of all other programs, are printed as ever. This module is
imported by every torchrun of an environment, so it imports nothing of mppo.
"""

from __future__ import annotations

import atexit
import logging
import sys
from types import TracebackType
from typing import Any, NoReturn

TOLD = "told_by_mppo"
"""Mark in the file of a rank's reason (``exit_report.write_reason``): the user has read it."""
USERS_FAULT = 2
"""Exit code of a rank that found a fault in its input."""
_TORCHS = "torch.distributed.elastic.multiprocessing"
LOGGERS = (f"{_TORCHS}.api", f"{_TORCHS}.errors.error_handler")
_ON_A_FAILURE = (
    "failed (exitcode:",
    "Sending process %s closing signal",
    "no error file defined for parent",
)
"""Beginnings of the lines that torchrun logs before its report."""


class HeldLines(logging.Filter):
    """Holds torchrun's lines on a failure until its report is printed or left out."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[logging.LogRecord] = []
        self._releases = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Hold a line on a failure; any other line releases those before it."""
        if self._releases:
            return True
        if str(record.msg).startswith(_ON_A_FAILURE):
            self._held.append(record)
            return False
        self.release()
        return True

    def release(self) -> None:
        held, self._held, self._releases = self._held, [], True
        for record in held:
            logging.getLogger(record.name).handle(record)
        self._releases = False

    def drop(self) -> None:
        self._held = []


def is_told(error: BaseException) -> bool:
    """Whether an error of torchrun is about a user's fault that a rank of mppo has told."""
    if type(error).__name__ != "ChildFailedError":
        return False
    failures = getattr(error, "failures", {}).values()
    first = min(failures, key=lambda failure: failure.timestamp, default=None)
    if first is None or first.exitcode != USERS_FAULT or not isinstance(first.message, dict):
        return False
    return bool(first.message.get("extraInfo", {}).get(TOLD))


def install() -> Any:
    """Leave out reports on users' faults in this torchrun: torch calls it for the entry point.
    Returns a maker of rendezvous, which refuses."""
    held, report = HeldLines(), sys.excepthook

    def shortened(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if is_told(error):
            held.drop()
            return
        held.release()
        report(kind, error, trace)

    for name in LOGGERS:
        logging.getLogger(name).addFilter(held)
    atexit.register(held.release)
    sys.excepthook = shortened
    return _no_rendezvous


def _no_rendezvous(parameters: object) -> NoReturn:
    raise RuntimeError("mppo is no rendezvous backend; give torchrun --rdzv-backend c10d")
