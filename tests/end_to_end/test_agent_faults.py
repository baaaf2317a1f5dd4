"""Runs with agents in which an agent's process, a rank or a server is killed at a random moment."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress

import psutil
import pytest
from launched_run import STEPS, LaunchedRun, metrics_logged
from sglang_case import START_S, needs_sglang

AGENT = """
async def run(client, task):
    messages = task["messages"]
    for word in ("more", "and"):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        said = {"role": "assistant", "content": answer.choices[0].message.content or ""}
        messages = [*messages, said, {"role": "user", "content": word}]
    return 1.0
"""
RANDOM = random.Random(33)


def processes_of(run: LaunchedRun) -> list[psutil.Process]:
    """The processes that the ranks have started."""
    found = []
    for rank in run.processes:
        with suppress(psutil.NoSuchProcess):
            found += psutil.Process(rank.pid).children(recursive=True)
    return found


def is_agent(process: psutil.Process) -> bool:
    """Whether a process runs the agent's function, and is not the one that watches it."""
    with suppress(psutil.Error):
        line = process.cmdline()
        return "mppo.agents.function_host" in line and "mppo.agents.child" not in line
    return False


def is_server(process: psutil.Process) -> bool:
    """Whether a process is SGLang's first, and not the one that watches it."""
    return _runs(process, "sglang.launch_server") and not _runs(process, "server_guard")


@pytest.fixture
def settings(tmp_path):
    """Of a run whose agents have two turns, and go on through an update."""
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    return [
        f"rollout.agent.run={agent}:run", "rollout.agent.max_turns=2", "rollout.max_staleness=1",
        "rollout.over_sampling=0.5",
        "reward.on_error=0", "data.max_response_length=32",
        f"rollout.stop_token_ids={list(range(10, 60))}",
    ]  # fmt: skip


@pytest.mark.distributed
def test_killed_agents_and_ranks_leave_nothing_and_double_nothing(tmp_path, settings):
    run = LaunchedRun(tmp_path / "run", settings)
    run.until_saved(1)
    time.sleep(RANDOM.random())
    killed = next(filter(is_agent, processes_of(run)))
    killed.kill()
    run.until_saved(3)
    # another one takes the place of the killed one
    run.until(lambda: any(is_agent(each) and each != killed for each in processes_of(run)))
    time.sleep(RANDOM.random() / 4)
    left = processes_of(run)
    run.send(1, signal.SIGKILL)
    assert run.codes() == [1, -signal.SIGKILL], run.texts()
    _, alive = psutil.wait_procs(left, timeout=60)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]
    again = LaunchedRun(tmp_path / "run", settings)
    assert again.codes() == [0, 0], again.texts()
    assert "resumed from" in again.texts()
    rows = metrics_logged(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), "each step once"
    assert rows[-1]["reward/errors"] == 0, "only the killed process's episodes failed"
    assert not [each for each in psutil.process_iter() if _runs(each, str(tmp_path))]


@pytest.mark.server
@needs_sglang
@pytest.mark.distributed
def test_episodes_of_a_killed_server_run_again_on_the_next_one(tmp_path, settings):
    sglang = ["rollout.name=sglang", f"rollout.start_timeout_s={START_S}"]
    run = LaunchedRun(tmp_path / "run", [*settings, *sglang])
    run.until_saved(1)
    time.sleep(RANDOM.random())
    before = processes_of(run)
    next(filter(is_server, before)).kill()
    assert run.codes() == [0, 0], run.texts()
    rows = metrics_logged(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), "each step once"
    assert [row["reward/errors"] for row in rows] == [0] * STEPS, "no episode is the server's fault"
    assert "restarting SGLang server 0" in run.texts()
    _, alive = psutil.wait_procs(before, timeout=60)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]
    assert not [each for each in psutil.process_iter() if _runs(each, str(tmp_path))]


def _runs(process: psutil.Process, path: str) -> bool:
    """Whether a process has a path in its command."""
    with suppress(psutil.Error):
        return process.pid != os.getpid() and any(path in word for word in process.cmdline())
    return False
