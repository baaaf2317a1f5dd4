"""Estimators, losses, aggregations, KL terms and corrections in the loop: every pair of options.

One run is built on two processes (the actor data-parallel, the critic in a pipeline); each row of a
pairwise-covering table then trains it for a step with its own algorithm, from the weights that the
rows before have left.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import warnings

import pytest
import reward_functions
import torch
import torch.distributed as dist
from ranks import start_ranks

from mppo import register
from mppo.recipe.presets import PAPERS, PRESETS
from mppo.recipe.sections.roles import ActorConfig

LONG = 200
NO_CRITIC = "algorithm.adv_estimator=rloo"
COMMON = [
    "model.path=builtin:tiny",
    "model.dtype=float32",
    "data.task=arithmetic",
    "data.train_size=64",
    "data.val_size=0",
    "reward.name=function",
    f"reward.function={reward_functions.__file__}:two_parts",
    "data.max_prompt_length=16",
    "data.max_response_length=4",
    "data.train_batch_size=2",
    "rollout.n=2",
    "actor.ppo_mini_batch_size=1",
    "actor.optim.lr=1e-3",
    "critic.megatron.pipeline_model_parallel_size=2",
    "trainer.val_before_train=false",
    "trainer.sample_table_rows=0",
]
ALONE = {
    "gdpo": ("none", "rollout_is=off"),
    "optimal_token_baseline": ("both full", "rollout_is=token"),
    "tir_optimal_token_baseline": ("reward k1", "bypass_mode=true"),
}
"""Estimators that are tried with one row each: the KL terms and the correction of it."""
FACTORS = {
    "algorithm.adv_estimator": tuple(n for n in register.estimator.own if n not in ALONE),
    "actor.policy_loss.loss_mode": register.policy_loss.own,
    "actor.loss_agg_mode": ActorConfig.model_fields["loss_agg_mode"].annotation.__args__,
    "kl": ("none", "reward k1", "reward k3", "loss k3", "loss k2+", "both abs", "both full"),
    "correction": (
        "rollout_is=off",
        "rollout_is=token",
        "rollout_is=sequence",
        "rollout_rs=token_k1",
        "rollout_rs=geometric",
        "rollout_token_veto_threshold=1e-4",
        "bypass_mode=true",
    ),
}


def pairwise(factors: dict[str, tuple[str, ...]], seed: int = 0) -> list[dict[str, str]]:
    """Rows that contain every pair of values of any two factors (found greedily, not minimal)."""
    names = list(factors)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in factors[a]
        for y in factors[b]
    }
    choose, rows = random.Random(seed), []
    while missing:
        (a, x), (b, y) = min(missing)
        best, best_covered = {}, set()
        for _ in range(30):
            row = {name: choose.choice(values) for name, values in factors.items()}
            row |= {a: x, b: y}
            covered = missing & set(itertools.combinations(row.items(), 2))
            if len(covered) > len(best_covered):
                best, best_covered = row, covered
        missing -= best_covered
        rows.append(best)
    return rows


def all_rows() -> list[dict[str, str]]:
    """The pairwise table, and the rows of ``ALONE``."""
    common = {"actor.policy_loss.loss_mode": "vanilla", "actor.loss_agg_mode": "token-mean"}
    alone = [
        {"algorithm.adv_estimator": name, **common, "kl": kl, "correction": correction}
        for name, (kl, correction) in ALONE.items()
    ]
    return [*alone, *pairwise(FACTORS)]


def overrides_of(row: dict[str, str]) -> list[str]:
    """The recipe settings of a row."""
    settings = [f"{name}={value}" for name, value in row.items() if "." in name]
    place, _, kind = row["kl"].partition(" ")
    settings.append(f"algorithm.use_kl_in_reward={str(place in ('reward', 'both')).lower()}")
    settings.append(f"actor.use_kl_loss={str(place in ('loss', 'both')).lower()}")
    if place != "none":
        settings += [f"algorithm.kl_penalty={kind}", f"actor.kl_loss_type={kind}"]
    correction = f"algorithm.rollout_correction.{row['correction']}"
    loss_mode = row["actor.policy_loss.loss_mode"]
    if row["algorithm.adv_estimator"] == "gdpo":
        settings.append("algorithm.gdpo_reward_keys=[sevenths,halves]")
    if loss_mode == "dro":
        settings.append("actor.policy_loss.dro_beta=0.1")
    if loss_mode in ("dis", "reinforce"):
        settings.append("algorithm.rollout_correction.bypass_mode=true")
    if loss_mode == "dis":
        # its ratio to the engine is the correction; rejections may be added
        correction = re.sub("rollout_is=.*", "rollout_is=off", correction)
    return [*settings, correction]


def _warm_up(run, critic) -> dict[str, object]:
    """A step with the actor frozen and the next one: which roles changed, and the metrics."""
    from mppo.recipe.load import load_recipe
    from mppo.trainer.loop import iterate

    def weights():
        named = (pair for bucket in run.roles.actor.weights.stream(1 << 20) for pair in bucket)
        return {name: tensor.clone() for name, tensor in named}

    last = 10**6
    run.recipe = run.roles.recipe = load_recipe(None, [*COMMON, f"trainer.critic_warmup={last}"])
    run.roles.critic, run.roles.ref = critic, None
    before = weights()
    frozen = iterate(run, last)
    between = weights()
    moving = iterate(run, last + 1)
    after = weights()
    return {
        "frozen": frozen,
        "moving": moving,
        "kept": all(torch.equal(before[name], between[name]) for name in before),
        "moved": any(not torch.equal(between[name], after[name]) for name in before),
    }


def _train_rows(rank: int, rows: list[dict[str, str]], out: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from mppo.parallel import device

    device.prepare_megatron()
    from mppo.parallel.launch import LaunchInfo
    from mppo.recipe.load import load_recipe
    from mppo.supervision.stop_request import listening
    from mppo.trainer.loop import iterate, sync_weights
    from mppo.trainer.run_setup import build_run

    dist.init_process_group("gloo", f"file://{out}/store", rank=rank, world_size=2)
    info = LaunchInfo(rank, 2, rank, 2, "127.0.0.1", 1, "python")
    full_kl = ["actor.use_kl_loss=true", "actor.kl_loss_type=full"]
    results = []
    with listening() as stop:

        def build(name, overrides):
            folder = f"trainer.default_local_dir={out}/{name}"
            return build_run(load_recipe(None, [*COMMON, *overrides, folder]), info, stop)

        run = build("run", full_kl)
        sync_weights(run, version=0)
        critic, ref = run.roles.critic, run.roles.ref
        for i, row in enumerate(rows):
            recipe = load_recipe(None, [*COMMON, *overrides_of(row)])
            run.recipe = run.roles.recipe = recipe
            run.roles.critic = critic if recipe.algorithm.uses_critic else None
            run.roles.ref = None if row["kl"] == "none" else ref
            results.append(iterate(run, i + 1))
        critic_only = _warm_up(run, critic)
        run.reporter.close()
        presets = {}
        for name in (*PRESETS, "no critic"):
            chosen = f"algorithm.preset={name}" if name in PRESETS else NO_CRITIC
            # with the actor trained from the first step on
            steps = [f"trainer.total_training_steps={LONG}", "trainer.critic_warmup=0"]
            other = build(name, [chosen, *steps])
            sync_weights(other, version=0)
            iterate(other, 1)
            presets[name] = iterate(other, 2)
            roles = {"critic": other.roles.critic, "ref": other.roles.ref}
            presets[name]["built"] = [role for role, built in roles.items() if built]
            other.reporter.close()
    if rank == 0:
        found = {"rows": results, "critic_only": critic_only, "presets": presets}
        with open(f"{out}/metrics.json", "w") as file:
            json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()


def test_the_table_holds_every_pair():
    rows = pairwise(FACTORS)
    for a, b in itertools.combinations(FACTORS, 2):
        found = {(row[a], row[b]) for row in rows}
        assert found == set(itertools.product(FACTORS[a], FACTORS[b]))


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("options")
    start_ranks(_train_rows, (all_rows(), str(out)), 2)
    return json.loads((out / "metrics.json").read_text())


@pytest.mark.distributed
def test_every_pair_of_options_trains_on_two_processes(found):
    rows, results = all_rows(), found["rows"]
    for row, metrics in zip(rows, results, strict=True):
        assert ("critic/vf_loss" in metrics) == (row["algorithm.adv_estimator"] == "gae")
        assert "actor/pg_loss" in metrics
        for name, value in metrics.items():
            assert math.isfinite(value), (name, row)


@pytest.mark.distributed
def test_the_actor_does_not_change_during_critic_warmup(found):
    outcome = found["critic_only"]
    assert outcome["kept"]
    assert outcome["moved"]
    assert "actor/pg_loss" not in outcome["frozen"]
    assert "actor/pg_loss" in outcome["moving"]
    assert all("critic/vf_loss" in outcome[name] for name in ("frozen", "moving"))


@pytest.mark.distributed
def test_every_preset_trains_with_its_systems_learning_rate(found):
    # of 1e-3, in the second of 200 steps: constant; one of 200 steps down; one of 100 steps up;
    # one of 6 (3% of 200) up
    expected = {
        "verl": 1e-3,
        "trl": 1e-3 * (1 - 1 / LONG),
        "deepspeed_chat": 1e-3 / 100,
        "openrlhf": 1e-3 / 6,
        **dict.fromkeys(PAPERS, 1e-3),
    }
    assert set(expected) == set(PRESETS)
    for name, rate in expected.items():
        metrics = found["presets"][name]
        assert metrics["actor/lr"] == metrics["lr"] == pytest.approx(rate), name
        built = metrics.pop("built")
        assert built == (["critic"] if name in ("verl", *PAPERS) else ["critic", "ref"]), name
        assert all(math.isfinite(value) for value in metrics.values()), name


@pytest.mark.distributed
def test_an_estimator_without_values_builds_no_critic(found):
    metrics = found["presets"]["no critic"]
    assert metrics["built"] == []
    assert "actor/pg_loss" in metrics
    assert "critic/vf_loss" not in metrics
