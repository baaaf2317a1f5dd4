"""Start the process that runs attacks, as this user or as nobody."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FORK_SERVER = Path(__file__).with_name("fork_server.py")
ROOT = Path(__file__).parents[2]
NOBODY = 65534
_REACHABLE = """
set -e
mkdir "$1/interpreter" "$1/checkout"
mount --bind "$2" "$1/interpreter"
mount --bind "$3" "$1/checkout"
mount -t tmpfs -o mode=755 tmpfs /root
mkdir -p "$2" "$3"
mount --bind "$1/interpreter" "$2"
mount --bind "$1/checkout" "$3"
umount "$1/interpreter" "$1/checkout"
rmdir "$1/interpreter" "$1/checkout"
shift 3
exec setpriv --reuid=65534 --regid=65534 --clear-groups "$@"
"""
"""Interpreter and checkout may be below /root, which other users cannot read: in a separate mount
namespace, /root contains only them."""


class AttackServer:
    """Run one step of an attack at a time.

    Args:
        process: the fork server.
        world: the folder that contains a folder for each attack.
    """

    def __init__(self, process: subprocess.Popen[str], world: Path) -> None:
        self._process, self.world = process, world

    def run(self, step: str, table: str, row: int, folder: Path, output: Path, within_s: float):
        """Exit code (None: killed after ``within_s``) and seconds of a step of an attack."""
        request = {
            "step": step,
            "table": table,
            "row": row,
            "folder": str(folder),
            "output": str(output),
            "within_s": within_s,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        reply = self._process.stdout.readline()
        assert reply, "the fork server has ended"
        found = json.loads(reply)
        return found["code"], found["seconds"]


@contextmanager
def attack_server(as_nobody: bool) -> Iterator[AttackServer]:
    """A fork server as this process's user, or as nobody (which only root can start)."""
    place = Path(tempfile.mkdtemp(prefix="mppo-attacks-"))
    world = place / "world"
    for folder in (place / "cache", world, world / "home", world / "tmp", world / "outside"):
        folder.mkdir()
    (world / "outside/precious.txt").write_text("must not change")
    if as_nobody:
        place.chmod(0o755)
        for path in (place / "cache", world, *world.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
    environment = os.environ | {
        "HOME": str(world / "home"),
        "TMPDIR": str(world / "tmp"),
        "MPPO_CACHE": str(place / "cache"),
        "MPLCONFIGDIR": str(place / "cache"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, str(FORK_SERVER)]
    if as_nobody:
        interpreter = sys.base_prefix
        script = ["unshare", "--mount", "sh", "-c", _REACHABLE, "sh"]
        command = [*script, str(place), interpreter, str(ROOT), *command]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd="/",
        start_new_session=True,
    )
    try:
        yield AttackServer(process, world)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        shutil.rmtree(place)
