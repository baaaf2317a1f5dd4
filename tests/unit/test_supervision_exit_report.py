"""The reason that a failing rank writes for torchrun's report."""

from __future__ import annotations

import json

from mppo.supervision.exit_report import VARIABLE, refuse_recipe, write_reason


def test_the_first_reason_counts_and_shows_no_secret(tmp_path, monkeypatch):
    file = tmp_path / "error.json"
    monkeypatch.setenv(VARIABLE, str(file))
    write_reason("the server at https://me:hidden-word@host/score has gone")
    write_reason("another rank has gone")
    message = json.loads(file.read_text())["message"]
    assert message["message"] == message["extraInfo"]["py_callstack"]
    assert message["message"].startswith("the server at https://")
    assert "hidden-word" not in file.read_text()
    assert message["extraInfo"]["timestamp"].isdigit()


def test_without_torchrun_or_a_place_for_it_nothing_is_left(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv(VARIABLE, raising=False)
    write_reason("gone")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nowhere" / "error.json"))
    assert refuse_recipe(ValueError("gone")) == 2
    assert capsys.readouterr().err == "mppo: gone\n"
    assert list(tmp_path.iterdir()) == []
