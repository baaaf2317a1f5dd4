"""Bad values of the keys of initial weights: each gives one clear message and exit code 2."""

import pytest
from bad_recipe import GOOD, assert_one_fault, refusal, write_files

from mppo.hub.builtin import resolve_model

SETTINGS = [
    ("critic.value_head_init=zero", "critic.value_head_init",
     "choose one of: initializer_range, inverse_hidden"),
    ("critic.value_head_init=-0.1", "critic.value_head_init", "give a value >= 0"),
    ("critic.value_head_init=.inf", "critic.value_head_init", "finite"),
    ("critic.path=builtin:tiny-reward critic.value_head_init=0", "critic.value_head_init",
     "has no effect: the critic's model has a value head"),
    ("critic.path={rewarding} critic.value_head_init=0.02", "critic.value_head_init",
     "has no effect: the critic's model has a value head"),
    ("trainer.seed=-1", "trainer.seed", "give a value >= 0"),
    ("trainer.seed=4294967296", "trainer.seed", "give a value < 4294967296"),
]  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    places = write_files(tmp_path_factory.mktemp("places"))
    return places | {"rewarding": resolve_model("builtin:tiny-reward")}


@pytest.mark.parametrize(("settings", "key", "expected"), SETTINGS)
def test_a_bad_initial_weight_is_one_issue(settings, key, expected, tmp_path, capsys, places):
    message = refusal(tmp_path, capsys, GOOD, settings.format(**places))
    assert_one_fault(message, key, expected)
