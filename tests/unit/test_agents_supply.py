"""Episodes that go on while batches are taken and the weights change."""

from __future__ import annotations

import asyncio
import textwrap
from dataclasses import replace
from types import SimpleNamespace

import pytest
from agent_case import OPENING, PROMPTS, SAMPLING, local_engine

from mppo.agents.build_agent import build_agent
from mppo.agents.episode_engine import EpisodeEngine
from mppo.agents.running_episodes import use_metrics
from mppo.agents.turn_queue import Drawing, TurnQueue
from mppo.batch.episode import NO_WEIGHTS, Episode, EpisodeUse
from mppo.hub.builtin import byte_tokenizer
from mppo.recipe.load import load_recipe
from mppo.rollout.engine import GenerationRequest
from mppo.rollout.local.local_engine import LocalTurns
from mppo.rollout.response_gather import AnsweredPrompts
from mppo.rollout.turns import EngineLost

WAITING = """
    async def run(client, task):
        messages = await say(client, task["messages"])
        mark = f"{here}/{task['ground_truth']}"
        open(mark, "a").write("x")
        while task["ground_truth"] in ("0", "3") and not os.path.exists(f"{here}/go"):
            await asyncio.sleep(0.02)
        await say(client, [*messages, {"role": "user", "content": "more"}])
        return float(task["ground_truth"])
"""
"""The episodes of two of four prompts wait after their first turn, until a file is there."""
ANSWERING = """
    async def run(conversation):
        name = conversation.ground_truth
        if conversation.turn == 2:
            return {"reward": float(name), "done": True}
        open(f"{here}/{name}", "a").write("x")
        while name in ("0", "3") and not os.path.exists(f"{here}/go"):
            await asyncio.sleep(0.02)
        return "more"
"""
"""The same as a function that answers the policy's first turn."""
REQUEST = GenerationRequest(PROMPTS, SAMPLING, 24, 11, num_prompts_needed=2)


@pytest.fixture
def started(tmp_path):
    """Starts an engine whose episodes wait; the engine, and the folder of their marks."""
    engines = []

    def start(goes_on: bool, kind: str = "run", **config):
        path = tmp_path / "agent.py"
        where = f"\n    here = {str(tmp_path)!r}\n"
        program = WAITING if kind == "run" else ANSWERING
        path.write_text(textwrap.dedent(OPENING + where) + textwrap.dedent(program))
        keys = [f"rollout.agent.{name}={value}" for name, value in config.items()]
        agent = f"rollout.agent.{kind}={path}:run"
        recipe = load_recipe(
            None, ["model.path=builtin:tiny", "data.task=arithmetic", agent, *keys]
        )
        engine = EpisodeEngine(
            local_engine(), build_agent(recipe), byte_tokenizer(), recipe.rollout.agent, 64,
            goes_on=goes_on,
        )  # fmt: skip
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.stop()


def new_weights(engine: EpisodeEngine, version: int) -> None:
    """Load the weights that the engine has, scaled, as a later version."""
    inner = engine._engine
    engine.update_weights([[(k, 1.05 * v) for k, v in inner._model.state_dict().items()]], version)


def uids(episodes: list[Episode]) -> list[int]:
    return [each.prompt.uid for each in episodes]


def versions(episode: Episode) -> list[int]:
    return [version for version, _ in episode.parts if version != NO_WEIGHTS]


@pytest.mark.parametrize("kind", ["run", "path"])
def test_a_batch_takes_what_is_complete_and_the_rest_goes_on_with_new_weights(
    kind, started, tmp_path
):
    engine = started(goes_on=True, kind=kind)
    early: list[int] = []
    first = engine.submit(replace(REQUEST, on_response=lambda places, _: early.extend(places)))
    taken = first.collect()
    assert uids(taken) == [7, 7, 14, 14]
    assert sorted(early) == [2, 3, 4, 5]
    assert [versions(each) for each in taken] == [[3, 3]] * 4
    metrics = engine.sync_metrics()
    assert {"conversation/generation_s/min", "conversation/agent_s/min"} <= metrics.keys()
    assert "conversation/prefix_hit_rate" not in metrics
    new_weights(engine, 4)
    (tmp_path / "go").touch()
    left = replace(REQUEST, prompts=[PROMPTS[0], PROMPTS[3]])
    found = engine.submit(left).collect()
    assert uids(found) == [0, 0, 21, 21]
    assert [versions(each) for each in found] == [[3, 4]] * 4
    assert [each.result.reward for each in found] == [0, 0, 3, 3]
    marks = [(tmp_path / name).read_text() for name in "0123"]
    assert marks == ["xx"] * 4, "each episode ran once"


def test_seconds_of_agents_and_hits_of_the_prefix_cache():
    found = use_metrics([EpisodeUse(3.0, 1.0, 10, 5), EpisodeUse(1.0, 0.5, 10, None)])
    assert found["conversation/agent_s/mean"] == 1.25
    assert found["conversation/generation_s/max"] == 1.0
    assert found["conversation/prefix_hit_rate"] == 0.5
    assert use_metrics([]) == {}


