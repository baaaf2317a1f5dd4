"""Registries and plugins: what a file of one's own adds, and how its faults are told."""

from __future__ import annotations

import os

import pytest
import torch
from bad_recipe import GOOD, assert_one_fault, refusal

from mppo import register
from mppo.recipe.errors import ConfigError
from mppo.recipe.load import load_recipe
from mppo.recipe.sections.algorithm import TOKEN_BASELINES
from mppo.register import REGISTRIES, RegistrationError, Registry
from mppo.safety.input_error import InputError

PLUGIN = """
import mppo

@mppo.register.estimator("halved")
def halved(scores_B, group_B, length_B, options):
    return scores_B / 2

@mppo.register.policy_loss("nothing")
def nothing(inputs):
    return inputs.absent

@mppo.register.verifier("polite")
def polite(response, ground_truth, extra):
    return float("please" in response)

@mppo.register.metric("reward/largest")
def largest(data):
    return data.scored.scores_B.max()
"""


@pytest.fixture
def plugin(tmp_path):
    path = tmp_path / "my_plugin.py"
    path.write_text(PLUGIN)
    yield path
    for registry in REGISTRIES:
        registry.drop(os.path.realpath(path))


def test_every_name_of_ours_has_its_function():
    import mppo.rewards.rules
    import mppo.trainer.advantages
    import mppo.trainer.metrics
    import mppo.trainer.update.objectives  # noqa: F401

    of_tokens = {"gae", "reinforce_plus_plus", "remax", "gdpo", *TOKEN_BASELINES}
    assert register.estimator.keys() == set(register.estimator.own) - of_tokens
    assert register.policy_loss.keys() == set(register.policy_loss.own)
    assert {*register.verifier, "code"} == set(register.verifier.own)
    assert tuple(register.metric) == register.metric.own


def test_names_of_a_plugin_are_valid_in_its_recipe(plugin):
    import torch

    keys = [f"trainer.plugins=[{plugin}]", "algorithm.adv_estimator=halved", "rollout.n=2",
            "actor.policy_loss.loss_mode=nothing", "reward.verifier=polite"]  # fmt: skip
    recipe = load_recipe(None, keys)
    assert load_recipe(recipe) == recipe
    assert recipe.trainer.plugins == (str(plugin),)
    scores_B = torch.tensor([1.0, 3.0])
    assert torch.equal(register.estimator["halved"](scores_B, None, None, None), scores_B / 2)
    assert register.verifier["polite"]("please", "", {}) == 1.0
    plugin.write_text(PLUGIN.replace('"halved"', '"quartered"').replace("/ 2", "/ 4"))
    with pytest.raises(ConfigError, match=r"adv_estimator = 'halved'(.|\n)*reinforce"):
        load_recipe(None, keys)
    assert "quartered" in register.estimator.names


def test_a_misspelt_name_finds_that_of_a_plugin(plugin):
    keys = [f"trainer.plugins={plugin}", "algorithm.adv_estimator=halvd"]
    with pytest.raises(ConfigError, match="did you mean halved"):
        load_recipe(None, keys)


FAULTS = [
    (None, "no such file"),
    ("def f(:\n", "executing it failed: SyntaxError: "),
    ("import no_such_module\n", "executing it failed: ModuleNotFoundError: No module named "
     "'no_such_module' (my_plugin.py, line 1)"),
    ("raise SystemExit(0)\n", "executing it failed: SystemExit: 0 (my_plugin.py, line 1)"),
    ("def f(x): return x\n", "it registers nothing fix: decorate its functions with @mppo."),
    ("import mppo\n@mppo.register.estimator('grpo')\ndef f(a, b, c, d): pass\n",
     "a second advantage estimator of the name 'grpo': mppo has one fix: give it another name"),
    ("import mppo\n@mppo.register.verifier('v')\ndef f(a, b, c): pass\n"
     "@mppo.register.verifier('v')\ndef g(a, b, c): pass\n", "a second verifier of the name 'v': "),
    ("import mppo\n@mppo.register.metric('m')\ndef f(a, b): pass\n", "the parameters of the metric "
     "'m' do not fit: missing a required argument: 'b' fix: accept (data)"),
    ("import mppo\nmppo.register.family('f', like='llamma')(lambda hf_config, shape: None)\n",
     "the model family 'f' is like 'llamma', which mppo does not have fix: name one of llama, "),
    ("import mppo\nmppo.register.family('f', name={})(lambda hf_config, shape: None)\n",
     "'name'"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), FAULTS, ids=[
    "absent", "syntax", "import", "exit", "nothing", "ours", "twice", "parameters", "like",
    "trait"])  # fmt: skip
def test_a_faulty_plugin_is_refused_by_every_program(text, expected, plugin, tmp_path, capsys):
    plugin.unlink()
    if text is not None:
        plugin.write_text(text)
    message = refusal(tmp_path, capsys, GOOD, f"trainer.plugins=[{plugin}]")
    assert_one_fault(message, "trainer.plugins", expected)


def test_exceptions_of_added_functions_are_the_users_faults():
    mine: Registry = Registry("metric", (), ("data",))

    @mine("first")
    def divide(data):
        return 1 / data

    assert mine["first"](2) == 0.5
    with pytest.raises(InputError, match=r"the metric 'first' failed: ZeroDivisionError: division "
                       r"by zero \(test_plugins\.py, line \d+\); correct it"):  # fmt: skip
        mine["first"](0)
    mine("first")(divide)  # a cell that is executed again

    def other(data):
        return data

    with pytest.raises(RegistrationError, match=r"a second metric of the name 'first'"):
        mine("first")(other)

    @mine("full")
    def full(data):
        raise MemoryError("of the machine")

    with pytest.raises(MemoryError):
        mine["full"](0)


class Callable:
    async def later(self, data):
        return 1.0


def test_what_is_no_function_or_has_no_name_is_not_registered():
    with pytest.raises(RegistrationError, match="is no name of a metric; write"):
        register.metric(print)  # type: ignore[arg-type]
    for wrong in (5, Callable().later, dict):
        with pytest.raises(RegistrationError, match="the metric 'mine'"):
            register.metric("mine")(wrong)  # type: ignore[arg-type]
    assert "mine" not in register.metric.names


def test_a_metric_replaces_none_of_ours():
    from mppo.trainer.metrics import plugin_number

    assert plugin_number("mine", torch.tensor(2.0), {"critic/score/mean": 1.0}) == 2.0
    with pytest.raises(
        InputError, match=r"mppo, too, has the metric 'critic/score/mean'; register"
    ):
        plugin_number("critic/score/mean", 7.0, {"critic/score/mean": 1.0})
