"""Variables of a shell script that is read, not run, and what words expand to.

What has no value in the script stays as it is written, between two ``MARK``s: ``$HOME`` in a path
is expanded when the recipe is loaded.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from mppo_migrate.words import RawWord, WordPiece, read_raw_commands

MARK = "\0"
_MAX_TEXT, _MAX_NESTING, _MAX_NUMBER = 1 << 24, 20, 1 << 62
_MARKED = re.compile(rf"{MARK}[^{MARK}]*{MARK}")
_PART = re.compile(rf"(?:{MARK}[^{MARK}]*{MARK}|[^\s{MARK}]+)+")
_NAME = r"(?:[A-Za-z_]\w*|\d+)"
_BRACED = re.compile(rf"\$\{{({_NAME}|[@*])(?:\[([@*])\])?(?:(:?[-=?+])(.*))?\}}", re.DOTALL)
_WORD = re.compile(r"\$?\{?([A-Za-z_]\w*)\}?")


def shown(text: str) -> str:
    """An expanded word as the user sees it."""
    return text.replace(MARK, "")


class Variables:
    """The variables and arguments of a script.

    Args:
        arguments: ``$1``, ``$2``, and so on.

    Attributes:
        exported: names of variables that scripts receive which the script starts.
    """

    def __init__(self, arguments: list[str]) -> None:
        self.arguments = arguments
        self.exported: set[str] = set()
        self._texts: dict[str, str] = {}
        self._arrays: dict[str, list[str]] = {}
        self._left = _MAX_TEXT

    def of_script(self, arguments: list[str]) -> Variables:
        """Those of a script that this one starts."""
        inner = Variables(arguments)
        for name in self.exported & self._texts.keys():
            inner.assign(name, self._texts[name], False)
        inner.exported = set(self.exported)
        return inner

    def assign(self, name: str, value: str, adds: bool) -> None:
        """``name=value``, or ``name+=value``."""
        self._texts[name] = self._texts.get(name, "") + value if adds else value
        self._spend(self._texts[name])

    def assign_array(self, name: str, values: list[str], adds: bool) -> None:
        """``name=(values)``, or ``name+=(values)``."""
        self._arrays[name] = [*(self._arrays.get(name, []) if adds else []), *values]
        self._spend(*self._arrays[name])

    def expand(self, word: RawWord) -> list[str]:
        """The words that a word becomes: several for an array, none for a variable without text."""
        found: list[str] = []
        current: list[str] | None = None
        for piece in word.pieces:
            values = self._values(piece) if piece.expands else [piece.text]
            if piece.expands and not piece.quoted:
                values = [part for value in values for part in _PART.findall(value)]
            for index, value in enumerate(values):
                if index and current is not None:
                    found.append("".join(current))
                    current = None
                if current is None:
                    current = []
                current.append(value)
        if current is not None:
            found.append("".join(current))
        return found

    def joined(self, word: RawWord) -> str:
        """What a word becomes where it is not divided: in an assignment."""
        return "".join(
            " ".join(self._values(piece)) if piece.expands else piece.text for piece in word.pieces
        )

    def expand_for_test(self, word: RawWord) -> list[str]:
        """As ``expand``, with nothing for a variable that has no value."""
        return [_MARKED.sub("", text) for text in self.expand(word)]

    def _values(self, piece: WordPiece, depth: int = 0) -> list[str]:
        source = piece.text
        if source in ("$@", "$*"):
            return self._spend(*self.arguments)
        if source.startswith("$(("):
            return self._spend(self._sum(source))
        match = _BRACED.fullmatch(source if source.startswith("${") else f"${{{source[1:]}}}")
        if match is None:
            return self._spend(MARK + source + MARK)
        name, every, sign, default = match.groups()
        values = self._values_of(name, every)
        is_set = values is not None and _MARKED.sub("", "".join(values)) != ""
        if sign and sign.endswith(("-", "=")) and not is_set:
            return [self._default(default, depth)]
        if sign and sign.endswith("+"):
            return [self._default(default, depth)] if is_set else []
        return self._spend(*(values if values is not None else [MARK + source + MARK]))

    def _values_of(self, name: str, every: str | None) -> list[str] | None:
        """The values of a name; None if it has none."""
        if name in ("@", "*"):
            return self.arguments
        if name.isdecimal():
            index = int(name) - 1
            return [self.arguments[index]] if 0 <= index < len(self.arguments) else None
        if name in self._arrays:
            return self._arrays[name] if every else self._arrays[name][:1]
        return [self._texts[name]] if name in self._texts else None

    def _default(self, source: str, depth: int) -> str:
        """The text of a default, which may have variables of its own."""
        if depth == _MAX_NESTING:
            raise ValueError(f"variables are nested more than {_MAX_NESTING} levels deep")
        inner = [piece for raw in read_raw_commands(source) for word in raw.words
                 for piece in (*word.pieces, WordPiece(" "))]  # fmt: skip
        parts = [
            " ".join(self._values(piece, depth + 1)) if piece.expands else piece.text
            for piece in inner
        ]
        return "".join(parts).strip()

    def _sum(self, source: str) -> str:
        """The value of ``$((...))``; as it is written if a part of it has none."""
        text = _WORD.sub(lambda match: f" {self._texts.get(match[1], match[0])} ", source[3:-2])
        try:
            return str(_number(ast.parse(text.strip(), mode="eval").body))
        except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
            return MARK + source + MARK

    def _spend(self, *texts: str) -> list[str]:
        """The texts; an error where a script's variables become too long."""
        self._left -= sum(map(len, texts)) + len(texts)
        if self._left < 0:
            raise ValueError(f"its variables expand to more than {_MAX_TEXT} characters")
        return list(texts)


_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


def _number(node: ast.expr) -> int:
    """The value of an integer expression. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_number(node.left), _number(node.right))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_number(node.operand)
    else:
        raise ValueError("not an integer expression")
    if abs(value) > _MAX_NUMBER:
        raise ValueError("too large")
    return value


_COMPARISONS = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le,
    "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip


def outcome(test: Sequence[str]) -> bool | None:
    """Whether a test in brackets of text and numbers holds; None for any other condition."""
    if test[-1] != {"[": "]", "[[": "]]"}[test[0]]:
        return None
    either = [_all(_divided(part, ("&&", "-a"))) for part in _divided(test[1:-1], ("||", "-o"))]
    return True if True in either else None if None in either else False


def _all(tests: Sequence[list[str]]) -> bool | None:
    results = [_holds(test) for test in tests]
    return False if False in results else None if None in results else True


def _divided(words: Sequence[str], signs: Sequence[str]) -> list[list[str]]:
    """The words between signs."""
    parts: list[list[str]] = [[]]
    for word in words:
        if word in signs:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _holds(words: list[str]) -> bool | None:
    """Whether a single test holds."""
    if words[:1] == ["!"]:
        result = _holds(words[1:]) if words[1:2] != ["!"] else None
        return None if result is None else not result
    if words[:1] in (["-z"], ["-n"]):
        return (not "".join(words[1:])) == (words[0] == "-z")
    if len(words) == 2 and words[0] in ("=", "==", "!="):  # the left side expanded to nothing
        words = ["", *words]
    if len(words) < 2:
        return "".join(words) != ""
    if len(words) != 3:
        return None
    left, sign, right = words
    if sign in _COMPARISONS and left.isdecimal() and right.isdecimal():
        return _COMPARISONS[sign](int(left), int(right)) if len(left + right) < 40 else None
    equal = left == right or fnmatchcase(left, right)
    return {"=": equal, "==": equal, "!=": not equal}.get(sign)
