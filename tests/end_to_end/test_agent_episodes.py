"""Runs whose agent is a program on two ranks: with the local engine, and with a real server."""

from __future__ import annotations

import json
import os
import sys
from itertools import groupby, pairwise

import pytest
from recipe_run import ROOT, evaluate_recipe, run_recipe, smaller
from sglang_case import START_S, needs_sglang

from mppo.batch.episode import NO_WEIGHTS
from mppo.dumps.experience_files import read_experience
from mppo.dumps.step_dump import dumped_steps, read_header_of
from mppo.hub.builtin import load_tokenizer, resolve_model

RECIPE = "tiny_cpu_agent.yaml"
AGENT = f"rollout.agent.run={ROOT}/recipes/agents/guess_sums.py:run"
SHORT = [
    *smaller(3), AGENT, "trainer.warm_start_steps=0", "data.train_size=64", "trainer.test_freq=-1",
    f"rollout.stop_token_ids={list(range(10, 60))}",
]  # fmt: skip
COMPACTING = """
async def run(client, task):
    messages = task["messages"]
    for word in ("more", "and"):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        said = {"role": "assistant", "content": answer.choices[0].message.content or ""}
        messages = [*messages, said, {"role": "user", "content": word}]
    await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "7"}]
    )
    return {"reward": len(said["content"]) / 4}
"""
"""Two turns, and a third one behind another history."""
ENVIRONMENT = """
import json
import verifiers as vf
from datasets import Dataset

class Again(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [vf.UserMessage(content="more")]

def load_environment(log):
    def score(completion):
        return len(completion[-1].content) / 4 if completion else 0.0

    def letters(completion):
        said = [each.content for each in completion if each.role == "assistant"]
        if len(said) == 2 and all(said):
            with open(log, "a") as stream:
                stream.write(json.dumps(said) + "\\n")
        return sum(map(len, said))

    data = Dataset.from_list([{"question": f"{i}+1", "answer": str(i + 1)} for i in range(16)])
    rubric = vf.Rubric(funcs=[score, letters], weights=[1.0, 0.0])
    return Again(dataset=data, rubric=rubric, max_turns=2)
"""
"""Writes what the policy says in both turns to a file. To verifiers an empty turn is an error."""


@pytest.fixture
def compacting(tmp_path):
    """The settings of an agent whose episodes have two sequences."""
    path = tmp_path / "compacting.py"
    path.write_text(COMPACTING)
    return [*SHORT, f"rollout.agent.run={path}:run"]


def _same_probabilities(rows: list[dict], limit: float = 1e-4) -> None:
    """The engine's probabilities are the actor's: they saw the same tokens."""
    for row in rows:
        assert row["training/rollout_logprob_diff_max"] < limit
        assert row["conversation/turns/max"] > 1


@pytest.mark.distributed
def test_the_policy_trains_on_what_it_said_to_a_program(tmp_path):
    rows = run_recipe(RECIPE, tmp_path, *SHORT, "trainer.test_freq=3")
    assert len(rows) == 3
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    assert "val/turns/mean" in rows[-1]
    for row in rows:
        assert "conversation/generation_s/min" in row
        assert row["conversation/trained_tokens/mean"] >= row["conversation/turns/mean"]
    _same_probabilities(rows)


@pytest.mark.distributed
def test_the_recipes_game_has_two_turns(tmp_path):
    pytest.importorskip("gymnasium")
    game = f"rollout.agent.run={ROOT}/recipes/agents/text_game.py:run"
    keys = ["trainer.test_freq=-1", "trainer.warm_start_steps=4", "actor.optim.lr_warmup_steps=0"]
    keys += [f"rollout.stop_token_ids={list(range(4, 50))}"]  # an untrained model ends its turns
    rows = run_recipe("tiny_cpu_game.yaml", tmp_path, *smaller(2), *keys, game)
    for row in rows:
        assert row["conversation/turns/max"] == 2
        assert row["reward/errors"] == 0
        assert row["actor/grad_norm"] > 0


