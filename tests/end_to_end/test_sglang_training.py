"""Training with real SGLang servers: colocated, disaggregated, and generating ahead."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from forked_server import forked_server
from recipe_run import run_recipe
from safetensors.torch import load_file
from sglang_case import START_S, needs_sglang

pytestmark = [pytest.mark.server, needs_sglang]
ROOT = Path(__file__).parents[2]


def _train(recipe: str, run_dir: Path, *overrides: str, **environment: str) -> list[dict]:
    """Train, two steps by default; the metrics of each step."""
    steps = "trainer.total_training_steps=2"
    patience = f"rollout.start_timeout_s={START_S}"
    return run_recipe(recipe, run_dir, steps, patience, *overrides, **environment)


def _check(rows: list[dict]) -> None:
    assert len(rows) == 2
    for row in rows:
        assert row["training/rollout_logprob_diff_max"] < 1e-4
        assert abs(row["rollout_corr/k3_kl"]) < 1e-6
        assert row["rollout_corr/ppl_ratio"] == pytest.approx(1, abs=1e-4)


LIKELIEST = (
    "rollout.top_k=1",
    "algorithm.rollout_correction.rollout_is=token",
    "actor.optim.lr=1e-2",
    "actor.optim.eps=1e-2",
)
"""Settings with responses that depend only on the weights and updates smooth in the gradient."""
SAVED = ("trainer.save_freq=1", "trainer.checkpoint_hf=true")


@pytest.fixture(scope="module")
def colocated(tmp_path_factory) -> tuple[Path, list[dict]]:
    run_dir = tmp_path_factory.mktemp("colocated")
    checks = (
        "rollout.verify_sync=logprob",
        "rollout.logprob_tolerance=1e-5",
        "rollout.sync_mode=delta",
    )
    return run_dir, _train("tiny_cpu_sglang.yaml", run_dir, *checks, *LIKELIEST, *SAVED)


def test_training_with_a_colocated_server(colocated) -> None:
    _, rows = colocated
    _check(rows)
    assert {row["training/weight_version_lag_max"] for row in rows} == {0.0}
    for row in rows:
        assert 0 < row["rollout/sync_bytes/sent"] <= 1.1 * row["rollout/sync_bytes/total"]


def test_training_with_a_disaggregated_server(tmp_path, colocated, forks_servers) -> None:
    from transformers import AutoConfig

    from mppo.hub.builtin import resolve_model
    from mppo.rollout.sglang.fleet import API_KEY_VARIABLE
    from mppo.rollout.sglang.server_options import (
        HOST,
        server_environment,
        server_options,
    )

    folder = resolve_model("builtin:tiny", os.environ["MPPO_CACHE"])
    limits = {"max_total_tokens": 8192}
    config = AutoConfig.from_pretrained(folder)
    options = server_options(str(folder), "float32", 1, True, limits, config)
    server = forked_server(
        0, options, server_environment(1, True, config.model_type), "key", tmp_path, START_S
    )
    server.start()
    try:
        apart = (f"rollout.urls=[http://{HOST}:{server.port}]", "rollout.over_sampling=0.5")
        partial = ("rollout.max_staleness=1", "data.max_response_length=48")
        few = (
            "rollout.batch_size=20",
            "trainer.sample_table_rows=32",
        )  # a third of the prompts is aborted
        rows, resumed = (
            _train(
                "tiny_cpu_sglang_disaggregated.yaml",
                _as_left_after_a_step(tmp_path / "run", run_dir),
                *apart,
                *partial,
                *few,
                *LIKELIEST,
                *SAVED,
                **{API_KEY_VARIABLE: "key"},
            )
            for run_dir in (tmp_path / "run", tmp_path / "killed")
        )
        ahead = _train(
            "tiny_cpu_sglang_disaggregated.yaml",
            tmp_path / "ahead",
            apart[0],
            "rollout.max_staleness=1",
            "trainer.total_training_steps=3",
            *LIKELIEST,
            *SAVED,
            **{API_KEY_VARIABLE: "key"},
        )
        agents = _train(
            "tiny_cpu_sglang_disaggregated.yaml",
            tmp_path / "agents",
            apart[0],
            *_sleepy_agent(tmp_path),
            **{API_KEY_VARIABLE: "key"},
        )
    finally:
        server.stop()
    assert rows[0]["training/rollout_logprob_diff_max"] < 1e-4
    assert len(rows) == 2
    _check_taken_up(tmp_path, folder, rows, resumed)
    _check_ahead(tmp_path / "ahead", ahead, *colocated)
    _check_agents(tmp_path / "agents", agents)


def _sleepy_agent(folder: Path) -> tuple[str, ...]:
    """An agent that takes its time between its two turns, and works while the policy trains."""
    path = folder / "agent.py"
    path.write_text(
        """
import asyncio

