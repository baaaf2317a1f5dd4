"""Temporary files are removed after their process ends, and never before."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mppo.safety.temporary import (
    SHARED_MEMORY,
    private_file,
    remove_leftovers,
    unfinished_folder,
)

MAKES = """
import os, sys, time
from pathlib import Path
import torch
from mppo.rollout.transport.buckets import SharedBuffer
from mppo.safety.temporary import own_folder, note, private_file
from mppo.weights.bucket import WeightBucket
private_file(own_folder() / "server_1.yaml", "api-key: sesame")
shared = Path(sys.argv[1])
shared.touch()
note(shared)
buffer = SharedBuffer(torch.device("cpu"))
buffer.fill(WeightBucket.pack([("weight", torch.zeros(1000))]))
"""
WAITS = MAKES + "print(own_folder(), flush=True)\ntime.sleep(600)\n"
FORKS = """
import os, time
from mppo.safety.temporary import own_folder
folder = own_folder()
child = os.fork()
if child:
    print(folder, child, flush=True)
time.sleep(600)
"""
STARTS = "from mppo.safety.temporary import own_folder; own_folder()"


def begin(program: str, place: Path, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(place), "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture
def shared():
    path = SHARED_MEMORY / f"mppo-test-{secrets.token_hex(8)}"
    yield path
    path.unlink(missing_ok=True)


def torch_segments(pid: int) -> list[Path]:
    return list(SHARED_MEMORY.glob(f"torch_{pid}_*"))


def test_files_of_a_killed_process_are_removed_at_the_next_start(tmp_path, shared):
    process = begin(WAITS, tmp_path, shared)
    folder = Path(process.stdout.readline().strip())
    assert {path.name for path in folder.iterdir()} == {"server_1.yaml", "made_elsewhere"}
    assert shared.exists()
    assert len(torch_segments(process.pid)) == 1
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / "server_1.yaml")] == [
        0o700,
        0o600,
    ]
    assert remove_leftovers(tmp_path) == [], "its process lives"
    assert folder.is_dir()
    process.kill()
    process.wait()
    assert folder.is_dir()
    assert begin(STARTS, tmp_path).wait() == 0
    deadline = time.monotonic() + 300
    while list(tmp_path.glob("torch-shm-dir-*")) and time.monotonic() < deadline:
        time.sleep(0.1)  # torch's manager of shared memory removes its folder itself
    assert list(tmp_path.iterdir()) == []
    assert not shared.exists()
    assert torch_segments(process.pid) == []


def test_a_process_that_ends_by_itself_leaves_nothing(tmp_path, shared):
    process = begin(MAKES, tmp_path, shared)
    said = process.communicate()[1]  # to the end of torch's manager of shared memory, too
    assert process.returncode == 0
    assert "terminate called" not in said
    assert [path for path in tmp_path.iterdir() if path.name.startswith("mppo")] == []
    assert not shared.exists()
    assert torch_segments(process.pid) == []


def test_a_forked_child_keeps_the_folder_of_its_killed_parent(tmp_path):
    process = begin(FORKS, tmp_path)
    name, child = process.stdout.readline().split()
    process.kill()
    process.wait()
    try:
        assert remove_leftovers(tmp_path) == []
    finally:
        os.kill(int(child), signal.SIGKILL)
    deadline = time.monotonic() + 300
    while Path(name).exists() and time.monotonic() < deadline:
        remove_leftovers(tmp_path)
    assert not Path(name).exists()


def test_only_folders_of_this_user_on_this_host_are_removed(tmp_path):
    process = begin(WAITS.replace("torch.zeros(1000)", "torch.zeros(1)"), tmp_path, tmp_path / "x")
    folder = Path(process.stdout.readline().strip())
    process.kill()
    process.wait()
    prefix, host, pid, rest = folder.name.split("-", 3)
    other_host = "000000" if host != "000000" else "111111"
    kept = [
        tmp_path / f"{prefix}-{other_host}-{pid}-{rest}",
        tmp_path / f"{prefix}-{host}-{rest}",
        tmp_path / f"{folder.name}.bak",
        tmp_path / "mppo-runs",
    ]
    for path in kept:
        path.mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    link = tmp_path / f"{folder.name}x"
    link.symlink_to(outside)
    kept += [link, outside / "precious"]
    (folder / "made_elsewhere").write_text(f"{outside / 'precious'}\n/etc/hostname\n")
    if os.getuid() == 0:
        others = tmp_path / f"{folder.name}y"
        others.mkdir()
        os.chown(others, 65534, 65534)
        kept.append(others)
    assert remove_leftovers(tmp_path) == [folder]
    assert all(os.path.lexists(path) for path in kept)
    assert Path("/etc/hostname").exists()


def test_an_unfinished_folder_is_removed(tmp_path):
    with unfinished_folder(tmp_path) as folder:
        (folder / "a").touch()
        folder.rename(tmp_path / "finished")
    with unfinished_folder(tmp_path) as folder:
        (folder / "a").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["finished"]


def test_a_private_file_is_new_and_follows_no_link(tmp_path):
    target, path = tmp_path / "target", tmp_path / "key"
    target.write_text("as before")
    path.symlink_to(target)
    private_file(path, "sesame")
    assert target.read_text() == "as before"
    assert path.read_text() == "sesame"
    assert path.stat().st_mode & 0o777 == 0o600
