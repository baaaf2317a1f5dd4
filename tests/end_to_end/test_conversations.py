"""Runs with an agent on two ranks: learned from, dumped, replayed, resumed and evaluated."""

from __future__ import annotations

import itertools
import json
import shutil

import pytest
from recipe_run import evaluate_recipe, run_recipe, smaller

from mppo.batch.episode import NO_WEIGHTS
from mppo.dumps.experience_files import read_experience
from mppo.dumps.inspection import main as inspect
from mppo.dumps.step_dump import dumped_steps, read_header_of
from mppo.report.html.page import page_data

RECIPE = "tiny_cpu_conversations.yaml"
SHORT = [
    *smaller(4), "trainer.warm_start_steps=0", "data.train_size=64", "trainer.test_freq=-1",
    "rollout.batch_size=1",
]  # fmt: skip
"""Turns that are generated one by one are rounded alike in every run."""
STOPS = f"rollout.stop_token_ids={list(range(10, 60))}"
"""Without a warm start a random token rarely ends a turn."""
TIMES = ("timing", "perf/", "eps", "conversation/agent_s", "conversation/generation_s")
"""Metrics that differ between equal runs."""


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    """Four steps with a checkpoint and a dump of each."""
    run_dir = tmp_path_factory.mktemp("conversations")
    more = [STOPS, "trainer.save_freq=1", "trainer.dump_rollouts=true", "trainer.test_freq=4"]
    return run_dir, run_recipe(RECIPE, run_dir, *SHORT, *more)


def numbers(row):
    return {name: value for name, value in row.items() if not name.startswith(TIMES)}


@pytest.mark.distributed
def test_the_policy_learns_in_conversations(tmp_path):
    rows = run_recipe(RECIPE, tmp_path, "trainer.total_training_steps=16", "trainer.test_freq=-1")
    scores = [row["critic/score/mean"] for row in rows]
    assert sum(scores[-4:]) > 1.2 * sum(scores[:4])
    assert all(1 < row["conversation/turns/mean"] < 3 for row in rows)
    # context that no weights generated would differ by whole nats
    assert all(row["training/rollout_logprob_diff_max"] < 1e-4 for row in rows)


@pytest.mark.distributed
def test_a_dump_has_the_environments_tokens_outside_every_loss(dumped, capsys):
    run_dir, rows = dumped
    for row, (step, folder) in zip(rows, dumped_steps(run_dir).items(), strict=True):
        header = read_header_of(folder)
        stored = read_experience(folder, header.ranks)
        batch = stored.old.batch
        turns = [1 + sum(v == NO_WEIGHTS for v, _ in each.parts) for each in header.rows]
        assert max(turns) > 1
        assert row["conversation/turns/mean"] == pytest.approx(sum(turns) / len(turns))
        assert row["response_length/mean"] == pytest.approx(batch.response_B.float().mean())
        inside = batch.response_mask_T > 0
        assert inside.equal(batch.weight_version_T == step - 1)
        for name in ("rewards_T", "advantages_T", "returns_T", "loss_weight_T"):
            assert not getattr(stored, name)[~inside].any(), name
        first = batch.prompt_B.tolist()
        assert all(len(t) == n for t, n in zip(prompts_of(batch), first, strict=True))
    talk = turns.index(max(turns))
    assert inspect([str(run_dir), "--sequence", str(talk)]) == 0
    assert f"sequence {talk}" in capsys.readouterr().out
    shown = [row for row in page_data([run_dir])["runs"][0]["tokens"] if row["by_environment"]]
    assert shown


def prompts_of(batch):
    """The tokens before the first response token of each sequence."""
    ends = batch.cu_seqlens.tolist()
    for start, end in itertools.pairwise(ends):
        mask = batch.response_mask_T[start:end]
        yield mask[: int(mask.argmax())]


@pytest.mark.distributed
def test_a_resumed_run_continues_like_an_uninterrupted_one(dumped, tmp_path):
    run_dir, rows = dumped
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    for step in (3, 4):
        shutil.rmtree(copy / "checkpoints" / f"global_step_{step}")
    for name in ("status.json", "report.md"):  # a run that died after step 2
        (copy / name).unlink()
    more = [STOPS, "trainer.save_freq=1", "trainer.dump_rollouts=true", "trainer.test_freq=4"]
    again = run_recipe(RECIPE, copy, *SHORT, *more)
    assert (copy / "checkpoints" / "global_step_4").is_dir(), "steps 3 and 4 were repeated"
    assert [numbers(row) for row in again] == [numbers(row) for row in rows]


@pytest.mark.distributed
def test_a_replay_trains_on_conversations_without_the_agent(dumped, tmp_path):
    run_dir, rows = dumped
    replayed = run_recipe(RECIPE, tmp_path, *SHORT, STOPS, f"trainer.replay={run_dir}",
                          "trainer.total_training_steps=1")  # fmt: skip
    same = ("actor/grad_norm", "critic/grad_norm", "critic/score/mean", "response_length/mean",
            "conversation/turns/mean", "conversation/inserted_tokens/max")  # fmt: skip
    for name in same:
        assert replayed[0][name] == pytest.approx(rows[0][name], rel=1e-5), name


@pytest.mark.distributed
def test_evaluation_has_conversations(tmp_path):
    samples, out = tmp_path / "samples.jsonl", tmp_path / "out.json"
    evaluate_recipe(RECIPE, "--samples", str(samples), "--out", str(out), STOPS,
                    f"trainer.default_local_dir={tmp_path}", "data.val_size=8")  # fmt: skip
    found = json.loads(out.read_text())
    assert found["val/turns/mean"] > 1
    lines = [json.loads(line) for line in samples.open()]
    assert len(lines) == 8
    assert any("?\n" in line["response"] for line in lines)
