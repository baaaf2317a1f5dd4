"""Prevents exit code 0 before the run has finished.

``os._exit(0)`` in other code (a model's Python files, a library) ends a rank silently and reports
success. If other ranks remain, their heartbeat notices the lost rank. If there are none, or all
ranks exit in the same way, nothing else would notice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from mppo.supervision import exit_report
from mppo.supervision.phase import current

EXIT_CODE = 1


@contextmanager
def no_early_success() -> Iterator[None]:
    """Inside, ``os._exit(0)`` in this process prints an error and exits with code 1.

    Processes forked from it are not affected.
    """
    exit_now, owner = os._exit, os.getpid()

    def exit_with_error(code: int) -> NoReturn:
        if code == 0 and os.getpid() == owner:
            text = f"os._exit(0) was called before the run had finished, while {current()}"
            exit_report.say(text)
            exit_report.write_reason(f"mppo: {text}")
            code = EXIT_CODE
        exit_now(code)

    os._exit = exit_with_error
    try:
        yield
    finally:
        os._exit = exit_now
