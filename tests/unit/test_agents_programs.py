"""Episodes of programs: unmodified clients, their faults, and their processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from agent_case import OPENING, PROMPTS, SAMPLING, local_engine

from mppo.agents.build_agent import build_agent
from mppo.agents.episode_engine import EpisodeEngine
from mppo.agents.episode_program import read_episode_result
from mppo.batch.episode import NO_WEIGHTS
from mppo.hub.builtin import byte_tokenizer
from mppo.recipe.errors import ConfigError
from mppo.recipe.load import load_recipe
from mppo.rollout.engine import GenerationRequest
from mppo.supervision import phase

PAGE = Path(__file__).parents[2] / "docs" / "agents.md"


@pytest.fixture
def run(tmp_path):
    """Runs episodes of a function or a command, written into a file."""
    engines = []

    def episodes(source: str, tokens: int = 64, prompts=PROMPTS, **config):
        path = tmp_path / "agent.py"
        path.write_text(textwrap.dedent(OPENING) + textwrap.dedent(source))
        if "command" in config:
            config["command"] = config["command"].format(python=sys.executable, path=path)
        else:
            config["run"] = f"{path}:run"
        form = {f"rollout.agent.{name}": value for name, value in config.items()}
        keys = [f"{key}={value}" for key, value in form.items()]
        recipe = load_recipe(None, ["model.path=builtin:tiny", "data.task=arithmetic", *keys])
        engine = EpisodeEngine(
            local_engine(), build_agent(recipe), byte_tokenizer(), recipe.rollout.agent, tokens
        )
        engines.append(engine)
        return engine, engine.generate(GenerationRequest(prompts, SAMPLING, 24, 11))

    yield episodes
    for engine in engines:
        engine.stop()
    assert not [each for each in psutil.Process().children(True) if "-m mppo.agents" in _line(each)]


@pytest.fixture
def run_late(run, tmp_path, monkeypatch):
    """Runs the two episodes of the third prompt, whose agents hang once they have left a mark in
    ``agent.py.marks``: only then ``max_seconds`` pass."""

    def episodes(source: str, **config):
        marks = tmp_path / "agent.py.marks"
        marks.touch()
        clock = SimpleNamespace(monotonic=lambda: 1000.0 * (marks.read_text() == "xx"))
        monkeypatch.setattr("mppo.agents.turn_queue.time", clock)
        return run(source, prompts=PROMPTS[2:3], max_seconds=0.5, **config)[1]

    return episodes


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


TWO_TURNS = """
    async def run(client, task):
        print("for the terminal")
        messages = await say(client, task["messages"])
        await say(client, [*messages, {"role": "user", "content": "more"}])
        return {"reward": float(task["ground_truth"]), "numbers": {"turns": 2}}
