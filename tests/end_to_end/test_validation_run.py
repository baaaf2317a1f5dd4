"""Validation in a run and by ``mppo.evaluate``: the same numbers and responses."""

from __future__ import annotations

import json

import pytest
import reward_functions
from metrics_by_hand import validation_by_hand
from recipe_run import evaluate_recipe, run_recipe, smaller

RECIPE = "tiny_cpu_reward_model.yaml"
SETTINGS = [
    *smaller(1), "trainer.warm_start_steps=0", "trainer.test_freq=1",
    "reward.name=function", f"reward.function={reward_functions.__file__}:first_vowel",
    "reward.weight=0.5",
    "reward_model.normalize={mode: given, mean: 0.1, std: 2}",
    "rollout.val_kwargs.n=4", "data.val_batch_size=3",
]  # fmt: skip


@pytest.mark.distributed
def test_a_run_and_an_evaluation_with_a_reward_model_report_the_same_numbers(tmp_path):
    run, written = tmp_path / "run", tmp_path / "validation"
    folder = f"trainer.validation_data_dir={written}"
    run_recipe(RECIPE, run, *SETTINGS, folder, "trainer.export_hf=true")
    logged = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    assert [row["step"] for row in logged] == [0, 1]
    for row, model in zip(logged, ("builtin:tiny", str(run / "actor"))):
        out, samples = tmp_path / "out" / "scores.json", tmp_path / "out" / "samples.jsonl"
        files = ["--out", str(out), "--samples", str(samples)]
        evaluate_recipe(RECIPE, *files, f"model.path={model}", *SETTINGS)
        scores = json.loads(out.read_text())
        assert (scores.pop("prompts"), scores.pop("prompts/reverse")) == (4, 4)
        assert scores == {name: row[name] for name in scores}
        core, extra = "val-core/reverse", "val-aux/reverse"
        names = {
            f"{core}/reward/mean@4", f"{core}/acc/mean", f"{core}/acc/pass@4", f"{core}/acc/maj@4",
            f"{extra}/acc/pass@1", f"{extra}/acc/maj@2", f"{extra}/rm_score/mean",
            f"{extra}/rule_score/mean", "val/reward", "val/response_length/mean",
        }  # fmt: skip
        assert names <= scores.keys()
        lines = [json.loads(line) for line in samples.open()]
        assert scores == pytest.approx(validation_by_hand(lines, "reverse", 4), abs=1e-6)
        assert (written / f"{row['step']}.jsonl").read_text() == samples.read_text()
        assert len(lines) == 16
        assert scores[f"{extra}/acc/pass@1"] == sum(line["right"] for line in lines) / 16
        for line in lines:
            assert line["answer"] == line["response"][:2].strip()
            model_score = (line["numbers"]["rm_score"] - 0.1) / 2
            expected = model_score + 0.5 * line["numbers"]["rule_score"]
            assert line["score"] == pytest.approx(expected, abs=1e-5)
