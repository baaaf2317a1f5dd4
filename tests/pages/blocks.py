"""The blocks and commands of the documentation: what each is, and the commands of a block."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATED = ("attacks.md", "recipe_reference.md", "CHANGELOG.md")
"""Pages that other tests compare with what writes them."""
PAGES = sorted(
    page
    for folder in (ROOT, ROOT / "docs", ROOT / "slurm", ROOT / "benchmarks")
    for page in folder.glob("*.md")
    if page.name not in GENERATED
)
HEADERS = sorted([*(ROOT / "recipes").glob("*.yaml"), *(ROOT / "slurm").glob("*.sbatch")])
"""Files whose comment at the top may contain commands, indented by more than one space."""

PROGRAM = (
    r"(?:\.venv/bin/)?(?:torchrun|mpirun|srun|sbatch|scancel|python3?|make|pip|hf|curl|mppo-[a-z-]+"
    r"|(?:\w+/)+\w+\.sh)"
)
_COMMAND = re.compile(rf"(?:\$ )?(?:(?:export )?[A-Z_]+=\S+\s+)*{PROGRAM}(?:\s|$)")
_SETTING = re.compile(r"""(?:\$ )?((?:export )?[A-Z_]+=(?:"[^"]*"|\$\([^)]*\)|\S+))\s*$""")
_INLINE = re.compile(rf"((?:[A-Z_]+=\S+ )*{PROGRAM} \S.*)")
_FENCE = re.compile(r"^(?P<indent> *)```\{?(?P<language>[\w-]*)\}?$")
_OPTIONAL = re.compile(r"(?<=\s)\[(-[^\]]*|[A-Z][^\]]*|section\.[^\]]*)\]")
SHELLS = ("", "sh", "bash", "console", "inline")


@dataclass(frozen=True)
class Block:
    """A fenced or indented block, or a command between backquotes.

    Args:
        page: path of the file below the repository.
        line: number of its first line.
        language: as the fence says; "inline" for a command between backquotes.
        text: without indentation.
    """

    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_shell(self) -> bool:
        """Whether it has a command, as the languages without a meaning of their own may."""
        return self.language in SHELLS and any(map(_COMMAND.match, self.text.splitlines()))


@dataclass(frozen=True)
class Step:
    """Commands of a block that run in one shell, and the lines that the page shows below them.
    Without commands, the lines continue the output of the page's last command."""

    script: str
    shown: str


def blocks_of(page: Path) -> list[Block]:
    """Every block of a page, and its commands between backquotes, in their order."""
    name = str(page.relative_to(ROOT))
    if page.suffix != ".md":
        return _header_commands(page, name)
    found: list[Block] = []
    prose: list[tuple[int, str]] = []
    fence: re.Match[str] | None = None
    lines: list[str] = []
    start = 0
    for number, line in enumerate([*page.read_text().splitlines(), ""], 1):
        marker = _FENCE.match(line)
        if fence is not None:
            if marker:
                found.append(Block(name, start, fence["language"], "\n".join(lines)))
                fence, lines = None, []
            else:
                lines.append(line.removeprefix(fence["indent"]))
        elif marker:
            fence, start = marker, number + 1
        elif line.startswith("    ") and not line.lstrip().startswith(("- ", "| ")):
            start = start if lines else number
            lines.append(line[4:])
        else:
            if lines:
                found.append(Block(name, start, "", "\n".join(lines)))
                lines = []
            prose.append((number, line))
    return sorted([*found, *_inline_commands(name, prose)], key=lambda block: block.line)


def _inline_commands(page: str, prose: list[tuple[int, str]]) -> Iterator[Block]:
    """Commands between backquotes, which may continue on the next line."""
    text = "\n".join(line for _, line in prose)
    numbers = [number for number, _ in prose]
    for span in re.finditer(r"`([^`]+)`", text):
        if command := _INLINE.fullmatch(" ".join(span[1].split())):
            line = numbers[text.count("\n", 0, span.start())]
            yield Block(page, line, "inline", command[1])


def _header_commands(file: Path, name: str) -> list[Block]:
    """The commands in the comment at the top of a recipe or batch script, as one block."""
    commands: list[str] = []
    first = 0
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if not line.startswith("#"):
            break
        text = line.removeprefix("#")
        if commands and commands[-1].endswith("\\"):
            commands[-1] = commands[-1][:-1] + text.strip()
        elif commands and commands[-1].count('"') % 2:
            commands[-1] += "\n" + text.strip()
        elif text.startswith("   ") and _COMMAND.match(text.strip()):
            first = first or number
            commands.append(text.strip())
    return [Block(name, first, "sh", "\n".join(commands))] if commands else []


def settings_of(script: str) -> list[str]:
    """Lines that set a variable of the shell, which later commands of the page use."""
    matches = map(_SETTING.match, script.splitlines())
    return [match[1] for match in matches if match]


def steps_of(block: Block) -> list[Step]:
    """The commands of a block: all together, or one by one where the page shows their output."""
    if not any(line.startswith("$ ") for line in block.text.splitlines()):
        return [_step(block.text, "")]
    steps: list[Step] = []
    lines = block.text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("$ "))
    if first:
        steps.append(Step("", "\n".join(lines[:first])))
    while lines := lines[first:]:
        first = 0
        command, shown = [lines.pop(0)], []
        while command[-1].endswith("\\"):
            command.append(lines.pop(0))
        while lines and not lines[0].startswith("$ "):
            shown.append(lines.pop(0))
        steps.append(_step("\n".join(command).removeprefix("$ "), "\n".join(shown)))
    return steps


def _step(script: str, shown: str) -> Step:
    """With every optional part ("[--logits]") except lists of the reader's own ("[KEY ...]")."""

    def kept(part: re.Match[str]) -> str:
        return part[1] if part[1].startswith("-") or not part[1].endswith(" ...") else ""

    return Step(_OPTIONAL.sub(kept, script), shown)
