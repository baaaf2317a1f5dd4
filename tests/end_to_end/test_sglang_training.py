"""Training with real SGLang servers: colocated, disaggregated, and generating ahead."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forked_server import forked_server
from recipe_run import run_recipe
from safetensors.torch import load_file
from saved_moments import saved_moments
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
SAO = (
    *("algorithm.preset=sao", "algorithm.use_kl_in_reward=false", "rollout.top_k=1"),
    *("rollout.max_staleness=1", "data.max_response_length=48", "trainer.sample_table_rows=32"),
    *("trainer.total_training_steps=3", "trainer.save_freq=1", "trainer.dump_rollouts=true"),
    *("reward.name=function", f"reward.function={ROOT}/tests/support/reward_functions.py:of_three"),
    *("actor.optim.lr=2e-4", "critic.optim.lr=1e-3"),
    *("actor.optim.eps=1e-2", "critic.optim.eps=1e-2", "trainer.critic_warmup=0"),
)
"""An asynchronous run: its server generates the next batch during a step."""
LAYOUT = (
    "actor.megatron.tensor_model_parallel_size=1", "critic.megatron.pipeline_model_parallel_size=1",
)  # fmt: skip
COMPARED = (
    *("actor/grad_norm", "critic/grad_norm", "critic/vf_loss_last", "critic/vf_explained_var"),
    *("actor/masked_below", "training/weight_version_lag_mean"),
)
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


@pytest.fixture(scope="module")
def sao(tmp_path_factory, served) -> tuple[Path, list[dict]]:
    _, urls, key = served
    run_dir = tmp_path_factory.mktemp("sao")
    return run_dir, _train(DISAGGREGATED, run_dir, urls, *SAO, **key)


def test_training_with_a_colocated_server(colocated) -> None:
    _, rows = colocated
    _check(rows)
    assert {row["training/weight_version_lag_max"] for row in rows} == {0.0}
    for row in rows:
        assert 0 < row["rollout/sync_bytes/sent"] <= 1.1 * row["rollout/sync_bytes/total"]


@pytest.fixture(scope="module")
def served(tmp_path_factory, forks_servers) -> Iterator[tuple[Path, str, dict[str, str]]]:
    """A server of its own without weights: its model's folder, its setting, variables of a run."""
    from transformers import AutoConfig

    from mppo.hub.builtin import resolve_model
    from mppo.rollout.sglang.fleet import API_KEY_VARIABLE
    from mppo.rollout.sglang.server_options import HOST, server_environment, server_options

    folder = resolve_model("builtin:tiny", os.environ["MPPO_CACHE"])
    config = AutoConfig.from_pretrained(folder)
    options = server_options(str(folder), "float32", 1, True, {"max_total_tokens": 8192}, config)
    variables = server_environment(1, True, config.model_type)
    logs = tmp_path_factory.mktemp("served")
    server = forked_server(0, options, variables, "key", logs, START_S)
    server.start()
    yield folder, f"rollout.urls=[http://{HOST}:{server.port}]", {API_KEY_VARIABLE: "key"}
    server.stop()


DISAGGREGATED = "tiny_cpu_sglang_disaggregated.yaml"


def test_training_with_a_disaggregated_server(tmp_path, colocated, served) -> None:
    folder, urls, key = served
    partial = (
        *("rollout.over_sampling=0.5", "rollout.max_staleness=1", "data.max_response_length=48"),
        *("rollout.batch_size=20", "trainer.sample_table_rows=32"),  # a third of prompts is aborted
    )
    first, killed = tmp_path / "run", tmp_path / "killed"
    rows = _train(DISAGGREGATED, first, urls, *partial, *LIKELIEST, *SAVED, **key)
    _as_left_after(1, first, killed)
    resumed = _train(DISAGGREGATED, killed, urls, *partial, *LIKELIEST, *SAVED, **key)
    assert rows[0]["training/rollout_logprob_diff_max"] < 1e-4
    assert len(rows) == 2
    _check_taken_up(tmp_path, folder, rows, resumed)
    one_ahead = ("rollout.max_staleness=1", "trainer.total_training_steps=3")
    ahead = _train(DISAGGREGATED, tmp_path / "ahead", urls, *one_ahead, *LIKELIEST, *SAVED, **key)
    _check_ahead(tmp_path / "ahead", ahead, *colocated)
    agents = _train(DISAGGREGATED, tmp_path / "agents", urls, *_sleepy_agent(tmp_path), **key)
    _check_agents(tmp_path / "agents", agents)


