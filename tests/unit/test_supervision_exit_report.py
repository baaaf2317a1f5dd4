"""The reason that a failing rank writes for torchrun's report."""

from __future__ import annotations

import json
import logging
import sys
from types import SimpleNamespace

import pytest

from mppo.supervision import torchrun_report
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


class ChildFailedError(Exception):
    """torchrun's error, with the failures of its ranks."""

    def __init__(self, *failures: SimpleNamespace) -> None:
        super().__init__("failed")
        self.failures = dict(enumerate(failures))


def failure(code: int, timestamp: int, extra: dict | None) -> SimpleNamespace:
    message = "Signal 15" if extra is None else {"message": "gone", "extraInfo": extra}
    return SimpleNamespace(exitcode=code, timestamp=timestamp, message=message)


TOLD = {torchrun_report.TOLD: True}


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ChildFailedError(failure(-15, 8, None), failure(2, 7, TOLD)), True),
        (ChildFailedError(failure(-9, 6, None), failure(2, 7, TOLD)), False),
        (ChildFailedError(failure(1, 7, TOLD)), False),
        (ChildFailedError(failure(2, 7, {})), False),
        (ChildFailedError(), False),
        (ValueError("gone"), False),
    ],
)
def test_torchruns_report_is_left_out_only_for_a_users_fault_that_was_told(
    error, told, monkeypatch
):
    """The first failure decides; torchrun's own lines on it come with the report or not at all."""
    shown: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: shown.append(record.getMessage()))
    log, errors = map(logging.getLogger, torchrun_report.LOGGERS)
    for logger in (log, errors):
        monkeypatch.setattr(logger, "filters", [])
        monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append("report"))
    with pytest.raises(RuntimeError, match="no rendezvous backend"):
        torchrun_report.install()(None)
    log.warning("Unable to shutdown")
    log.warning("Sending process %s closing signal %s", 3, "SIGTERM")
    log.error("failed (exitcode: %s)", 2)
    errors.error("no error file defined for parent")
    assert shown == ["Unable to shutdown"]
    sys.excepthook(type(error), error, None)
    lines = ["Sending process 3 closing signal SIGTERM", "failed (exitcode: 2)"]
    lines += ["no error file defined for parent", "report"]
    assert shown[1:] == ([] if told else lines)