@pytest.mark.distributed
def test_training_in_an_environment_of_verifiers(tmp_path):
    pytest.importorskip("verifiers")
    (tmp_path / "again.py").write_text(ENVIRONMENT)
    log, place = tmp_path / "said.jsonl", tmp_path / "run"
    rows = run_recipe(
        RECIPE, place, *SHORT[:-1], f"rollout.stop_token_ids={list(range(10, 20))}",
        "trainer.total_training_steps=2", "trainer.dump_rollouts=true", "reward.on_error=0",
        f"rollout.environment={{verifiers: again, arguments: {{log: '{log}'}}}}",
        "data.task=verifiers:again", "rollout.agent.run=mppo.data.verifiers_environment:run",
        "data.max_response_length=256", PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]),
    )  # fmt: skip
    said = [json.loads(line) for line in log.read_text().splitlines()]
    tokenizer, found, scores = load_tokenizer(resolve_model("builtin:tiny")), [], []
    for folder, row in zip(dumped_steps(place).values(), rows, strict=True):
        header = read_header_of(folder)
        turns = _turns(tokenizer, read_experience(folder, header.ranks).old.batch)
        ended = [
            (each, text) for each, text in zip(header.rows, turns, strict=True) if not each.error
        ]
        assert row["reward/errors"] == len(header.rows) - len(ended)
        assert [each.score for each, _ in ended] == [len(last) / 4 for _, (_, last) in ended]
        letters = [len(first) + len(last) for _, (first, last) in ended]
        assert row["reward/again/letters/mean"] == pytest.approx(sum(letters) / len(letters))
        assert row["reward/again/num_turns/mean"] == 2
        assert row["actor/grad_norm"] > 0
        found += [text for _, text in ended]
        scores += [each.score for each, _ in ended]
    assert sorted(found) == sorted(said), "the environment saw what is trained on"
    assert len(set(scores)) > 1
    _same_probabilities(rows)


def _turns(tokenizer, batch) -> list[list[str]]:
    """What the policy said in each turn of each sequence, without the tokens that end turns."""
    found = []
    for first, last in pairwise(batch.cu_seqlens.tolist()):
        tokens, mine = batch.tokens_T[first:last], batch.response_mask_T[first:last]
        runs = [list(run) for said, run in groupby(range(last - first), mine.__getitem__) if said]
        found.append([tokenizer.decode(tokens[run[:-1]], skip_special_tokens=True) for run in runs])
    return found


@pytest.mark.distributed
def test_sequences_of_an_episode_are_dumped_and_replayed(tmp_path, compacting):
    scored = [*compacting, "reward_model.path=builtin:tiny-reward", "reward.weight=0.5"]
    rows = run_recipe(RECIPE, tmp_path / "run", *scored, "trainer.dump_rollouts=true")
    _same_probabilities(rows)
    assert all("reward/arithmetic/rm_score/mean" in row for row in rows)
    assert all(row["conversation/sequences/max"] == 2 for row in rows)
    for folder in dumped_steps(tmp_path / "run").values():
        header = read_header_of(folder)
        batch = read_experience(folder, header.ranks).old.batch
        assert len(header.rows) == 16
        assert [row.episode for row in header.rows] == [i // 2 for i in range(16)]
        for first, second in zip(header.rows[::2], header.rows[1::2], strict=True):
            assert (first.score, first.uid) == (second.score, second.uid)
            assert [v == NO_WEIGHTS for v, _ in first.parts] == [False, True, False]
        assert batch.episodes.last_E.tolist() == list(range(1, 16, 2))
    replayed = run_recipe(
        RECIPE, tmp_path / "again", *scored, f"trainer.replay={tmp_path / 'run'}",
    )  # fmt: skip
    for name in ("actor/grad_norm", "critic/grad_norm", "critic/score/mean"):
        found, expected = ([row[name] for row in part] for part in (replayed, rows))
        assert found == pytest.approx(expected, rel=1e-4), name


@pytest.mark.distributed
def test_evaluation_runs_the_program(tmp_path):
    samples, out = tmp_path / "samples.jsonl", tmp_path / "out.json"
    evaluate_recipe(RECIPE, "--samples", str(samples), "--out", str(out), *SHORT[5:],
                    f"trainer.default_local_dir={tmp_path}", "data.val_size=8")  # fmt: skip
    assert json.loads(out.read_text())["val/turns/mean"] > 1
    assert len(samples.read_text().splitlines()) == 8


@pytest.mark.server
@needs_sglang
@pytest.mark.distributed
def test_a_program_with_a_real_server(tmp_path, compacting):
    rows = run_recipe(
        RECIPE, tmp_path / "run", *compacting, "rollout.name=sglang",
        "reward_model.path=builtin:tiny-reward",
        f"rollout.start_timeout_s={START_S}", "trainer.total_training_steps=2",
        "rollout.verify_sync=logprob", "data.max_response_length=112",  # all turns fit
    )  # fmt: skip
    _same_probabilities(rows)
    assert all(row["conversation/sequences/mean"] == 2 for row in rows)
    for row in rows:  # the model's score alone; the agent's is only logged
        assert row["critic/score/mean"] == row["reward/arithmetic/rm_score/mean"]
        assert "reward/arithmetic/agent_reward/mean" in row
        assert 0 <= row["conversation/prefix_hit_rate"] <= 1
