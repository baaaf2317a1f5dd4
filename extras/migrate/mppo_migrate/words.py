"""Cut the text of a shell script into commands and words, quotes resolved, variables not yet."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby

BLANKS = " \t\r"
_BLANKS = re.compile(r"(?:[ \t\r]+|\\\n|\\[ \t\r]+(?:#[^\n]*)?\n?|\\\Z)*")
"""Blanks before a word. A backslash there continues the line, with or without blanks or a comment
behind it, as it was meant."""
_COMMENT = re.compile(r"#[^\n]*")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=")
_OPERATOR = re.compile(r"&&|\|\||;;&?|;&|[(){}]")
_IN_TEST = re.compile(r"&&|\|\||[&|()<>]")
_PLAIN = re.compile(r"[^\s;&|<>()\\'\"$`]+|\s")
_IN_QUOTES = re.compile(r"[^\"\\$`]+")
_MAX_NESTING = 20


@dataclass(frozen=True)
class WordPiece:
    """A part of a word.

    Args:
        text: literal text, or the source of an expansion (``$NAME``, ``${...}``, ``$((...))``).
        expands: whether it is an expansion.
        quoted: whether it is in quotes: what it expands to is then one word.
    """

    text: str
    expands: bool = False
    quoted: bool = False


@dataclass(frozen=True)
class RawWord:
    """A word of a command.

    Args:
        pieces: its parts, in order.
        items: the words of an array that is assigned, ``NAME=(a b)``; None for other words.
    """

    pieces: tuple[WordPiece, ...]
    items: tuple[RawWord, ...] | None = None

    @property
    def text(self) -> str:
        """The word as written, without its quotes."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def plain(self) -> str:
        """The word if it is literal and not in quotes, else empty."""
        literal = not any(piece.expands or piece.quoted for piece in self.pieces)
        return self.text if literal else ""

    @property
    def unquoted_prefix(self) -> str:
        """Its literal text before the first quote or expansion."""
        prefix = ""
        for piece in self.pieces:
            if piece.expands or piece.quoted:
                break
            prefix += piece.text
        return prefix

    def after(self, length: int) -> RawWord:
        """The word without its first ``length`` characters, all of them literal."""
        first, *rest = self.pieces
        assert len(first.text) >= length, "the beginning of a word is in its first piece"
        return RawWord((WordPiece(first.text[length:], False, first.quoted), *rest))


@dataclass(frozen=True)
class RawCommand:
    """The words of a command, and the line on which it starts. An operator between commands
    (``&&``, ``||``, ``;;``, a bracket) is a command of one word."""

    words: tuple[RawWord, ...]
    line: int


def read_raw_commands(text: str) -> list[RawCommand]:
    """The commands of a script, in order.

    Raises:
        ValueError: a quote or bracket is not closed.
    """
    scanner = _Scanner(text.replace("\r\n", "\n"))
    commands = []
    while scanner.at < len(scanner.text):
        command = scanner.command()
        if command.words:
            commands.append(command)
    return commands