def test_episodes_end_with_their_batch_unless_they_may_get_old(started, tmp_path):
    engine = started(goes_on=False)
    assert uids(engine.submit(REQUEST).collect()) == [7, 7, 14, 14]
    new_weights(engine, 4)
    (tmp_path / "go").touch()
    found = engine.submit(replace(REQUEST, prompts=[PROMPTS[0], PROMPTS[3]])).collect()
    assert [versions(each) for each in found] == [[4, 4]] * 4
    assert [(tmp_path / name).read_text() for name in "03"] == ["xxxx"] * 2, "they began again"


def test_episodes_that_would_be_too_old_start_again(started, tmp_path):
    engine = started(goes_on=True)
    engine.submit(REQUEST).collect()
    new_weights(engine, 4)
    (tmp_path / "go").touch()
    left = replace(REQUEST, prompts=[PROMPTS[0], PROMPTS[3]], oldest_version=4)
    assert [versions(each) for each in engine.submit(left).collect()] == [[4, 4]] * 4


def test_a_complete_episode_waits_for_its_batch(started, tmp_path):
    """The result holds the oldest complete prompts among the first; the others are kept."""
    engine = started(goes_on=True)
    (tmp_path / "go").touch()
    taken = engine.submit(replace(REQUEST, among=2)).collect()
    assert uids(taken) == [0, 0, 7, 7]
    new_weights(engine, 4)
    second = engine.submit(replace(REQUEST, prompts=PROMPTS[2:]))
    assert uids(second.collect()) == [14, 14, 21, 21]
    assert [(tmp_path / name).read_text() for name in "0123"] == ["xx"] * 4


def test_validation_leaves_episodes_alone_that_go_on(started, tmp_path):
    engine = started(goes_on=True)
    engine.submit(REQUEST).collect()
    engine.submit(replace(REQUEST, prompts=[PROMPTS[0], PROMPTS[3]]))
    whole = GenerationRequest(PROMPTS[1:3], SAMPLING.model_copy(update={"n": 1}), 24, 5)
    assert uids(engine.generate(whole)) == [7, 14]
    (tmp_path / "go").touch()
    found = engine.submit(replace(REQUEST, prompts=[PROMPTS[0], PROMPTS[3]])).collect()
    assert uids(found) == [0, 0, 21, 21]
    assert [(tmp_path / name).read_text() for name in "03"] == ["xx"] * 2


def test_an_agent_is_not_charged_for_the_time_in_which_the_policy_trains(monkeypatch):
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("mppo.agents.turn_queue.time", clock)

    class Slow(LocalTurns):
        def generate(self, requests, sampling, seed):
            now[0] += 8
            return super().generate(requests, sampling, seed)

    async def charged() -> tuple[float, float, float, EpisodeUse]:
        queue, turns = TurnQueue(), local_engine().turns()
        turns.__class__ = Slow
        queue.open(turns)
        queue.name("a", 0, 0, Drawing(SAMPLING, 11))
        await queue.generate([3, 4], 4, "a")
        now[0] += 1
        await queue.pause()
        first = queue.open_seconds
        now[0] += 2
        paused = queue.open_seconds
        queue.open(turns)
        now[0] += 4
        return first, paused, queue.open_seconds, queue.forget("a")

    *seconds, use = asyncio.run(charged())
    assert seconds == [9, 9, 13]
    assert (use.seconds, use.generation_s) == (13, 8)


class LosesServers(LocalTurns):
    """Has no server left after its first batch."""

    batches = 0

    def generate(self, requests, sampling, seed):
        self.batches += 1
        if self.batches > 1:
            raise EngineLost("no server is left")
        return super().generate(requests, sampling, seed)


def test_episodes_start_again_whose_agents_still_try_when_lost_servers_are_back(
    started, tmp_path, capfd
):
    """A client repeats a failed request for a while, so that its episode has not ended yet."""
    engine = started(goes_on=True)
    (tmp_path / "go").touch()
    inner = engine._engine
    turns, begun = inner.turns, []

    def losing():
        found = turns()
        if not begun:
            found.__class__ = LosesServers
        begun.append(found)
        return found

    inner.turns = losing
    found = engine.submit(replace(REQUEST, num_prompts_needed=None)).collect()
    assert len(begun) == 2
    assert uids(found) == [0, 0, 7, 7, 14, 14, 21, 21]
    assert [each.result.error for each in found] == [None] * 8
    assert "Traceback" not in capfd.readouterr().err, "a lost server is no bug"


def test_an_episode_that_ends_while_others_are_ended_counts_once():
    answered = AnsweredPrompts(replace(REQUEST, num_prompts_needed=1))
    for _ in range(2):
        answered.add([2])
        assert not answered.are_enough, "the prompt has another sample"
    answered.add([3])
    assert answered.are_enough