async def run(client, task):
    messages = list(task["messages"])
    for seconds in (1.0, 0.0):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        said = {"role": "assistant", "content": answer.choices[0].message.content or ""}
        messages = [*messages, said, {"role": "user", "content": "more"}]
        await asyncio.sleep(seconds)
    return len(said["content"]) / 16
"""
    )
    return (
        f"rollout.agent.run={path}:run",
        "rollout.max_staleness=2",
        "algorithm.rollout_correction.rollout_is=token",
        "trainer.total_training_steps=5",
        "trainer.dump_rollouts=true",
        "trainer.test_freq=2",
    )


def _check_agents(run_dir: Path, rows: list[dict]) -> None:
    """Episodes that began with earlier weights go on through updates, and each is trained once."""
    from mppo.dumps.step_dump import dumped_steps, read_header_of

    assert [row["training/weight_version_lag_max"] for row in rows] == [0, 1, 2, 2, 2]
    shares = [[row[f"training/staleness/{age}"] for age in range(3)] for row in rows]
    assert [sum(each) for each in shares] == pytest.approx([1] * 5)
    for each, row in zip(shares, rows, strict=True):
        assert each[1] + 2 * each[2] == pytest.approx(row["training/weight_version_lag_mean"])
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    assert {row["conversation/turns/max"] for row in rows} == {2.0}
    headers = {step: read_header_of(folder) for step, folder in dumped_steps(run_dir).items()}
    uids = [row.uid for header in headers.values() for row in header.rows]
    assert uids == list(range(5 * 32)), "in the order of the data, none twice"
    for step, header in headers.items():
        versions = [v for row in header.rows for v, _ in row.parts if v >= 0]
        assert step - 3 <= min(versions) <= max(versions) <= step - 1, "of the last three"


def _as_left_after_a_step(run: Path, copy: Path) -> Path:
    """The folder of a run that was killed right after it saved its first step.

    The responses that have begun by then depend on the moment: to compare two runs that go on with
    them, both must have the same first step.
    """
    saved = "checkpoints/global_step_1"
    if (run / saved).exists():
        shutil.copytree(run / saved, copy / saved)
    return copy


def _check_taken_up(root: Path, model: Path, rows: list[dict], resumed: list[dict]) -> None:
    """The resumed run continues the partial responses like the run that was not killed.

    Which of them are answered first is a race, so batches may differ by prompts. Two thirds of the
    prompts asked make a batch: at least a third of them is in both.
    """
    from mppo.checkpoint import responses
    from mppo.hub.builtin import load_tokenizer

    tokenizer = load_tokenizer(model)
    begun = responses.load_responses(root / "killed/checkpoints/global_step_1")
    assert begun
    complete, later = (_texts(root / name, step=2) for name in ("run", "killed"))
    both = complete.keys() & later.keys()
    assert len(both) >= 16
    same = sum(complete[prompt] == later[prompt] for prompt in both)
    assert same >= len(both) - 1, "but for a tie between the likeliest tokens"
    prompts = {key: tokenizer.decode(r.prompt.token_ids.tolist()) for key, r in begun.items()}
    starts = tokenizer.batch_decode(
        [r.here.ids.tolist() for r in begun.values()], skip_special_tokens=True
    )
    went_on = [
        later[prompt].startswith(start.rstrip("\ufffd"))  # half a letter
        for prompt, start in zip(prompts.values(), starts, strict=True)
        if prompt in later
    ]
    assert went_on
    assert all(went_on)
    assert [row["step"] for row in resumed] == [2]
    for run in (rows, resumed):
        assert run[-1]["training/weight_version_lag_max"] == 1


def _texts(run_dir: Path, step: int) -> dict[str, str]:
    """The responses of a step by prompt."""
    rows = [json.loads(line) for line in (run_dir / "samples.jsonl").open()]
    found = {row["prompt"]: row["response"] for row in rows if row["step"] == step}
    assert len(found) == 32
    return found


def _check_ahead(run_dir: Path, rows: list[dict], plain_dir: Path, plain: list[dict]) -> None:
    """Each batch but the first is one update old; the first update does not change."""
    for age in ("training/weight_version_lag_mean", "training/weight_version_lag_max"):
        assert [row[age] for row in rows] == [0, 1, 1]
    assert ["timing_s/wait_prev_gen" in row for row in rows] == [True, True, False]
    assert rows[0]["training/rollout_logprob_diff_max"] < 1e-4
    assert rows[1]["training/rollout_logprob_diff_max"] > 1e-4  # of the actor, an update later
    assert rows[1]["rollout_corr/rollout_is_std"] > rows[0]["rollout_corr/rollout_is_std"]
    for key in ("actor/grad_norm", "critic/grad_norm", "critic/score/mean"):
        assert rows[0][key] == pytest.approx(plain[0][key], rel=1e-3)
    one, other = (
        load_file(folder / "hf" / "global_step_1" / "model.safetensors")
        for folder in (run_dir, plain_dir)
    )
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-4, atol=1e-5)
