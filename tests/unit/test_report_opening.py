"""The first lines of a run."""

from __future__ import annotations

from mppo.parallel.launch import LaunchInfo
from mppo.recipe.load import load_recipe
from mppo.report.opening import opening_lines


def test_the_first_lines_describe_the_run(tmp_path):
    recipe = load_recipe(
        None,
        [
            "data.train_files=[a.jsonl, b.jsonl]", "critic.path=builtin:tiny-llama",
            "actor.megatron.tensor_model_parallel_size=2",
            "critic.megatron.pipeline_model_parallel_size=2",
            "rollout.name=sglang", "rollout.mode=disaggregated",
            "rollout.urls=['http://me:hidden@host:30000']", "trainer.experiment_name=first",
            f"trainer.default_local_dir={tmp_path}",
        ],
    )  # fmt: skip
    info = LaunchInfo(0, 4, 0, 2, "127.0.0.1", 1, "torchrun")
    lines = dict(line.split(": ", 1) for line in opening_lines(recipe, info))
    assert lines.pop("device").endswith("; 4 ranks, 2 on this node, by torchrun")
    assert next(iter(lines)).startswith("mppo ")
    assert lines.pop(next(iter(lines))) == "PPO with gae, mppo/first"
    assert lines == {
        "model": "builtin:tiny, builtin:tiny-llama in bfloat16",
        "layout": "actor TP2 x DP2, critic PP2 x DP2",
        "engine": "sglang, TP1, http://***@host:30000",
        "data": "a.jsonl, b.jsonl; validation: none",
        "run folder": str(tmp_path),
    }
