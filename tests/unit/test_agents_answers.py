"""Faults of an agent that answers turns, and of its processes: no other call has to suffer."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress

import psutil
import pytest

from mppo.agents.agent_check import imported_waits
from mppo.agents.conversation import Conversation, Reply
from mppo.agents.turn_answers import GivenAnswers, HostedAnswers
from mppo.recipe.sections.agent import AgentConfig

FAULTS = """
import asyncio, os, subprocess, sys, time

def fault(what):
    if what == "exits":
        sys.exit(5)
    if what == "interrupts":
        raise KeyboardInterrupt
    if what == "cancels":
        raise asyncio.CancelledError
    if what == "large":
        sys.set_int_max_str_digits(0)
        return {"text": "a", "state": 10**5000}
    if what == "asks":
        return input()
    if what == "starts":
        return "no" + subprocess.run("cat", capture_output=True, text=True).stdout
    if what == "numbers":
        return {"done": True, "numbers": [1]}
    return what

def agent(conversation):
    what = conversation.text
    if what == "hangs":
        time.sleep(3600)
    if what == "leaves" and not os.fork():
        os.setsid()
        time.sleep(20)
        os._exit(0)
    if what == "leaves":
        time.sleep(0.3)
        os._exit(3)
    if what == "loop":
        return asyncio.run(asyncio.sleep(0, "its own loop"))
    return fault(what)

async def waiting(conversation):
    return fault(conversation.text)
"""
WRONG = {
    "exits": "SystemExit: 5 (own.py, line ",
    "interrupts": "KeyboardInterrupt",
    "cancels": "CancelledError",
    "large": "its reply cannot be read: ",
    "asks": "EOFError",
    "numbers": "its reply has the numbers [1], not a mapping",
}


def said(text: str) -> Conversation:
    return Conversation(text, [{"role": "assistant", "content": text}], 1, False, False, "t", "5")


@pytest.fixture
def hosted(tmp_path):
    """Runs what uses the answers of a function of ``FAULTS``; no process may be left."""
    (tmp_path / "own.py").write_text(FAULTS)

    def run(
        name: str, use: Callable[[HostedAnswers], Awaitable[object]], timeout_s: float = 60.0
    ) -> None:
        async def main() -> None:
            config = AgentConfig(path=f"{tmp_path}/own.py:{name}", timeout_s=timeout_s)
            answers = HostedAnswers(config, waits=imported_waits(config))
            await answers.start()
            try:
                await use(answers)
            finally:
                await answers.stop()

        asyncio.run(main())
        assert not running("mppo.agents")

    return run


def running(module: str) -> list[psutil.Process]:
    """Processes below this one that run a module, those that start others first."""
    return [each for each in psutil.Process().children(True) if module in " ".join(line(each))]


def line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.parametrize("name", ["agent", "waiting"])
def test_what_a_call_raises_is_its_answer_and_the_process_goes_on(hosted, name):
    async def use(answers):
        host = running("function_host")[-1].pid
        for what, why in WRONG.items():
            reply = await answers.answer(said(what))
            assert isinstance(reply, str), what
            assert reply.startswith(why), what
        assert await answers.answer(said("starts")) == Reply("no")
        assert running("function_host")[-1].pid == host

    hosted(name, use)


@pytest.mark.parametrize(
    ("text", "reply"),
    [("loop", Reply("its own loop")), ("leaves", "its process ended with exit code 3")],
)
def test_a_function_may_run_an_event_loop_or_leave_a_process_with_its_output(hosted, text, reply):
    async def use(answers):
        assert await answers.answer(said(text)) == reply
        assert await answers.answer(said("a")) == Reply("a")

    hosted("agent", use)


def test_a_call_that_is_no_longer_wanted_holds_up_no_other(hosted):
    async def use(answers):
        call = asyncio.create_task(answers.answer(said("hangs")))
        await asyncio.sleep(0.5)
        call.cancel()
        assert await answers.answer(said("a")) == Reply("a")

    hosted("agent", use)


def test_calls_behind_one_that_takes_too_long_are_answered(hosted):
    async def use(answers):
        late, behind = [asyncio.create_task(answers.answer(said(text))) for text in ("hangs", "a")]
        assert "longer than rollout.agent.timeout_s" in await late
        # before the other call has a process: it may take as long as the machine needs
        answers._config = answers._config.model_copy(update={"timeout_s": 600.0})
        assert await behind == Reply("a")

    hosted("agent", use, timeout_s=0.5)


@pytest.mark.parametrize("name", ["agent", "waiting"])
@pytest.mark.parametrize("which", [0, -1])
def test_a_process_that_is_killed_from_outside_costs_no_answer(hosted, name, which):
    async def use(answers):
        for _ in range(3):
            while not (found := running("function_host")):
                await answers.start()
                await asyncio.sleep(0.01)
            os.kill(found[which].pid, 9)
            assert await answers.answer(said("a")) == Reply("a")

    hosted(name, use)


def test_a_process_that_is_killed_while_it_starts_is_started_again(hosted):
    async def use(answers):
        old = running("function_host")
        os.kill(old[-1].pid, 9)
        call = asyncio.create_task(answers.answer(said("a")))
        while len(new := [each for each in running("function_host") if each not in old]) < 2:
            await asyncio.sleep(0.01)
        for each in new:
            with suppress(ProcessLookupError):  # the second may have ended with the first
                os.kill(each.pid, 9)
        assert await call == Reply("a")

    hosted("agent", use)


def test_a_command_ends_with_its_killed_parent(hosted):
    async def use(answers):
        call = asyncio.create_task(answers.answer(said("hangs")))
        await asyncio.sleep(0.5)
        parent, host = running("function_host")
        os.kill(parent.pid, 9)
        host.wait(300)
        call.cancel()

    hosted("agent", use)


def given_fault(conversation: Conversation) -> str:
    if conversation.text == "exits":
        sys.exit(5)
    if conversation.text == "cancels":
        raise asyncio.CancelledError
    if conversation.text == "late":
        raise TimeoutError("of a tool")
    return conversation.text


async def given_waiting(conversation: Conversation) -> str:
    return given_fault(conversation)


@pytest.mark.parametrize("agent", [given_fault, given_waiting])
def test_what_a_given_agent_raises_is_its_answer(agent):
    async def main():
        answers = GivenAnswers(agent, 60.0)
        texts = ("exits", "cancels", "late", "a")
        return [await answers.answer(said(text)) for text in texts]

    exits, cancels, late, fine = asyncio.run(main())
    assert exits.startswith("SystemExit: 5")
    assert cancels.startswith("CancelledError")
    assert late.startswith("TimeoutError: of a tool")
    assert fine == Reply("a")