"""


def test_tokens_and_probabilities_are_those_of_the_engine(run):
    engine, episodes = run(TWO_TURNS)
    assert [each.result.reward for each in episodes] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {each.result.numbers["turns"] for each in episodes} == {2}
    found = engine._engine.logprobs([[*each.prompt.token_ids, *each.here.ids] for each in episodes])
    for each, logprobs in zip(episodes, found, strict=True):
        assert each.result.error is None
        assert [version for version, _ in each.parts] == [3, NO_WEIGHTS, 3]
        behind = torch.tensor(logprobs[len(each.prompt.token_ids) - 1 :])
        own = each.here.logprobs != 0
        torch.testing.assert_close(each.here.logprobs[own], behind[own], atol=1e-5, rtol=0)
    opening = [each for each in episodes if each.prompt.uid == 7]
    assert all(each.prompt.token_ids.tolist() == [3, 4, 5, 6] for each in opening)
    assert not torch.equal(opening[0].here.ids, opening[1].here.ids)


def test_equal_seeds_give_equal_episodes(run):
    _, first = run(TWO_TURNS)
    _, again = run(TWO_TURNS)
    assert [each.here.ids.tolist() for each in first] == [each.here.ids.tolist() for each in again]


def test_a_rewritten_history_is_a_sequence_of_its_own(run):
    _, episodes = run("""
        async def run(client, task):
            messages = await say(client, task["messages"])
            messages = await say(client, [*messages, {"role": "user", "content": "more"}])
            await say(client, [{"role": "user", "content": "a summary"}])
            return 1.0
    """)
    for each in episodes:
        (earlier,) = each.earlier
        assert [version for version, _ in earlier.parts] == [3, NO_WEIGHTS, 3]
        assert [version for version, _ in each.parts] == [3]
        assert each.prompt.uid == earlier.prompt.uid
        assert not torch.equal(each.prompt.token_ids, earlier.prompt.token_ids)


def test_a_slow_agent_delays_no_other(run, tmp_path):
    """One agent waits until all others have ended, which in lockstep would never be."""
    ended = tmp_path / "ended"
    ended.mkdir()
    _, episodes = run(
        f"""
        async def run(client, task):
            messages = await say(client, task["messages"])
            if task["ground_truth"] == "0":
                while len(os.listdir({str(ended)!r})) < 6:
                    await asyncio.sleep(0.02)
            await say(client, [*messages, {{"role": "user", "content": "more"}}])
            open({str(ended)!r} + "/" + str(id(messages)), "w")
            return 1.0
        """,
        max_seconds=120,
    )
    assert [each.result.error for each in episodes] == [None] * 8
    assert [each.result.reward for each in episodes] == [1.0] * 8


def test_waiting_for_an_agent_is_progress(run):
    """A tool may take longer than the limit after which ranks without progress count as hanging."""
    before = phase.progress()
    _, episodes = run("""
        async def run(client, task):
            await say(client, task["messages"])
            await asyncio.sleep(3)
            return 1.0
    """)
    turns_and_episodes = 2 * len(episodes)
    assert phase.progress() - before > turns_and_episodes + 1


OTHERS = [PROMPTS[0], PROMPTS[1], PROMPTS[3]]


def test_faults_of_an_agent_end_its_own_episode(run, run_late):
    source = """
        async def run(client, task):
            which = task["ground_truth"]
            if which == "0":
                return 1.0
            await say(client, task["messages"])
            if which == "1":
                raise KeyError("no such tool")
            if which == "2":
                open(__file__ + ".marks", "a").write("x")
                await asyncio.sleep(1000)
            return "much"
    """
    _, episodes = run(source, prompts=OTHERS)
    episodes[4:4] = run_late(source)
    errors = [each.result.error for each in episodes]
    assert [each.result.reward for each in episodes] == [1.0, 1.0] + [None] * 6
    said = ("asked the policy nothing", "KeyError: 'no such tool'", "max_seconds, 0.5 s", "'much'")
    for number, error in enumerate(errors):
        assert said[number // 2] in error
        assert f"prompt {7 * (number // 2)}" in error
    assert [each.length > 0 for each in episodes] == [False] * 2 + [True] * 6


def test_an_agent_whose_process_dies_is_started_again(run):
    engine, episodes = run("""
        async def run(client, task):
            await say(client, task["messages"])
            if task["ground_truth"] == "3":
                os._exit(7)
            await asyncio.sleep(1000)
    """)
    errors = [each.result.error for each in episodes]
    assert all("its process ended with exit code 7" in error for error in errors)
    again = engine.generate(GenerationRequest(PROMPTS[3:], SAMPLING, 24, 11))
    assert all("exit code 7" in each.result.error for each in again)


def test_limits_end_an_episode_without_a_failure(run):
    source = """
        async def run(client, task):
            messages = task["messages"]
            for _ in range(50):
                messages = await say(client, messages)
                messages.append({"role": "user", "content": "more"})
            return 1.0
    """
    for options in ({"max_turns": 2}, {"tokens": 40, "max_turns": 40}):
        _, episodes = run(source, **options)
        for each in episodes:
            assert (each.result.error, each.result.reward) == (None, 0.0)
            assert each.finish_reason == "length"
            assert len(each.prompt.token_ids) + each.length <= options.get("tokens", 64)


COMMAND = """
    import json
    from openai import OpenAI
    task = json.loads(sys.stdin.readline())
    assert "WORLD_SIZE" not in os.environ
    if task["ground_truth"] == "1":
        sys.exit("this task is too hard")
    if task["ground_truth"] == "2":
        os.fork() or time.sleep(1000)
    client = OpenAI()
    client.chat.completions.create(model="policy", messages=task["messages"])
    print("the result is")
    print(json.dumps({"reward": 0.5, "numbers": {"pid": os.getpid()}}))
    if task["ground_truth"] == "2":
        open(__file__ + ".marks", "a").write("x")
        time.sleep(1000)
