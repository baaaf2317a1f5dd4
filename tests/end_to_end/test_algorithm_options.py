"""Estimators, losses, aggregations, KL terms and corrections in the loop: every pair of options.

One run is built on two processes (the actor data-parallel, the critic in a pipeline); each row of a
pairwise-covering table then trains it for three steps with its own algorithm.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mppo.config.algorithm import AlgorithmConfig
from mppo.config.schema import ActorConfig, PolicyLossConfig

STEPS = 3
COMMON = [
    "model.path=builtin:tiny",
    "model.dtype=float32",
    "data.task=arithmetic",
    "data.train_size=64",
    "data.val_size=0",
    "reward.name=function",
    f"reward.function={__file__}:score",
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
FACTORS = {
    "algorithm.adv_estimator": AlgorithmConfig.model_fields["adv_estimator"].annotation.__args__,
    "actor.policy_loss.loss_mode": PolicyLossConfig.model_fields["loss_mode"].annotation.__args__,
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


def score(data_source, solution_str, ground_truth, extra_info):
    """A reward that differs between random responses."""
    return sum(map(ord, solution_str)) % 7 / 7


def pairwise(factors: dict[str, tuple[str, ...]], seed: int = 0) -> list[dict[str, str]]:
    """Rows that together hold every pair of values of any two factors (greedy, not minimal)."""
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


def overrides_of(row: dict[str, str]) -> list[str]:
    """A row as recipe settings."""
    settings = [f"{name}={value}" for name, value in row.items() if "." in name]
    place, _, kind = row["kl"].partition(" ")
    settings.append(f"algorithm.use_kl_in_reward={str(place in ('reward', 'both')).lower()}")
    settings.append(f"actor.use_kl_loss={str(place in ('loss', 'both')).lower()}")
    if place != "none":
        settings += [f"algorithm.kl_penalty={kind}", f"actor.kl_loss_type={kind}"]
    return [*settings, f"algorithm.rollout_correction.{row['correction']}"]


def _train_rows(rank: int, rows: list[dict[str, str]], out: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from mppo.parallel import device

    device.prepare_megatron()
    from mppo.config.load import load_recipe
    from mppo.loop import iterate, sync
    from mppo.parallel.launch import LaunchInfo
    from mppo.parallel.signals import listening
    from mppo.train import build_run

    dist.init_process_group("gloo", f"file://{out}/store", rank=rank, world_size=2)
    info = LaunchInfo(rank, 2, rank, 2, "127.0.0.1", 1, "python")
    full_kl = ["actor.use_kl_loss=true", "actor.kl_loss_type=full"]
    everything = [*COMMON, *full_kl, f"trainer.default_local_dir={out}/run"]
    results = []
    with listening() as stop:
        run = build_run(load_recipe(None, everything), info, stop)
        sync(run, version=0)
        critic, ref = run.roles.critic, run.roles.ref
        for i, row in enumerate(rows):
            recipe = load_recipe(None, [*COMMON, *overrides_of(row)])
            run.recipe = run.roles.recipe = recipe
            run.roles.critic = critic if recipe.algorithm.uses_critic else None
            run.roles.ref = None if row["kl"] == "none" else ref
            for step in range(1, STEPS + 1):
                results.append(iterate(run, 1000 * (i + 1) + step))
    run.reporter.close()
    if rank == 0:
        with open(f"{out}/metrics.json", "w") as file:
            json.dump(results, file)
    dist.barrier()
    dist.destroy_process_group()


def test_the_table_holds_every_pair():
    rows = pairwise(FACTORS)
    for a, b in itertools.combinations(FACTORS, 2):
        found = {(row[a], row[b]) for row in rows}
        assert found == set(itertools.product(FACTORS[a], FACTORS[b]))


@pytest.mark.distributed
def test_every_pair_of_options_trains_three_steps_on_two_processes(tmp_path):
    rows = pairwise(FACTORS)
    mp.spawn(_train_rows, (rows, str(tmp_path)), nprocs=2)
    results = json.loads((tmp_path / "metrics.json").read_text())
    assert len(results) == STEPS * len(rows)
    for index, metrics in enumerate(results):
        row = rows[index // STEPS]
        assert ("critic/vf_loss" in metrics) == (row["algorithm.adv_estimator"] == "gae")
        assert "actor/pg_loss" in metrics
        for name, value in metrics.items():
            assert math.isfinite(value), (name, row)
