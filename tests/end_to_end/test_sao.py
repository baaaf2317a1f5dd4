"""SAO's recipe on two ranks: the critic first, then both, without a pass of the actor before it."""

from __future__ import annotations

import pytest
from recipe_run import run_recipe, smaller

SHORT = [*smaller(4), "trainer.warm_start_steps=0", "trainer.critic_warmup=1"]


@pytest.mark.distributed
def test_the_policy_learns_from_the_engines_log_probabilities_alone(tmp_path):
    rows = run_recipe("tiny_cpu_sao.yaml", tmp_path, *SHORT)
    assert [row["training/global_step"] for row in rows] == [2, 3, 4], "the first is the critic's"
    for row in rows:
        assert "timing_s/old_log_prob" not in row
        masked = row["actor/masked_below"] + row["actor/masked_above"]
        assert row["actor/pg_clipfrac"] == pytest.approx(masked)
        first, last = row["critic/vf_loss_first"], row["critic/vf_loss_last"]
        assert (first + last) / 2 == pytest.approx(row["critic/vf_loss"]), "two epochs"
        assert last != first, "the critic has taken a step between them"
        varied = row["critic/score/max"] > row["critic/score/min"]
        assert ("critic/vf_explained_var" in row) == varied, "undefined if all returns are equal"
        assert "rollout_corr/kl" not in row, "nobody computed the actor's own"
