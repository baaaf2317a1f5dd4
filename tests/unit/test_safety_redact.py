"""Secrets do not appear in what a run writes."""

import os
import sys

import pytest

from mppo.recipe.errors import ConfigError, ConfigIssue
from mppo.recipe.schema import Recipe
from mppo.recipe.sections.reward import RewardConfig
from mppo.recipe.sections.rollout import RolloutConfig
from mppo.recipe.sections.trainer import TrainerConfig
from mppo.report.reporter import Reporter
from mppo.safety.redact import HIDDEN, is_secret_name, redact, redact_text, redacted_output


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
        ("Authorization: Bearer sesame1234", "Authorization: ***"),
        ("{'Authorization': 'Token sesame', 'n': 1}", "{'Authorization': '***', 'n': 1}"),
        ("http://me:ses@me@host/x", "http://***@host/x"),
        ("http://me:ses/@me@host/x?a=1", "http://***@host/x?a=1"),
        ("http://host/x?key=sesame&b=2", "http://host/x?key=***&b=2"),
        ("http://host/x?b=2&sig=sesame", "http://host/x?b=2&sig=***"),
        ("http://host/x?X-Amz-Signature=sesame", "http://host/x?X-Amz-Signature=***"),
        ({"auth": {"user": "sesame", "port": 1}}, {"auth": {"user": "***", "port": "***"}}),
        ({"passwords": ["sesame", 12345]}, {"passwords": ["***", "***"]}),
        ({"hubToken": "sesame"}, {"hubToken": "***"}),
        ({"hf_abcdefghij0123456789": 1}, {"***": 1}),
        ("x sk-proj-abcdefghij0123456789 y", "x *** y"),
        ("(ghp_abcdefghij0123456789)", "(***)"),
        ("AKIAIOSFODNN7EXAMPLE", "***"),
        ("eyJhbGciOiJIUzI1.eyJzdWIiOiIx.SflKxwRJSM", "***"),
        ("a\n-----BEGIN PRIVATE KEY-----\nx\n-----END PRIVATE KEY-----\nb", "a\n***\nb"),
        ('{"api_key": "sesame", "n": 3}', '{"api_key": "***", "n": 3}'),
        ("unrecognized arguments: --api-key=sesame", "unrecognized arguments: --api-key=***"),
        ("token: sesame12", "token: ***"),
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
        "http://host:8000/a@b",
        "bytes per token: 123; pad_token: <pad>; the token: it is unknown",
        {"eos_token": "</s>", "special_token": "<x>", "max_token": 3},
        "task-force-of-twenty-one-people export_hf_checkpoint_weights",
    ],
)
def test_what_is_no_secret_stays(value):
    assert redact(value) == value


@pytest.mark.parametrize(
    "name", ["WANDB_API_KEY", "GITLAB_PAT", "AWS_ACCESS_KEY_ID", "HUB_TOKEN", "MY_REWARD_KEY"]
)
def test_secrets_of_the_environment_are_found_anywhere(monkeypatch, name):
    monkeypatch.setenv(name, "0123/56789 abcdef")
    found = redact({"note": ["key 0123/56789 abcdef here"], "0123/56789 abcdef": 1})
    assert found == {"note": ["key *** here"], "***": 1}
    assert redact("http://h/?q=0123%2F56789%20abcdef") == "http://h/?q=***"


@pytest.mark.parametrize("name", ["PWD", "OLDPWD"])
def test_the_folders_of_a_shell_are_no_secrets(monkeypatch, name):
    monkeypatch.setenv(name, "/home/me/project")
    text = "cannot read /home/me/project/recipe.yaml"
    assert redact(text) == text


@pytest.mark.parametrize(
    ("begin", "piece", "end"),
    [
        *(("", piece, "") for piece in ("a", "a-", "=a", "://a@", "'a':", "token:", "api_key:")),
        *(("", piece, "") for piece in ("?a=", ".", "eyJ", "-eyJ", "-eyJa.eyJ", "-----BEGIN ")),
        ("://:", "]", "...a"),
        ("://:", "1]", "@a"),
        ("?", ".x-amz-a", "%20=1"),
        ("?", "-x-oss-", "%0A=1"),
        ("", "cookie", ":"),
        ("cookie:", " ", "''"),
        ("authorization", "\t", ""),
        ("bearer", " ", "x"),
        ("--a", " ", "-"),
        ("token", " ", "x"),
        ("token: ", "a-", ""),
        ("-----BEGIN ", "A ", "-"),
        ("-----BEGIN PRIVATE KEY-----", "-----END A", ""),
        ("", "sk-a.", ""),
        ("a", "_token", "_"),
        ("", "aB", ""),
    ],
)
def test_a_long_text_is_searched_in_time_proportional_to_its_length(begin, piece, end):
    """A search in quadratic time would take hours for these texts of a megabyte."""
    text = begin + piece * (1_000_000 // len(piece)) + end
    redact({text: is_secret_name(text)})


@pytest.mark.parametrize("before", ["", "x.", "eyJ.", "eyJabc.", "-eyJ-", "a.eyJaaaaaaaaaaaaa.b "])
def test_a_web_token_is_found_after_what_resembles_one(before):
    token = "eyJhbGciOiJIUzI1.eyJzdWIiOiIx.SflKxwRJSM"
    hidden = redact_text(before + token)
    assert hidden.endswith(HIDDEN)
    assert not [part for part in ("SflKxwRJSM", "sdWIi") if part in hidden]


def test_aliases_and_loops_end():
    loop = ["x"]
    loop.append(loop)
    shared = ["sk-abcdefghij0123456789"]
    for _ in range(100):
        shared = [shared, shared]
    assert redact(loop) == ["x", HIDDEN]
    hidden = redact(shared)
    for _ in range(100):
        hidden = hidden[1]
    assert hidden == [HIDDEN]


def test_the_environment_is_read_once_for_all_texts_of_a_recipe(monkeypatch):
    class Counted(dict):
        reads = 0

        def items(self):
            self.reads += 1
            return super().items()

    environment = Counted(HF_TOKEN="sesame_environment")
    monkeypatch.setattr(os, "environ", environment)
    assert redact({"a": ["b sesame_environment"] * 9}) == {"a": ["b ***"] * 9}
    assert environment.reads == 1


def test_a_fault_shows_no_secret():
    by_key = ConfigIssue(
        "rollout.server_args.api_key", "sesame", "sesame is too short", "not 'sesame'"
    )
    inside = ConfigIssue(
        "rollout.server_args", {"auth": ["sesame"], "tp": 2}, "no", "http://a:sesame@b/"
    )
    assert "sesame" not in str(ConfigError([by_key, inside]))
    assert "'tp': 2" in str(inside)


def test_what_a_program_prints_holds_no_secret(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "sesame_environment")
    with redacted_output():
        print("a sesame_environment", file=sys.stderr)
        print("b http://me:sesame@host", flush=True)
        assert not sys.stdout.isatty()
    assert capsys.readouterr() == ("b http://***@host\n", "a ***\n")


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
