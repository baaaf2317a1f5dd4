"""Links of the documentation to lines of code, such as ``[`train`](../mppo/trainer/loop.py#L36)``.

    python tests/support/line_links.py      # writes the right line numbers

``Class.method`` names a method. The line is that of ``def`` or ``class``.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[`(?P<name>[\w.]+)`\]\((?P<path>[\w./]+\.py)#L(?P<line>\d+)\)")


def line_of(name: str, path: Path) -> int:
    """The line on which a function, class or method begins.

    Raises:
        LookupError: the file has none of this name.
    """
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    for part in name.split("."):
        nodes = [
            child
            for node in nodes
            for child in ast.iter_child_nodes(node)
            if getattr(child, "name", None) == part
        ]
    if not nodes:
        raise LookupError(f"{path.relative_to(ROOT)} has no {name}")
    return nodes[0].lineno  # pyright: ignore[reportAttributeAccessIssue]  # definitions have lines


def corrected(page: Path) -> str:
    """The text of a page with the right line numbers."""

    def correct(link: re.Match[str]) -> str:
        line = line_of(link["name"], (page.parent / link["path"]).resolve())
        return f"[`{link['name']}`]({link['path']}#L{line})"

    return LINK.sub(correct, page.read_text())


if __name__ == "__main__":
    for found in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").glob("*.md")),
    ):
        found.write_text(corrected(found))
