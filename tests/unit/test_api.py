"""The Python API: recipes, plans, callbacks and files of runs; ``test_api_runs.py`` trains."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from recipe_list import RECIPES

import mppo
from mppo.recipe.load import load_recipe, read_recipe
from mppo.safety.input_error import InputError
from mppo.trainer.start.user_parts import Callbacks, UserParts

ROOT = Path(__file__).parents[2]
TINY = {
    "model": {"path": "builtin:tiny", "dtype": "float32"},
    "data": {"task": "arithmetic", "max_prompt_length": 16, "max_response_length": 5},
}


def test_importing_mppo_imports_nothing_else():
    program = (
        "import sys, mppo; before = set(sys.modules); assert mppo.__version__\n"
        "print([name for name in sys.modules if name.startswith(('mppo.', 'torch', 'pydantic'))])\n"
        "mppo.load({'data': {'task': 'arithmetic'}}); print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.splitlines() == ["[]", "False"], result.stderr


def test_the_functions_stay_when_programs_of_their_names_are_imported():
    from mppo.plan import print_plan
    from mppo.train import main

    assert mppo.train.__module__ == mppo.plan.__module__ == "mppo.api"
    assert main.__module__ == "mppo.train"
    assert print_plan.__module__ == "mppo.plan"
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        mppo.trian  # noqa: B018
    assert {"load", "plan", "read_run", "register", "train"} <= set(dir(mppo))


def test_a_recipe_comes_from_a_file_or_a_mapping(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(TINY))
    of_file, of_mapping = mppo.load(file, "actor.optim.lr=5e-7"), mppo.load(TINY)
    assert of_file.actor.optim.lr == 5e-7
    assert of_file.file == file
    assert of_mapping.file is None
    assert of_mapping == load_recipe(TINY) == mppo.load(of_mapping)


def test_a_mapping_may_hold_what_programs_have(tmp_path):
    base = tmp_path / "base.yaml"
    base.write_text("actor: {optim: {lr: 2.0e-5, eps: 1.0e-9}}\n")
    given = {"base": str(base), "model": {"path": tmp_path}, "trainer": {"seed": np.int64(3)}}
    recipe = mppo.load(given | {"actor": {"optim": {"lr": np.float64(1e-4)}}})
    assert (recipe.model.path, recipe.trainer.seed) == (str(tmp_path), 3)
    assert (recipe.actor.optim.lr, recipe.actor.optim.eps) == (1e-4, 1e-9)
    assert given["base"] == str(base)
    with pytest.raises(mppo.ConfigError, match="gone"):
        mppo.load({"base": "gone.yaml"})


@pytest.mark.parametrize("settings", [["actor.optim.lr=1"], {"actor.optim.lr": 1}])
def test_an_override_is_a_text(settings):
    with pytest.raises(InputError, match=r"is not a text; write mppo\.load.* or \*settings"):
        mppo.load(TINY, settings)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_loaded_recipe_loads_again_to_itself(path):
    recipe, issues = read_recipe(path)
    remarks: list[str] = []
    assert read_recipe(recipe, (), remarks) == (recipe, issues)
    assert remarks == []


def test_issues_are_raised_and_name_the_file(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("actor: {ppo_epoch: 2}\nrollout: {n: 0}\n")
    with pytest.raises(mppo.ConfigError, match=r"recipe .*recipe\.yaml: 2 issues") as found:
        mppo.load(file)
    assert {issue.key for issue in found.value.issues} == {"actor.ppo_epoch", "rollout.n"}
    with pytest.raises(mppo.ConfigError, match="recipe: 1 issue"):
        mppo.load({"rollout": {"n": 0}})


def test_a_plan_is_what_the_program_prints(capsys):
    from mppo.plan import main

    path = ROOT / "recipes/qwen2_7b_gsm8k_math.yaml"
    plan = mppo.plan(mppo.load(path), gpu="h100-80gb")
    capsys.readouterr()
    assert main(["--config", str(path), "--gpu", "h100-80gb"]) == 0
    assert capsys.readouterr().out == f"{plan}\n"
    assert plan.fits
    assert plan.verdict in str(plan)
    assert {"actor", "critic", "engine", "contexts"} <= set(plan.memory["generation"])
    small = mppo.plan(mppo.load(path), gpu="8")
    assert not small.fits
    assert "does NOT fit" in small.verdict
    with pytest.raises(mppo.ConfigError, match="--gpu = 'h1000'"):
        mppo.plan(mppo.load(path), gpu="h1000")


class Recorder:
    def __init__(self):
        self.calls = []

    def on_step(self, step, metrics):
        metrics["mine"] = 1.0
        self.calls.append((step, sorted(metrics)))

    def on_end(self):
        raise KeyError("x")


def test_callbacks_are_called_in_order_with_metrics_of_their_own():
    first, second, metrics = Recorder(), Recorder(), {"a": 0.0}
    callbacks = Callbacks([first, second])
    callbacks.on_step(3, metrics)
    assert first.calls == second.calls == [(3, ["a", "mine"])]
    assert metrics == {"a": 0.0}
    with pytest.raises(InputError, match=r"on_end of the callback Recorder failed: KeyError: 'x' "
                       r"\(test_api\.py, line \d+\); correct it"):  # fmt: skip
        callbacks.on_end()


class Misspelt:
    def on_stepp(self, step, metrics):
        pass


class WrongParameters:
    def on_batch(self):
        pass


class Coroutine:
    async def on_end(self):
        pass


WRONG = [
    (Misspelt(), "Misspelt has on_stepp; did you mean on_step?"),
    (print, "print has no method of a callback; give it one of on_step, on_batch, on_end"),
    (WrongParameters(), "on_batch of the callback WrongParameters cannot be called"),
    (Coroutine(), "on_end of the callback Coroutine is a coroutine function"),
]


@pytest.mark.parametrize(
    ("callback", "message"), WRONG, ids=["name", "function", "parameters", "coroutine"]
)
def test_a_wrong_callback_is_refused_before_anything_is_imported(callback, message):
    with pytest.raises(InputError) as found:
        mppo.train(mppo.load(TINY), callbacks=[callback])
    assert message in str(found.value)


def test_parts_are_named_in_the_recipe():
    parts = UserParts(reward=lambda *_: 1.0, agent=Recorder)
    recipe = load_recipe(TINY, parts.overrides())
    where = "test_api:test_parts_are_named_in_the_recipe.<locals>.<lambda>"
    assert recipe.reward.function is not None
    assert recipe.reward.function.endswith(where)
    assert recipe.rollout.agent is not None
    assert recipe.rollout.agent.path.endswith("test_api:Recorder")
    assert UserParts().overrides() == []


def test_a_folder_without_files_reads_as_an_empty_run(tmp_path):
    run = mppo.read_run(tmp_path)
    assert (run.metrics, run.samples, run.events, run.status, run.dumps) == ([], [], [], None, {})
    with pytest.raises(InputError, match="step 3 is not dumped; dumped steps: none"):
        run.dump(3)
    (tmp_path / "samples.jsonl").write_text('{"step": 1}\n{"st\n')
    with pytest.raises(InputError, match=r"samples\.jsonl: a line is not JSON"):
        mppo.read_run(tmp_path).samples  # noqa: B018
    with pytest.raises(InputError, match="there is no such run folder"):
        mppo.read_run(tmp_path / "nowhere")
    with pytest.raises(InputError, match="is not a run folder"):
        mppo.read_run(tmp_path.parent)


def test_metrics_become_a_data_frame_if_pandas_is_there(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 2.0}\n{"step": 2, "a": null}\n')
    run = mppo.read_run(tmp_path)
    assert run.metrics[0] == {"step": 1, "a": 2.0}
    if find_spec("pandas") is None:
        with pytest.raises(InputError, match="pip install pandas"):
            run.frame()
    else:
        assert list(run.frame()["step"]) == [1, 2]