class _Scanner:
    """A position in a script that moves forward."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self._line, self._counted = 1, 0

    def line(self) -> int:
        """The line of the position, from 1."""
        self._line += self.text.count("\n", self._counted, self.at)
        self._counted = self.at
        return self._line

    def peek(self, length: int = 1) -> str:
        return self.text[self.at : self.at + length]

    def command(self) -> RawCommand:
        """The next command; without words at the end of a line or of the text."""
        words: list[RawWord] = []
        line, in_test = 0, False
        while self.at < len(self.text):
            self._run(_BLANKS)
            here = self.peek()
            operator = _OPERATOR.match(self.text, self.at)
            if here == "#":
                self._run(_COMMENT)
            elif in_test and here in "&|()<>" and here:
                words.append(_literal(self._run(_IN_TEST)))
            elif operator and not (here == "{" and self.peek(2)[1:].strip()):
                if not words:
                    words.append(_literal(operator[0]))
                    line, self.at = self.line(), operator.end()
                break
            elif here in "\n;&|":
                if self.peek(2) == "&>":
                    self._redirection()
                    continue
                self.at += 1
                break
            elif here in "<>":
                if words and words[-1].plain.isdecimal() and self.text[self.at - 1] not in BLANKS:
                    words.pop()
                self._redirection()
            elif here:
                line = line or self.line()
                words.append(self._word())
                in_test = words[-1].plain == "[[" or (in_test and words[-1].plain != "]]")
        return RawCommand(tuple(words), line)

    def _redirection(self) -> None:
        """Move behind a redirection and the file it names."""
        while self.peek() and self.peek() in "<>&|":
            self.at += 1
        self._run(_BLANKS)
        if self.peek() and self.peek() not in "\n;|":
            self._word()

    def _word(self, may_assign: bool = True) -> RawWord:
        pieces: list[WordPiece] = []
        while self.at < len(self.text):
            here = self.peek()
            if here in BLANKS + "\n;&|<>)":
                break
            if here == "(":
                if may_assign and _ARRAY.fullmatch(RawWord(_merged(pieces)).plain):
                    self.at += 1
                    return RawWord(_merged(pieces), self._array())
                break
            if here == "\\":
                if self.peek(2) == "\\\n":
                    self.at += 2
                    continue
                pieces.append(WordPiece(self.peek(2)[1:], False, True))
                self.at += 2
            elif here == "'":
                pieces.append(WordPiece(self._until("'"), False, True))
            elif here == '"':
                self._double_quoted(pieces)
            elif here == "$" or here == "`":
                self._expansion(pieces, quoted=False)
            else:
                pieces.append(WordPiece(self._run(_PLAIN)))
        return RawWord(_merged(pieces))

    def _array(self) -> tuple[RawWord, ...]:
        """The words up to the bracket that closes an array."""
        items: list[RawWord] = []
        while self.at < len(self.text):
            self._run(_BLANKS)
            here = self.peek()
            if here == ")":
                self.at += 1
                return tuple(items)
            if here == "#":
                self._run(_COMMENT)
            elif here in "\n;&|<>({}" and here:
                self.at += 1
            elif here:
                items.append(self._word(may_assign=False))
        raise ValueError("a bracket ( is not closed")

    def _run(self, pattern: re.Pattern[str]) -> str:
        """The text from here on that matches a pattern; moves behind it."""
        match = pattern.match(self.text, self.at)
        assert match is not None, "the pattern fits the character here"
        self.at = match.end()
        return match[0]

    def _until(self, quote: str) -> str:
        """The text between the quote here and the next one; moves behind it."""
        end = self.text.find(quote, self.at + 1)
        if end < 0:
            raise ValueError(f"line {self.line()}: a quote {quote} is not closed")
        found = self.text[self.at + 1 : end]
        self.at = end + 1
        return found

    def _double_quoted(self, pieces: list[WordPiece]) -> None:
        line = self.line()
        self.at += 1
        pieces.append(WordPiece("", False, True))
        while self.peek() != '"':
            here = self.peek()
            if not here:
                raise ValueError(f'line {line}: a quote " is not closed')
            if here == "\\":
                after = self.peek(2)[1:]
                if after != "\n":
                    kept = after if after in '"\\$`' else here + after
                    pieces.append(WordPiece(kept, False, True))
                self.at += 2
            elif here == "$" or here == "`":
                self._expansion(pieces, quoted=True)
            else:
                pieces.append(WordPiece(self._run(_IN_QUOTES), False, True))
        self.at += 1

    def _expansion(self, pieces: list[WordPiece], quoted: bool) -> None:
        """Add the expansion that starts here; a dollar sign alone is literal."""
        source = _expansion_at(self.text, self.at)
        pieces.append(WordPiece(source, len(source) > 1, quoted))
        self.at += len(source)


_SIMPLE = re.compile(r"\$(?:[A-Za-z_]\w*|\d|[@*#?$!-])")


def _expansion_at(text: str, at: int) -> str:
    """The source of the expansion at a position: ``$NAME``, ``${...}``, ``$(...)`` or in
    backquotes; ``$`` if there is none."""
    if text[at] == "`":
        end = text.find("`", at + 1)
        if end < 0:
            raise ValueError("a quote ` is not closed")
        return text[at : end + 1]
    match = _SIMPLE.match(text, at)
    if match:
        return match[0]
    opening = text[at + 1 : at + 2]
    if opening not in ("{", "("):
        return "$"
    closing = "}" if opening == "{" else ")"
    depth = 0
    for position in range(at + 1, len(text)):
        if text[position] == opening:
            depth += 1
            if depth > _MAX_NESTING:
                raise ValueError(f"brackets are nested more than {_MAX_NESTING} levels deep")
        elif text[position] == closing:
            depth -= 1
            if not depth:
                return text[at : position + 1]
    raise ValueError(f"a bracket {opening} is not closed")


def _literal(text: str) -> RawWord:
    return RawWord((WordPiece(text),))


def _merged(pieces: list[WordPiece]) -> tuple[WordPiece, ...]:
    """The pieces with neighbours joined that are literal and alike."""
    alike = groupby(pieces, lambda piece: (id(piece) if piece.expands else 0, piece.quoted))
    joined = []
    for _, group in alike:
        parts = list(group)
        joined.append(WordPiece("".join(p.text for p in parts), parts[0].expands, parts[0].quoted))
    return tuple(joined)