@pytest.mark.parametrize("layout", [(), LAYOUT], ids=["same", "other dp"])
def test_an_asynchronous_sao_run_goes_on_from_its_checkpoint(tmp_path, served, sao, layout) -> None:
    """A checkpoint holds supply, data, roles and optimizers of one moment.

    From it the last step has the same prompts, the same tokens of the same versions, and so the
    same losses, weights and moments, as in the run that was not killed.
    """
    _, urls, key = served
    run, rows = sao
    copy = tmp_path / "run"
    _as_left_after(2, run, copy)
    resumed = _train(DISAGGREGATED, copy, urls, *SAO, *layout, **key)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["step"] for row in resumed] == [3]
    _check_supply(run, copy)
    absent = set(COMPARED) - rows[2].keys()  # which answers arrive in time decides the returns
    assert absent <= {"critic/vf_explained_var"} - resumed[0].keys(), "if all returns are equal"
    for metric in set(COMPARED) - absent:
        assert resumed[0][metric] == pytest.approx(rows[2][metric], rel=1e-3, abs=1e-5), metric
    for role in ("actor", "critic"):
        saved = Path("checkpoints/global_step_3") / role
        moments, others = saved_moments(run / saved), saved_moments(copy / saved)
        assert moments.keys() == others.keys()
        for name, moment in moments.items():
            assert (others[name] - moment).abs().max() <= 1e-3 * moment.abs().max() + 1e-9, name


def _check_supply(run: Path, copy: Path) -> None:
    """The last step of the resumed run has the prompts and tokens of the other one's."""
    from mppo.checkpoint import responses
    from mppo.dumps.step_dump import dumped_steps, read_header_of

    assert responses.load_responses(run / "checkpoints/global_step_2"), "of the supply"
    headers = [read_header_of(dumped_steps(run)[step]) for step in (1, 2, 3)]
    uids = [row.uid for header in headers for row in header.rows]
    assert uids == list(range(3 * 32)), "each prompt once"
    later = read_header_of(dumped_steps(copy)[3]).rows
    assert [row.uid for row in later] == uids[64:]
    parts = [[*row.parts] for row in later]
    assert parts == [[*row.parts] for row in headers[2].rows]
    versions = {version for each in parts for version, _ in each}
    assert 1 in versions, "tokens of the supply"
    assert versions <= {1, 2}
    assert _texts(copy, step=3) == _texts(run, step=3)


def _sleepy_agent(folder: Path) -> tuple[str, ...]:
    """An agent that takes its time between its two turns, and works while the policy trains."""
    path = folder / "agent.py"
    path.write_text(
        """
import asyncio

async def run(client, task):
    messages = list(task["messages"])
    asked = {"model": "policy", "max_tokens": 8}  # an answer leaves room for the next one
    for seconds in (1.0, 0.0):
        answer = await client.chat.completions.create(messages=messages, **asked)
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

    lags = [row["training/weight_version_lag_max"] for row in rows]
    assert all(lag <= min(step, 2) for step, lag in enumerate(lags))
    assert max(lags) == 2
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


def _as_left_after(step: int, run: Path, copy: Path) -> None:
    """Make the folder of a run that was killed right after it saved a step.

    The responses that have begun by then depend on the moment: to compare two runs that go on with
    them, both must have the same steps until then.
    """
    saved = f"checkpoints/global_step_{step}"
    shutil.copytree(run / saved, copy / saved)


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
