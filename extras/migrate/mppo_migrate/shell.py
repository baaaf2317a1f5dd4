"""Read a shell script without running it: the commands that it would start, variables replaced.

Understood are quotes, comments, continued lines, assignments, arrays, ``export``, ``shift``,
``${NAME:-default}``, ``$1`` and ``$@``, integer arithmetic, redirections, and ``if`` with tests of
text and numbers (any other condition counts as false). The body of a loop or function is read once.
Anything else stays as it is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from mppo_migrate.expansion import Variables, is_true, shown
from mppo_migrate.words import RawCommand, RawWord, read_raw_commands

_SETTING = re.compile(r"[+~]{0,2}\w+(\.\w+)+=|--\w")
"""The start of a word that no command begins with: a setting or a flag."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_DECLARE = {"export", "local", "declare", "readonly", "typeset"}
_BEFORE_A_COMMAND = {"then", "else", "do", "!", "time", "exec", "nohup", "{", "sudo", "eval"}
_SHELLS = {"bash", "sh", "source", "."}
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
class _Shell:
    """The state of a script that is read.

    Args:
        variables: what is assigned so far.
        read_script: for scripts that the script starts.
        remarks: what the user should know.
        depth: scripts that started this one.
        branches: of each open ``if``: whether its current branch runs, and whether one has run.
    """

    variables: Variables
    read_script: ReadScript
    remarks: list[str]
    depth: int = 0
    branches: list[tuple[bool, bool]] = field(default_factory=list)

    def run(self, text: str) -> Iterator[Command]:
        """The commands of a script's text."""
        for raw in _with_lost_lines(read_raw_commands(text), self.remarks):
            yield from self._step(raw)

    def _step(self, raw: RawCommand) -> Iterator[Command]:
        words = list(raw.words)
        while words:
            word = words[0].plain
            if word in ("if", "elif", "else", "fi"):
                self._branch(word, words[1:])
                if word in ("if", "elif", "fi"):
                    return
            elif word not in _BEFORE_A_COMMAND:
                break
            words = words[1:]
        if not words or not all(runs for runs, _ in self.branches):
            return
        if words[0].plain in _DECLARE:
            words = [w for w in words[1:] if not w.text.startswith("-")]
        words = self._assign(words)
        found = [text for word in words for text in self.variables.expand(word)]
        if not found:
            return
        if found[0] == "shift":
            count = int(found[1]) if len(found) > 1 and found[1].isdecimal() else 1
            self.variables.arguments = self.variables.arguments[count:]
            return
        started = _started_shell(found)
        if started[1:2] == ["-c"] and len(started) > 2:
            inner = _Shell(self.variables, self.read_script, self.remarks, self.depth + 1)
            if self.depth < _MAX_SCRIPTS:
                yield from inner.run(shown(started[2]))
        elif len(started) > 1:
            yield from self._script(started[1], started[2:], raw.line)
        yield Command(tuple(shown(text) for text in found), raw.line)

    def _assign(self, words: list[RawWord]) -> list[RawWord]:
        """Carry out the assignments in front of a command; the rest of its words."""
        for index, word in enumerate(words):
            match = _ASSIGNMENT.fullmatch(word.text)
            if match is None or len(word.unquoted_prefix) <= len(match[1] + match[2]):
                return words[index:]
            name, adds, _ = match.groups()
            if word.items is not None:
                values = [text for item in word.items for text in self.variables.expand(item)]
                self.variables.assign_array(name, values, bool(adds))
            else:
                value = self.variables.joined(word.after(len(name) + len(adds) + 1))
                self.variables.assign(name, value, bool(adds))
        return []

    def _branch(self, word: str, condition: Sequence[RawWord]) -> None:
        """Enter, change or leave a branch of an ``if``."""
        if word == "if":
            self.branches.append((False, False))
        if not self.branches:
            return
        _, had_one = self.branches[-1]
        if word == "fi":
            self.branches.pop()
        elif word == "else":
            self.branches[-1] = (not had_one, True)
        else:
            tested = [text for w in condition for text in self.variables.expand_for_test(w)]
            runs = not had_one and is_true(tested)
            self.branches[-1] = (runs, had_one or runs)

    def _script(self, name: str, arguments: list[str], line: int) -> Iterator[Command]:
        """The commands of a script that this one starts."""
        text = self.read_script(shown(name)) if self.depth < _MAX_SCRIPTS else None
        if text is None:
            self.remarks.append(
                f"line {line}: the settings in {shown(name)} are missing here, because there is "
                "no such file in this folder; change to the script's folder"
            )
            return
        inner = _Shell(Variables(arguments), self.read_script, self.remarks, self.depth + 1)
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


def _with_lost_lines(raw: Sequence[RawCommand], remarks: list[str]) -> list[RawCommand]:
    """Join lines that begin with a setting or flag to the command before them: a backslash is
    missing there."""
    joined: list[RawCommand] = []
    for command in raw:
        if joined and _SETTING.match(command.words[0].text):
            remarks.append(
                f"line {command.line}: a shell would end the command before this line, because no "
                "backslash ends the line above; its settings are used here"
            )
            before = joined.pop()
            command = RawCommand((*before.words, *command.words), before.line)
        joined.append(command)
    return joined
