"""A tracker that is not installed, or has no key, is an issue of the recipe."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from mppo.recipe.trackers import tracker_issues
from mppo.train import main


def faults(environ: dict[str, str], *loggers: str, installed: tuple[str, ...] = ("wandb",)):
    found = tracker_issues(loggers, environ, lambda name: name in installed)
    return [f"{fault.why}; {fault.fix}" for fault in found]


@pytest.mark.parametrize(
    "environ",
    [
        {"WANDB_API_KEY": "k" * 40},
        {"WANDB_MODE": "offline"},
        {"NETRC": "{netrc}"},
        {"NETRC": "{netrc}", "WANDB_BASE_URL": "https://wandb.example.org"},
    ],
)
def test_a_tracker_that_is_set_up_is_no_fault(environ, tmp_path):
    netrc = tmp_path / "netrc"
    hosts = ("api.wandb.ai", "wandb.example.org")
    netrc.write_text("".join(f"machine {host} login user password x\n" for host in hosts))
    environ = {name: value.format(netrc=netrc) for name, value in environ.items()}
    assert faults(environ, "console", "wandb") == []


def test_a_tracker_without_a_key_or_a_package_is_one(tmp_path):
    (without_key,) = faults({"HOME": str(tmp_path)}, "wandb")
    assert "no API key on this machine; export WANDB_API_KEY" in without_key
    (absent,) = faults({}, "wandb", installed=())
    assert 'pip install "mppo[wandb]"' in absent
    assert faults({}, "console", "jsonl", installed=()) == []


def test_a_run_is_refused_before_anything_loads(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    lengths = ["data.max_prompt_length=32", "data.max_response_length=16"]
    assert main(["data.task=arithmetic", *lengths, "trainer.logger=[console, wandb]"]) == 2
    shown = capsys.readouterr().err
    assert "1. trainer.logger = 'wandb'" in shown
    assert ("no API key on this machine" if find_spec("wandb") else "is not installed") in shown
    assert list(tmp_path.iterdir()) == []
