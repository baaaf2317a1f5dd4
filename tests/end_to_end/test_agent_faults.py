"""A run with agents in which a process of the agent and a rank are killed at random moments."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress

import psutil
import pytest
from launched_run import STEPS, LaunchedRun, metrics_logged

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


@pytest.mark.distributed
def test_killed_agents_and_ranks_leave_nothing_and_double_nothing(tmp_path):
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    settings = [
        f"rollout.agent.run={agent}:run", "rollout.agent.max_turns=2", "rollout.max_staleness=1",
        "rollout.over_sampling=0.5",
        "reward.on_error=0", "data.max_response_length=32",
        f"rollout.stop_token_ids={list(range(10, 60))}",
    ]  # fmt: skip
    run = LaunchedRun(tmp_path / "run", settings)
    run.until_saved(1)
    time.sleep(RANDOM.random())
    killed = next(filter(is_agent, processes_of(run)))
    killed.kill()
    run.until_saved(3)
    time.sleep(RANDOM.random() / 4)
    left = processes_of(run)
    assert any(map(is_agent, left)), "another one has taken the place of the killed one"
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
    assert not [each for each in psutil.process_iter() if _runs(each, str(agent))]


def _runs(process: psutil.Process, path: str) -> bool:
    """Whether a process has a path in its command."""
    with suppress(psutil.Error):
        return process.pid != os.getpid() and any(path in word for word in process.cmdline())
    return False
