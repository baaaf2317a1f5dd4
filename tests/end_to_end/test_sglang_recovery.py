"""No response is lost when a real SGLang server is killed or hangs."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Iterator

import psutil
import pytest
from agent_case import answered
from forked_server import forked_server
from sglang_case import (
    TOLERANCE,
    Case,
    needs_sglang,
    prompts,
    response_logprobs,
    server_process,
    synced_case,
)

from mppo.agents.conversation import Conversation, Reply
from mppo.batch.episode import Episode
from mppo.recipe.sections.rollout import SamplingConfig
from mppo.report.run_record import read_events
from mppo.rollout.engine import GenerationRequest as Request
from mppo.rollout.engine import WeightSource
from mppo.weights.bucket import WeightBucket

pytestmark = [pytest.mark.server, needs_sglang]


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory, forks_servers) -> Iterator[Case]:
    """An SGLang server that starts quickly anew."""
    yield from synced_case(tmp_path_factory.mktemp("qwen2"), forked_server)


@pytest.mark.parametrize(("end", "why"), [("kill", ""), ("suspend", "no answer within 15 s")])
def test_a_server_killed_or_hung_in_mid_generation_loses_nothing(
    qwen2, monkeypatch, capsys, end: str, why: str
) -> None:
    qwen2.change_weights()
    qwen2.sync()
    victim = server_process(qwen2)
    if end == "suspend":
        monkeypatch.setattr(qwen2.engine.fleet.apis[0].client, "timeout_s", 15.0)

    struck = threading.Event()

    def strike(places, responses) -> None:
        """End the server once its first response has arrived."""
        if not struck.is_set():
            struck.set()
            getattr(victim, end)()

    sampling = SamplingConfig(stop_token_ids=tuple(range(3, 12)))
    episodes = qwen2.engine.generate(Request(prompts(16), sampling, 400, 0, strike))
    assert not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE
    assert re.search(rf"restarting SGLang server 0: .*/generate: {why}", capsys.readouterr().out)
    events = read_events(qwen2.engine.fleet.run_dir)
    assert re.search(rf"restarting SGLang server 0: .*{why}", events[-1].text)
    assert [each.prompt.uid for each in episodes] == list(range(16))
    qwen2.check_logprobs(episodes, 1.0)


def test_conversations_whose_server_is_killed_equal_those_of_the_local_engine(qwen2) -> None:
    qwen2.change_weights()
    qwen2.sync()
    sampling = SamplingConfig(temperature=0.0, stop_token_ids=tuple(range(2, 60)))
    request = Request(prompts(8), sampling, 24, seed=0)
    victims = []

    def agent(conversation: Conversation) -> Reply:
        if conversation.turn == 2 and victims:
            victims.pop().kill()
        return Reply("!" * conversation.turn, conversation.turn)

    def talk(engine) -> list[Episode]:
        return answered(engine, agent, 4, 24).generate(request)

    ours = talk(qwen2.local)
    victims.append(server_process(qwen2))
    theirs = talk(qwen2.engine)
    assert not victims, "the server was killed between two turns"
    assert max(len(each.parts) for each in ours) >= 5  # three turns of the policy
    for a, b in zip(ours, theirs, strict=True):
        assert b.here.ids.tolist() == a.here.ids.tolist()
        assert (b.finish_reason, b.result) == (a.finish_reason, a.result)
        assert b.here.logprobs.tolist() == pytest.approx(a.here.logprobs.tolist(), abs=TOLERANCE)
        assert [n for v, n in b.parts if v < 0] == [n for v, n in a.parts if v < 0]


def test_kill_9_while_generating_ahead_loses_nothing(qwen2) -> None:
    qwen2.change_weights()
    qwen2.sync()
    old, version, victim = copy.deepcopy(qwen2.model), qwen2.version, server_process(qwen2)
    received: dict[int, Episode] = {}
    answered = threading.Event()

    def receive(places, responses) -> None:
        received.update(zip(places, responses))
        answered.set()

    sampling = SamplingConfig(stop_token_ids=tuple(range(3, 12)))
    ahead = qwen2.engine.submit(Request(prompts(24), sampling, 400, 0, receive))
    assert answered.wait(timeout=300)
    victim.kill()
    qwen2.change_weights()
    qwen2.sync()
    episodes = ahead.collect()
    assert not victim.is_running()
    assert [each.prompt.uid for each in episodes] == list(range(24))
    assert sorted(received) == list(range(24))
    assert {each.parts[-1][0] for each in episodes} == {version, qwen2.version}
    for each in episodes:
        model = old if each.parts[-1][0] == version else qwen2.model
        assert each.here.logprobs.tolist() == pytest.approx(
            response_logprobs(model, each), abs=TOLERANCE
        )


def test_kill_9_in_mid_update_and_while_asleep(qwen2) -> None:
    qwen2.change_weights()
    killed = []

    def deadly_stream() -> Iterator[WeightBucket]:
        for number, bucket in enumerate(qwen2.stream()):
            yield bucket
            if number == 1 and not killed:
                killed.append(server_process(qwen2))
                killed[0].kill()
                killed[0].wait()

    qwen2.engine.update_weights(WeightSource(deadly_stream), qwen2.version)
    qwen2.local.update_weights(qwen2.stream(), qwen2.version)
    assert killed
    qwen2.check()
    qwen2.engine.sleep()
    asleep = server_process(qwen2)
    asleep.kill()
    asleep.wait()
    qwen2.change_weights()
    qwen2.sync()
    qwen2.check()
