"""Comparison of the output that a page shows with the output of the command."""

from __future__ import annotations

import re

VARYING = (
    (re.compile(r"(\w\.py):\d+"), r"\1:N"),  # a line of the code
    (re.compile(r"\d+(\.\d+)? (s|GB left on the disk)\b"), r"N \2"),
    (re.compile(r"\d+\.\d+ GB/s"), "N GB/s"),
)
"""What differs from run to run, and what takes its place in both texts."""
NUMBER = re.compile(r"(?<![a-z])[0-9a-f]*\d[0-9a-f.,]*(e-\d+)?")


class Output:
    """The output of a command, read in the order in which the page shows its lines.

    Args:
        text: the output.
        numbers: False if the page shows another run, whose numbers differ.
    """

    def __init__(self, text: str, numbers: bool) -> None:
        self._numbers = numbers
        self._lines = [self._plain(line) for line in text.splitlines()]

    def __str__(self) -> str:
        return "\n".join(self._lines)

    def missing(self, shown: str) -> list[str]:
        """Lines of the page that do not come next in the output; the page may leave lines out."""
        absent = []
        for line in filter(None, map(str.strip, shown.splitlines())):
            try:
                position = self._lines.index(self._plain(line))
            except ValueError:
                absent.append(line)
            else:
                del self._lines[: position + 1]
        return absent

    def _plain(self, line: str) -> str:
        for pattern, name in VARYING:
            line = pattern.sub(name, line)
        line = line if self._numbers else NUMBER.sub("N", line)
        return " ".join(line.split())
