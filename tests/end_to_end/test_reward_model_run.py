"""Runs with a reward model: it is learned from, in four layouts, beside other scores."""

from __future__ import annotations

import json

import pytest
import reward_functions
from recipe_run import run_recipe, smaller

from mppo.hub.builtin import load_tokenizer, resolve_model

RECIPE = "tiny_cpu_reward_model.yaml"
FUNCTION = ["reward.name=function", f"reward.function={reward_functions.__file__}:vowels"]
TEMPLATE = "{% for m in messages %}\n\n{{ m['role'] }}: {{ m['content'] }}{% endfor %}"


def dialogues(path):
    """Rows in the schema of verl's full_hh_rlhf."""
    words = ("please", "what is it", "why", "tell me", "how far", "and then", "who", "where")
    rows = [
        {
            "data_source": "Dahoas/full-hh-rlhf",
            "prompt": [{"role": "user", "content": word}],
            "ability": "alignment",
            "reward_model": {"style": "model", "ground_truth": "because"},
            "extra_info": {"split": "train", "index": index},
        }
        for index, word in enumerate(words)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.distributed
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_four_models_in_four_layouts_learn_the_preference(seed, tmp_path):
    rows = run_recipe(
        RECIPE, tmp_path, *FUNCTION, "reward.weight=0", f"trainer.seed={seed}",
        "data.train_batch_size=64", "actor.ppo_mini_batch_size=16", "actor.optim.lr=1.5e-3",
        "trainer.total_training_steps=6", "trainer.warm_start_steps=0",
        "trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.sample_table_rows=0",
    )  # fmt: skip
    true = [row["reward/reverse/rule_score/mean"] for row in rows]
    assert sum(true[-2:]) > 1.5 * sum(true[:2])
    # in standard deviations of the first batch, on which the scale is measured
    model = [row["critic/score/mean"] for row in rows]
    assert abs(model[0]) < 1e-5
    assert sum(model[-2:]) / 2 > 0.15


@pytest.mark.distributed
def test_dialogues_are_scored_in_the_reward_models_own_template(tmp_path):
    rows, other = dialogues(tmp_path / "rows.jsonl"), tmp_path / "tokenizer"
    tokenizer = load_tokenizer(resolve_model("builtin:tiny-reward"))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(other)
    found = run_recipe(
        RECIPE, tmp_path / "run", *smaller(2), *FUNCTION,
        "data.task=null", f"data.train_files=[{rows}]", f"data.val_files=[{rows}]",
        "trainer.warm_start_steps=0", "trainer.save_freq=1", "rollout.n=2",
        "algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=2",
        f"reward_model.tokenizer_path={other}", "reward_model.weight=2", "reward.weight=0.5",
        "reward_model.megatron.context_parallel_size=1",
        "reward_model.megatron.pipeline_model_parallel_size=2",
    )  # fmt: skip
    assert len(found) == 2
    state = json.loads((tmp_path / "run/checkpoints/global_step_1/run.json").read_text())
    scale = state["parts"]["roles"]["reward_scale"]
    assert scale["std"] > 0
    validation = json.loads((tmp_path / "run/metrics.jsonl").read_text().partition("\n")[0])
    source = "val-aux/Dahoas/full-hh-rlhf"
    model, rule = (validation[f"{source}/{name}_score/mean"] for name in ("rm", "rule"))
    expected = 2 * (model - scale["mean"]) / scale["std"] + 0.5 * rule
    assert validation["val/reward"] == pytest.approx(expected, abs=1e-4)
    assert validation[f"{source}/length/mean"] > 0
