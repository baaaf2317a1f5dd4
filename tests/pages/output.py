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
        tolerance: relative difference of a number that is allowed; None: the page shows another
            run, only its words are compared.
    """

    def __init__(self, text: str, tolerance: float | None = 0.0) -> None:
        self._tolerance = tolerance
        self._lines = [_plain(line) for line in text.splitlines()]

    def __str__(self) -> str:
        return "\n".join(self._lines)

    def missing(self, shown: str) -> list[str]:
        """Lines of the page that do not come next in the output; the page may leave lines out."""
        absent = []
        for line in filter(None, map(str.strip, shown.splitlines())):
            wanted = _plain(line)
            same = (i for i, each in enumerate(self._lines) if self._equal(wanted, each))
            position = next(same, None)
            if position is None:
                absent.append(line)
            else:
                del self._lines[: position + 1]
        return absent

    def _equal(self, a: str, b: str) -> bool:
        if not self._tolerance:
            return a == b if self._tolerance == 0 else _words(a) == _words(b)
        numbers = [[_value(found[0]) for found in NUMBER.finditer(line)] for line in (a, b)]
        return _words(a) == _words(b) and all(
            abs(x - y) <= self._tolerance * max(x, y) + 0.011 for x, y in zip(*numbers, strict=True)
        )


def _plain(line: str) -> str:
    for pattern, name in VARYING:
        line = pattern.sub(name, line)
    return " ".join(line.split())


def _words(line: str) -> str:
    return NUMBER.sub("N", line)


def _value(number: str) -> float:
    return float(re.sub(r"[^0-9.]", "", number).strip(".") or 0)
