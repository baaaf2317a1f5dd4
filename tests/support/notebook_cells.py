"""``python notebook_cells.py NOTEBOOK`` executes the code cells of a notebook as one program.

What Jupyter adds (a kernel, an event loop, displays) is not a part of it. A cell's last expression
is printed.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any


def code_cells(notebook: Path) -> list[str]:
    """The texts of the code cells."""
    cells = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def execute(text: str, names: dict[str, Any], where: str) -> None:
    """Execute a cell in the notebook's names, and print its last expression."""
    tree = ast.parse(text, where)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, where, "exec"), names)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), where, "eval"), names)
        if value is not None:
            print(repr(value), flush=True)


if __name__ == "__main__":
    names = vars(sys.modules["__main__"])
    for number, text in enumerate(code_cells(Path(sys.argv[1])), start=1):
        execute(text, names, f"cell {number}")
