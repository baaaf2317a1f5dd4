"""The process beside each rank that kills stopped ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

PATIENCE_S = 300.0
TWO_NODES = """
import atexit, os, sys, threading
from torch._C._distributed_c10d import TCPStore
from mppo.parallel.launch import LaunchInfo
from mppo.supervision import rank_guard
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
atexit.register(lambda: print("left", [each.name for each in threading.enumerate()]))
guard = rank_guard.RankGuard(LaunchInfo(1, 2, 0, 1, "127.0.0.1", store.port, "torchrun"))
guard.watch_other_nodes()
print("begun", [each.name for each in threading.enumerate()])
if sys.argv[1] == "met":
    guard.met()
"""
RANK = """
import os, sys, time
from mppo.parallel.launch import LaunchInfo
from mppo.safety.temporary import own_folder
from mppo.supervision.rank_guard import RankGuard
if os.environ["GUARDED"]:
    guard = RankGuard(LaunchInfo(1, 2, 1, 2, "127.0.0.1", 1, os.environ["GUARDED"]))
    guard.set_limit(0.0)
print(own_folder(), flush=True)
time.sleep(3600)
"""


def begin(how: str) -> tuple[subprocess.Popen, Path]:
    """A process as of a rank with its temporary folder; started without a guard if ``how`` is
    empty."""
    process = subprocess.Popen(
        [sys.executable, "-c", RANK],
        env=os.environ | {"GUARDED": how}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(*processes: subprocess.Popen) -> None:
    for process in processes:
        process.kill()
        process.communicate()


def test_a_rank_that_stays_stopped_is_killed_with_a_message_and_leaves_nothing():
    rank, folder = begin("torchrun")
    (guard,) = psutil.Process(rank.pid).children()
    try:
        rank.send_signal(signal.SIGSTOP)
        _, said = rank.communicate(timeout=PATIENCE_S)  # the guard shares stderr: it has ended too
        assert rank.returncode == -signal.SIGKILL
        assert said.startswith(f"mppo: rank 1 of 2 (pid {rank.pid} on ")
        assert said.endswith("by SIGSTOP or a debugger: killing it\n")
        assert not folder.exists()
        guard.wait(PATIENCE_S)
    finally:
        end(rank)


def test_a_rank_without_a_guard_yet_is_killed_by_that_of_another_and_no_other_process_is():
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    other.send_signal(signal.SIGSTOP)
    (stopped, _), (rank, _) = begin(""), begin("torchrun")
    try:
        while psutil.Process(other.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        time.sleep(1)  # longer than the guard's polls
        stopped.send_signal(signal.SIGSTOP)
        assert stopped.wait(PATIENCE_S) == -signal.SIGKILL
        assert rank.poll() is None
        assert psutil.Process(other.pid).status() == psutil.STATUS_STOPPED
    finally:
        end(stopped, rank)
        other.kill()
        other.wait()


def test_a_program_without_a_launcher_has_no_guard():
    alone, _ = begin("python")
    try:
        assert not psutil.Process(alone.pid).children()
    finally:
        end(alone)


@pytest.mark.parametrize("meets", ["met", "never"])
def test_the_watch_over_other_nodes_ends_before_the_interpreter_does(meets):
    """A thread in a call of torch would abort the process."""
    environ = os.environ | {
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1",
    }  # fmt: skip
    command = [sys.executable, "-c", TWO_NODES, meets]
    rank = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert rank.returncode == 0, rank.stderr
    assert rank.stdout.splitlines() == ["begun ['MainThread', 'lost ranks']", "left ['MainThread']"]
