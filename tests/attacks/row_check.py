"""Run one row of the attacks' tables and check its effects."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from fnmatch import fnmatch
from pathlib import Path

import pytest
from attacks.attack import nothing
from attacks.fork_server import TRACEBACK
from attacks.server import AttackServer
from attacks.tables import TABLES

ROWS = [(name, row) for name, table in TABLES.items() for row in range(len(table.attacks))]
every_row = pytest.mark.parametrize(("table", "row"), ROWS, ids=str)
rows_by_user = pytest.mark.parametrize(
    ("table", "row"), [(t, row) for t, row in ROWS if TABLES[t].attacks[row].by_user], ids=str
)
LARGE = 1 << 26
"""Files of more bytes are compared by size and time, not by content."""
SLACK_S = 240.0
"""Added to a row's own limit, because other tests run at the same time."""


def content(world: Path) -> dict[str, str]:
    """What lies below a folder: a hash of every file (of a large one size and time), the kind of
    everything else."""
    found = {}
    for path in sorted(world.rglob("*")):
        mode, size = path.lstat().st_mode, path.lstat().st_size
        if path.is_symlink():
            found[str(path)] = f"link to {path.readlink()}"
        elif stat.S_ISREG(mode) and size > LARGE:
            found[str(path)] = f"{size} bytes of {path.lstat().st_mtime_ns}"
        elif stat.S_ISREG(mode):
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif not stat.S_ISDIR(mode):
            found[str(path)] = f"special {stat.S_IFMT(mode)}"
    return found


def check(server: AttackServer, table: str, row: int) -> None:
    """Run one attack: its exit code, message and time, and that it changed nothing else."""
    attack = TABLES[table].attacks[row]
    folder = server.world / f"{table}_{row}"
    output = server.world.parent / f"{table}_{row}.txt"
    folder.mkdir()
    output.touch()
    for path in (folder, output):
        os.chown(path, (server.world / "outside").stat().st_uid, -1)
    if attack.prepare is not nothing:
        code, _ = server.run("prepare", table, row, folder, output, 120)
        assert code == 0, output.read_text(errors="replace")
    before = content(server.world)
    code, seconds = server.run("run", table, row, folder, output, attack.within_s + SLACK_S)
    text = output.read_text(errors="replace")
    assert code is not None, f"not over after {seconds:.0f} s:\n{text}"
    assert code != TRACEBACK, text
    assert code == attack.code, text
    assert attack.says in text, text
    after = content(server.world)
    allowed = [str(folder / pattern) for pattern in attack.writes]
    allowed.append(str(server.world / "home/.cache/fontconfig/*"))  # matplotlib asks for the fonts
    changed = {path for path in before.keys() | after if before.get(path) != after.get(path)}
    assert not [path for path in changed if not any(fnmatch(path, a) for a in allowed)]
    shutil.rmtree(folder)  # later rows hash all files below the world
