"""Read a shell script without running it: the commands that it would start, variables replaced.

Understood are quotes, comments, continued lines, assignments, arrays, ``export``, ``shift``,
``${NAME:-default}``, ``$1`` and ``$@``, integer arithmetic, redirections, ``case``, and ``if``,
``&&`` and ``||`` with tests of text and numbers. Any other condition is not known: it counts as
false in an ``if``, and what stands behind its ``&&`` and ``||`` is read. The body of a loop or
function is read once. Anything else stays as it is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from mppo_migrate.expansion import MARK, Variables, outcome, shown
from mppo_migrate.words import RawCommand, RawWord, read_raw_commands

_SETTING = re.compile(r"[+~]{0,2}\w+(\.\w+)+=|--\w")
"""The start of a word that no command begins with: a setting or a flag."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_STARTS = re.compile(r"\$\((?!\()|`")
_DECLARE = {"export", "local", "declare", "readonly", "typeset"}
_BEFORE_A_COMMAND = {"do", "time", "exec", "nohup", "sudo", "eval"}
_CLOSED_BY = {"fi": "if", "esac": "case", "}": "{", ")": "("}
_OF_BLOCKS = {"if", "then", "elif", "else", "{", "(", ";;", ";&", ";;&", *_CLOSED_BY}
_WORDS_OF = {
    "if": {"then", "elif", "else", "fi"},
    "case": {";;", ";&", ";;&", "esac"},
    "{": {"}"},
    "(": {")"},
}
_STATUS = {"true": True, ":": True, "shift": True, "false": False}
_SAME_SHELL = {"source", "."}
_SHELLS = {"bash", "sh", *_SAME_SHELL}
_MAX_SCRIPTS = 4
"""Scripts that start each other."""


@dataclass(frozen=True)
class Command:
    """A command of a script.

    Args:
        words: the program and its arguments; what cannot be known stays as written: ``$NAME``.
        line: where it starts, from 1.
    """

    words: tuple[str, ...]
    line: int


ReadScript = Callable[[str], str | None]
"""From the name of a script to its text; None if there is no such script."""


@dataclass
class _Block:
    """An ``if``, ``case`` or bracket that is open.

    Args:
        kind: its first word.
        outside: whether it is reached.
        runs: whether its next command is reached.
        had_one: whether one of its branches has run.
        subject: what a ``case`` compares.
        in_patterns: whether the next words are patterns of a ``case``.
        doubts: ``_Shell.doubts`` where it stands.
    """

    kind: str
    outside: bool
    runs: bool
    had_one: bool = False
    subject: str = ""
    in_patterns: bool = False
    doubts: bool = False

    def enter(self, runs: bool) -> None:
        """Begin a branch, which runs if none before it did."""
        self.runs = self.outside and runs and not self.had_one
        self.had_one |= self.runs


@dataclass
class _Shell:
    """The state of a script that is read.

    Args:
        variables: what is assigned so far.
        read_script: for scripts that the script starts.
        remarks: what the user should know.
        depth: scripts that started this one.
        blocks: those that are open.
        status: whether the last command succeeded; None: not known.
        fails: whether a status that is not known can be false: not that of an assignment.
        skips: whether ``&&`` or ``||`` leaves out the next command.
        doubts: whether the next command stands behind ``&&`` and what can be false: it is read, and
            so is what stands behind its ``||``.
    """

    variables: Variables
    read_script: ReadScript
    remarks: list[str]
    depth: int = 0
    blocks: list[_Block] = field(default_factory=list)
    status: bool | None = None
    fails: bool = False
    skips: bool = False
    doubts: bool = False

    def run(self, text: str) -> Iterator[Command]:
        """The commands of a script's text."""
        for raw in _with_lost_lines(read_raw_commands(text), self.remarks):
            word = raw.words[0].plain
            if self.blocks and self.blocks[-1].in_patterns and word != "esac":
                self._patterns(self.blocks[-1], raw.words, raw.line)
            elif word in ("&&", "||"):
                self.skips = self.status is (word == "||")
                self.doubts = self.fails and self.status is None and word == "&&"
            else:
                yield from self._step(raw)
                self.skips = self.doubts = False

    def _runs(self) -> bool:
        return not self.skips and (not self.blocks or self.blocks[-1].runs)

    def _step(self, raw: RawCommand) -> Iterator[Command]:
        words, negated = list(raw.words), False
        while words:
            word = words[0].plain
            if word in _OF_BLOCKS:
                self._block(word)
            elif word == "case" and words[2:]:
                subject = "".join(self.variables.expand(words[1]))
                block = _Block(word, self._runs(), False, False, subject, True, self.doubts)
                self.blocks.append(block)
                self._patterns(self.blocks[-1], words[3:], raw.line)
                return
            elif word == "!":
                negated = not negated
            elif word not in _BEFORE_A_COMMAND:
                break
            words = words[1:]
        if words and self._runs():
            self.status, self.fails = None, True
            yield from self._command(words, raw.line)
            self.status = self.status if self.status is None else self.status != negated
            self._doubt(self.doubts)

    def _doubt(self, doubts: bool) -> None:
        """Forget that a command succeeded which may not have been reached."""
        if doubts and self.status is not False:
            self.status, self.fails = None, True

    def _command(self, words: list[RawWord], line: int) -> Iterator[Command]:
        """Carry out a command, and set the status if it is known."""
        exports = words[0].plain == "export"
        if words[0].plain in _DECLARE:
            words = [w for w in words[1:] if not w.text.startswith("-")]
        starts_others = any(_STARTS.search(word.text) for word in words)
        named, words = words, self._assign(words)
        if words or exports:
            named = named if exports else named[: len(named) - len(words)]
            self.variables.exported |= {word.text.partition("=")[0] for word in named}
        found = [text for word in words for text in self.variables.expand(word)]
        if not found or found[0] in _STATUS:
            self.fails = bool(found)
            self.status = _STATUS[found[0]] if found else None if starts_others else True
            if found[:1] == ["shift"]:
                count = int(found[1]) if len(found) > 1 and found[1].isdecimal() else 1
                self.variables.arguments = self.variables.arguments[count:]
            return
        if found[0] in ("[", "[[", "test"):
            tested = [text for word in words for text in self.variables.expand_for_test(word)]
            tested = ["[", *tested[1:], "]"] if tested[0] == "test" else tested
            self.status = None if starts_others else outcome(tested)
            return
        started = _started_shell(found)
        if started[1:2] == ["-c"] and len(started) > 2:
            inner = _Shell(self.variables, self.read_script, self.remarks, self.depth + 1)
            if self.depth < _MAX_SCRIPTS:
                yield from inner.run(shown(started[2]))
        elif len(started) > 1:
            yield from self._script(started, line)
        yield Command(tuple(shown(text) for text in found), line)

    def _assign(self, words: list[RawWord]) -> list[RawWord]:
        """Carry out the assignments in front of a command; the rest of its words."""
        for index, word in enumerate(words):
            match = _ASSIGNMENT.match(word.unquoted_prefix)
            if match is None:
                return words[index:]
            name, adds = match.groups()
            if word.items is not None:
                values = [text for item in word.items for text in self.variables.expand(item)]
                self.variables.assign_array(name, values, bool(adds))
            else:
                value = self.variables.joined(word.after(match.end()))
                self.variables.assign(name, value, bool(adds))
        return []

    def _block(self, word: str) -> None:
        """Open, change or close a block."""
        while word not in "{()}" and word != "if" and self.blocks and self.blocks[-1].kind in "{(":
            self.blocks.pop()  # a bracket of other text
        block = self.blocks[-1] if self.blocks else None
        if word in ("if", "{", "("):
            block = _Block(word, self._runs(), self._runs(), doubts=self.doubts)
            self.blocks.append(block)
            self.skips = self.doubts = False
        elif block is None or word not in _WORDS_OF[block.kind]:
            return
        elif word in _CLOSED_BY:
            self.blocks.pop()
            if block.outside and block.kind in ("if", "case") and not block.had_one:
                self.status = True
            self._doubt(block.doubts)
        elif word == "then":
            block.enter(self.status is True)
        elif word == "else":
            block.enter(True)
        elif word == "elif":
            block.runs = block.outside and not block.had_one
        else:
            block.runs, block.in_patterns = False, True

    def _patterns(self, block: _Block, words: Sequence[RawWord], line: int) -> None:
        """Compare the patterns of a case; its commands follow behind a bracket."""
        for word in words:
            if word.plain == ")":
                block.in_patterns = False
                block.enter(block.runs)
                self.status = True if block.runs else self.status  # the branch may be empty
            elif word.plain != "(":
                pattern = self.variables.joined(word)
                if MARK not in block.subject:
                    block.runs |= fnmatchcase(block.subject, pattern)
                elif block.outside and not (block.runs or block.had_one):
                    block.runs = True
                    self.remarks.append(
                        f"line {line}: the script does not say what {shown(block.subject)} is; its "
                        f"first case is taken, {shown(pattern)}"
                    )

    def _script(self, words: list[str], line: int) -> Iterator[Command]:
        """The commands of a script that this one starts: a shell, the script, its arguments."""
        shell, name, *arguments = words
        text = self.read_script(shown(name)) if self.depth < _MAX_SCRIPTS else None
        if text is None:
            self.remarks.append(
                f"line {line}: the settings in {shown(name)} are missing here, because there is "
                "no such file in this folder; change to the script's folder"
            )
            return
        own = shell in _SAME_SHELL
        variables = self.variables if own else self.variables.of_script(arguments)
        inner = _Shell(variables, self.read_script, self.remarks, self.depth + 1)
        yield from inner.run(text)


def _started_shell(words: list[str]) -> list[str]:
    """The shell that a command is, or that a launcher starts (``ray job submit ... -- bash X``,
    ``srun ... bash -c TEXT``), with its arguments; empty if there is none."""
    for index, word in enumerate(words):
        launched = words[index - 1] == "--" or words[index + 1 : index + 2] == ["-c"]
        if word in _SHELLS and (index == 0 or launched):
            return words[index:]
    return []


def read_commands(
    text: str, arguments: Sequence[str], read_script: ReadScript, remarks: list[str]
) -> list[Command]:
    """The commands of a script, in order.

    Args:
        text: the script.
        arguments: its ``$1``, ``$2``, and so on.
        read_script: reads the scripts that it starts.
        remarks: receives a line per thing that the user should know.

    Returns:
        Its commands.

    Raises:
        ValueError: the text is not a shell script (a quote that is not closed, for example).
    """
    return list(_Shell(Variables(list(arguments)), read_script, remarks).run(text))


def _may_go_on(command: RawCommand) -> bool:
    """Whether a command can lack its last lines: it is no operator and no pattern of a ``case``."""
    word, *others = command.words
    is_operator = not others and word.plain in {"&&", "||", *_OF_BLOCKS}
    return not is_operator and word.plain != "case" and not _SETTING.match(word.text)


def _with_lost_lines(raw: Sequence[RawCommand], remarks: list[str]) -> list[RawCommand]:
    """Join lines that begin with a setting or flag to the command before them: a backslash is
    missing there."""
    joined: list[RawCommand] = []
    for command in raw:
        if joined and _SETTING.match(command.words[0].text) and _may_go_on(joined[-1]):
            remarks.append(
                f"line {command.line}: a shell would end the command before this line, because no "
                "backslash ends the line above; its settings are used here"
            )
            before = joined.pop()
            command = RawCommand((*before.words, *command.words), before.line)
        joined.append(command)
    return joined
