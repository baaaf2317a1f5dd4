"""The error of bad input: what a user wrote, or what a file or server of theirs holds."""

from __future__ import annotations


class InputError(ValueError):
    """Bad input, told in one sentence: key or file, value, why, cure.

    The programs print it without a traceback and exit with code 2. Any other ``ValueError`` comes
    from a library's call and indicates a bug.
    """
