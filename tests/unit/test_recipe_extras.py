"""Without a package of ``extras/``, what needs it is refused with the command that installs it."""

from __future__ import annotations

import pytest

from mppo.batch.prompt import Prompt
from mppo.recipe import extras
from mppo.recipe.errors import ConfigError
from mppo.rewards.rules import RuleReward
from mppo.train import main

SHORT = ["model.path=builtin:tiny", "data.max_prompt_length=64", "data.max_response_length=64"]
CODE = [*SHORT, "data.task=arithmetic", "reward.verifier=code"]
SOURCES = [*SHORT, "data.sources=[{task: reverse, verifier: code}]"]


@pytest.fixture
def _none_installed(monkeypatch):
    monkeypatch.setattr(extras, "entry_points", lambda **_: ())


@pytest.mark.usefixtures("_none_installed")
@pytest.mark.parametrize(
    ("arguments", "key", "command"),
    [
        (CODE, "reward.verifier = 'code'", "pip install ./extras/sandbox"),
        (SOURCES, "data.sources.0.verifier = 'code'", "pip install ./extras/sandbox"),
        (
            ["--dry-run", "--simulate", *SHORT, "data.task=arithmetic"],
            "--simulate = True",
            "pip install ./extras/simulate",
        ),
    ],
)
def test_a_missing_package_is_an_error_before_anything_else(arguments, key, command, capsys):
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert key in shown.err
    assert f"fix: {command}\n" in shown.err
    assert shown.out == "", "no plan, no run"


@pytest.mark.usefixtures("_none_installed")
def test_a_dry_run_needs_no_sandbox(capsys):
    """The machine of the plan is not the one of the run."""
    assert main(["--dry-run", *CODE]) == 0


@pytest.mark.usefixtures("_none_installed")
def test_prompts_that_need_the_sandbox_are_refused_before_the_first_rollout():
    prompt = Prompt(0, (1,), "taco", '["assert True"]', "p")
    with pytest.raises(ConfigError, match=r"pip install \./extras/sandbox"):
        RuleReward().check([prompt])


@pytest.mark.usefixtures("_none_installed")
def test_a_server_for_programs_replaces_the_sandbox():
    reward = RuleReward("code", programs=lambda responses: [1.0] * len(responses))
    reward.check([Prompt(0, (1,), "taco", '["assert True"]', "p")])
