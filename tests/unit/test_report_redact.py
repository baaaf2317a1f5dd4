"""Secrets stay out of what a run writes."""

import pytest

from mppo.config.schema import Recipe, RewardConfig, RolloutConfig, TrainerConfig
from mppo.report.redact import redact
from mppo.report.reporter import Reporter


@pytest.mark.parametrize(
    ("value", "hidden"),
    [
        ({"api_key": "sesame"}, {"api_key": "***"}),
        ({"API-KEY": "sesame"}, {"API-KEY": "***"}),
        ({"nested": [{"hub_token": "sesame"}]}, {"nested": [{"hub_token": "***"}]}),
        ({"password": "", "secret": None}, {"password": "", "secret": None}),
        ("http://me:sesame@host:1/x", "http://***@host:1/x"),
        ("http://host/x?token=sesame&step=2", "http://host/x?token=***&step=2"),
        (["--api-key", "sesame", "--tp", "2"], ["--api-key", "***", "--tp", "2"]),
        (["--api-key=sesame"], ["--api-key=***"]),
        ("serve --admin-api-key sesame --tp 2", "serve --admin-api-key *** --tp 2"),
        ("Authorization: Bearer sesame1234", "Authorization: Bearer ***"),
    ],
)
def test_secrets_are_hidden(value, hidden):
    assert redact(value) == hidden


@pytest.mark.parametrize(
    "value",
    [
        Recipe().model_dump(mode="json"),
        {"prompt_key": "prompt", "stop_token_ids": [1], "api_key_env": "MY_KEY"},
        {"loss_agg_mode": "token-mean", "rollout_is": "token", "tokenizer_path": "/a/b"},
        "the token limit was reached; see http://host/a@b",
    ],
)
def test_what_is_no_secret_stays(value):
    assert redact(value) == value


def test_secrets_of_the_environment_are_found_anywhere(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    assert redact({"note": "key 0123456789abcdef here"}) == {"note": "key *** here"}


def test_no_file_of_a_run_holds_a_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_sesame_environment")
    recipe = Recipe(
        rollout=RolloutConfig(server_args={"api_key": "sesame"}),
        reward=RewardConfig(
            url="http://me:sesame@host/x", kwargs={"note": "hf_sesame_environment"}
        ),
    )
    dump = recipe.model_dump(mode="json")
    reporter = Reporter(tmp_path, TrainerConfig(), dump, total_steps=1, is_main=True)
    reporter.start(0)
    reporter.log(1, {"critic/score/mean": 1.0})
    reporter.close()
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) >= 4
    assert not [path for path in written if b"sesame" in path.read_bytes()]
