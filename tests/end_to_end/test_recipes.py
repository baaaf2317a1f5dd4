"""The small recipes run as shipped, some with fewer and smaller steps."""

from __future__ import annotations

import pytest
from recipe_run import run_recipe, smaller


@pytest.fixture(scope="module")
def moonlight(tmp_path_factory) -> list[dict]:
    run_dir = tmp_path_factory.mktemp("moonlight")
    started = ("trainer.warm_start_steps=2", "trainer.warm_start_batch_size=8")
    return run_recipe("tiny_cpu_moonlight.yaml", run_dir, *smaller(2), *started)


@pytest.mark.distributed
def test_moonlight_trains_from_its_recipe(moonlight) -> None:
    assert len(moonlight) == 2
    for row in moonlight:
        assert row["training/rollout_logprob_diff_max"] < 1e-4
        assert row["actor/grad_norm"] > 0
        assert row["critic/grad_norm"] > 0
        assert "actor/moe/replay_differing" in row  # the recipe asks for R2
        assert "critic/moe/replay_differing" not in row  # and not for the critic
        for role in ("actor", "critic"):
            layers = {key.split("/")[2] for key in row if key.startswith(f"{role}/moe/layer_")}
            assert layers == {"layer_1", "layer_2", "layer_3"}  # the first is dense
    first, second = moonlight
    assert abs(first["actor/reward_kl_penalty"]) < 1e-6  # reference and actor are one model
    assert second["actor/reward_kl_penalty"] != first["actor/reward_kl_penalty"]


@pytest.mark.distributed
def test_three_layouts_train_on_four_ranks(tmp_path) -> None:
    steps = run_recipe("tiny_cpu_tp2_pp2.yaml", tmp_path, world=4)
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(row["training/rollout_logprob_diff_max"] < 1e-4 for row in steps)
    assert abs(steps[0]["objective/kl"]) < 1e-6  # actor and reference are one model, laid out apart
    assert steps[1]["objective/kl"] != 0


@pytest.mark.distributed
def test_critic_and_reference_start_from_embedded_models_of_their_own(tmp_path) -> None:
    plain = "{expert_model_parallel_size: 1}"
    overrides = [
        *("critic.path=builtin:tiny", f"critic.megatron={plain}"),
        *("ref.path=builtin:tiny", f"ref.megatron={plain}"),
        "trainer.warm_start_steps=0",
    ]
    (row,) = run_recipe("tiny_cpu_moonlight.yaml", tmp_path, *smaller(1), *overrides)
    assert row["critic/grad_norm"] > 0
    assert abs(row["actor/reward_kl_penalty"]) > 1e-6  # reference and actor are two models