"""


def test_a_command_runs_one_episode(run, run_late, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    _, episodes = run(COMMAND, prompts=OTHERS, command="{python} {path}")
    episodes[4:4] = run_late(COMMAND, command="{python} {path}")
    results = [each.result for each in episodes]
    assert [each.reward for each in results] == [0.5, 0.5] + [None] * 4 + [0.5, 0.5]
    assert len({each.numbers["pid"] for each in (*results[:2], *results[6:])}) == 4
    assert "exit code 1: " in results[2].error
    assert "this task is too hard" in results[2].error
    assert "max_seconds" in results[4].error


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def run(client, task): pass", "not a coroutine function"),
        ("async def run(client): pass", "cannot be called with a client and a task"),
        ("async def other(client, task): pass", "run"),
        ("import no_such_package", "no_such_package"),
    ],
)
def test_a_function_of_another_form_is_refused_at_start(run, source, why):
    with pytest.raises(ConfigError, match=why):
        run(source)


def test_results_of_agents():
    assert read_episode_result(None).reward is None
    assert read_episode_result(2).reward == 2.0
    assert read_episode_result({"reward": 1.0, "numbers": {"a": 2, "b": "x"}}).numbers == {"a": 2.0}
    for wrong in ("much", float("nan"), {"score": 1}, {"reward": "x"}, {"numbers": 3}, [1]):
        assert read_episode_result(wrong).error


def test_the_programs_of_the_page(run):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    function, command, *_ = blocks  # then an environment, and a function that answers
    _, episodes = run(function, arguments="{turns: 2}")
    assert {each.result.reward for each in episodes} <= {0.0, 0.5, 1.0}
    assert all(set(each.result.numbers) == {"acc"} for each in episodes)
    _, episodes = run(command, command="{python} {path}")
    assert {each.result.reward for each in episodes} <= {0.0, 1.0}


def test_an_agent_keeps_its_processes_between_requests(run):
    engine, first = run("""
        async def run(client, task):
            await say(client, task["messages"])
            return {"reward": 1.0, "numbers": {"pid": os.getpid()}}
    """)
    again = engine.generate(GenerationRequest(PROMPTS, SAMPLING, 24, 12))
    assert len({each.result.numbers["pid"] for each in (*first, *again)}) == 1


def test_processes_end_with_the_rank(tmp_path):
    """A rank killed by SIGKILL leaves no process of its agents."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, signal, subprocess, sys\n"
        "from mppo.agents.episode_program import child_command\n"
        "code = 'import os, time; os.fork(); time.sleep(1000)'\n"
        "sleeper = [sys.executable, '-c', code, 'SLEEPER']\n"
        "child = subprocess.Popen(child_command(sleeper))\n"
        "print(child.pid, flush=True)\n"
        "sys.stdin.readline()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n".replace("SLEEPER", f"sleeper{os.getpid()}")
    )
    rank = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert rank.stdin is not None
    assert rank.stdout is not None
    rank.stdout.readline()
    mark = f"sleeper{os.getpid()}"

    def sleepers() -> int:
        return sum(mark in _line(each) and "agents.child" not in _line(each)
                   for each in psutil.process_iter())  # fmt: skip

    deadline = time.monotonic() + 60
    while sleepers() < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sleepers() == 2
    rank.stdin.write("\n")
    rank.stdin.close()
    rank.wait()
    while sleepers() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not sleepers()
