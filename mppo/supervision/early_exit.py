"""A run that has not finished does not end with exit code 0.

``os._exit(0)`` in code of others (a model's own Python, a library) ends a rank without a word and
as if all were well. A rank that the others lose is noticed by their heartbeat; alone, or where all
leave alike, nobody is left to notice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from mppo.supervision import last_words
from mppo.supervision.phase import current

EXIT_CODE = 1


@contextmanager
def no_early_success() -> Iterator[None]:
    """Inside, ``os._exit(0)`` of this process ends it with exit code 1, and says so; processes that
    it forks leave as they like."""
    leave, owner = os._exit, os.getpid()

    def leave_truthfully(code: int) -> NoReturn:
        if code == 0 and os.getpid() == owner:
            text = f"os._exit(0) was called before the run had finished, while {current()}"
            last_words.say(text)
            last_words.leave(f"mppo: {text}")
            code = EXIT_CODE
        leave(code)

    os._exit = leave_truthfully
    try:
        yield
    finally:
        os._exit = leave
