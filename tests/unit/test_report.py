"""The files of a run."""

import contextlib
import io
import json
import math
import os
import subprocess
import sys

import pytest
import yaml
from rich.console import Console

from mppo.recipe.errors import ConfigError
from mppo.recipe.schema import Recipe
from mppo.recipe.sections.trainer import TrainerConfig
from mppo.report.console import SampleRow, StepConsole, format_duration, step_line, visible
from mppo.report.history import History
from mppo.report.reporter import Reporter
from mppo.supervision.phase import phase

METRICS = {
    "critic/score/mean": 0.5,
    "objective/kl": 0.0123,
    "response_length/mean": 4.25,
    "training/rollout_logprob_diff_max": 2e-6,
    "perf/tokens_per_second": 5120.4,
    "timing_s/step": 0.8,
    "timing_s/gen": 0.4,
    "timing_s/gen_ahead": 0.6,
    "timing_s/update": 0.3,
    "timing_s/update_actor": 0.2,
    "timing_s/update_critic": 0.05,
    "timing_s/log_probs": 0.1,
    "timing_s/old_log_prob": 0.1,
    "timing_s/testing": 0.2,
}
ROWS = [
    SampleRow("<bos>1+2=\n", "3", "4", "3", 1.0, "best"),
    SampleRow("a|b", "\x1b[31m*", "<b>", None, 0.0),
]


def reporter(run_dir, total_steps=4, is_main=True, **trainer):
    dump = Recipe().model_dump(mode="json")
    return Reporter(run_dir, TrainerConfig(**trainer), dump, total_steps, is_main)


def run(run_dir, first=1, last=4, **settings):
    subject = reporter(run_dir, **settings)
    subject.start(first - 1)
    for step in range(first, last + 1):
        subject.log(step, {**METRICS, "critic/score/mean": step / 10})
    subject.samples(last, ROWS)
    subject.close()
    return subject


def json_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_leaves_recipe_numbers_samples_picture_and_report(tmp_path, capsys):
    run(tmp_path)
    assert yaml.safe_load((tmp_path / "recipe.yaml").read_text()) == Recipe().model_dump(
        mode="json"
    )
    rows = json_lines(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[0] == {"step": 1, **METRICS, "critic/score/mean": 0.1}
    assert json_lines(tmp_path / "samples.jsonl")[0] == {"step": 4, **ROWS[0]._asdict()}
    assert (tmp_path / "reward_kl.png").read_bytes().startswith(b"\x89PNG")
    report = (tmp_path / "report.md").read_text()
    assert "Finished after 4 steps" in report
    assert "| mean reward | 0.1 | 0.4 | 0.4 |" in report
    assert "log-probability difference of rollout and actor | 2e-06 | 2e-06 |  |" in report
    assert "| a\\|b | \\\\x1b[31m\\* | \\<b\\> |  | 0.000 |  |" in report
    assert "step 4/4 | eta 0s | reward 0.400 | kl 0.0123" in capsys.readouterr().out


def test_shares_of_phases_add_up_and_sub_phases_follow_their_phase(tmp_path):
    run(tmp_path)
    report = (tmp_path / "report.md").read_text()
    table = report.partition("## Where the time goes")[2].partition("##")[0]
    assert table.strip().splitlines() == [
        "| phase | seconds | share |",
        "|---|---|---|",
        "| gen | 1.6 | 40% |",
        "| update | 1.2 | 30% |",
        "| of which update_actor | 0.8 | 20% |",
        "| of which update_critic | 0.2 | 5% |",
        "| testing | 0.8 | 20% |",
        "| log_probs | 0.4 | 10% |",
        "| of which old_log_prob | 0.4 | 10% |",
        "",
        "Generating ahead, during these phases, took 2.4 s.",
    ]


def test_other_ranks_write_and_print_nothing(tmp_path, capsys):
    subject = run(tmp_path / "run", is_main=False)
    subject.line("x")
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_the_end_of_a_run_is_reported(tmp_path):
    run(tmp_path / "early", last=2)
    assert "Stopped early after 2 steps" in (tmp_path / "early" / "report.md").read_text()
    subject = reporter(tmp_path / "failed")
    subject.start(0)
    with pytest.raises(RuntimeError, match="boom"), contextlib.closing(subject):
        raise RuntimeError("boom")
    assert "Failed after 0 steps" in (tmp_path / "failed" / "report.md").read_text()


def test_a_resumed_run_drops_the_steps_it_repeats_and_keeps_the_rest(tmp_path):
    run(tmp_path, first=1, last=3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "critic/sc')  # killed while writing
    run(tmp_path, first=2, last=4)
    rows = json_lines(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]


def test_numbers_that_are_not_finite_are_null_in_the_file_and_left_out_of_series(tmp_path):
    history = History(tmp_path / "metrics.jsonl")
    history.append(1, {"a": math.nan, "b": 1.0})
    history.append(2, {"a": 2.0, "b": math.inf})
    assert json_lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "a": None, "b": 1.0},
        {"step": 2, "a": 2.0, "b": None},
    ]
    assert history.series("a") == ([2], [2.0])
    assert history.series("b") == ([1], [1.0])
    again = History(tmp_path / "metrics.jsonl")
    again.append(3, {"a": 3.0})
    assert again.series("a") == ([2, 3], [2.0, 3.0])


def test_a_step_line_omits_missing_metrics():
    assert (
        step_line(3, 100, "2m05s", {"objective/kl": 0.5}) == "step   3/100 | eta 2m05s | kl 0.5000"
    )


def test_output_to_a_file_has_plain_complete_lines():
    out = io.StringIO()
    console = StepConsole(10, Console(file=out, width=20, highlight=False))
    console.start(0)
    console.step(1, METRICS)
    console.print_line("[bold]not markup[/bold]")
    console.stop()
    first, second = out.getvalue().splitlines()
    assert first.endswith("| reward 0.500 | kl 0.0123 | length 4.2 | tokens/s 5120 | s/step 0.80")
    assert second == "[bold]not markup[/bold]"
    assert "\x1b" not in out.getvalue()


def test_a_terminal_shows_phase_bar_and_numbers_below_the_lines():
    out = io.StringIO()
    console = StepConsole(10, Console(file=out, force_terminal=True, width=100))
    console.start(0)
    with phase("update", 1), phase("updating critic", 1):
        console.step(1, METRICS)
        console.stop()
    last = out.getvalue().rpartition("reward 0.500")[2]
    assert "1/10" in last
    assert "updating critic" in last
    assert "0.0123" in last


def test_ongoing_warnings_stand_on_top_of_the_display_until_they_end():
    def last_drawn(*shown: list[str]) -> str:
        out = io.StringIO()
        console = StepConsole(10, Console(file=out, force_terminal=True, width=100))
        console.start(0)
        console.step(1, METRICS)
        for texts in shown:
            console.warnings(texts)
        console.stop()
        return out.getvalue().rpartition("reward 0.500")[2]

    drawn = last_drawn(["the KL [b] is\nhigh"])
    assert drawn.index("warning: the KL [b] is\\nhigh") < drawn.index("1/10")
    assert "warning" not in last_drawn(["the KL is high"], [])


def test_a_log_has_no_display_even_if_colours_are_forced(tmp_path):
    program = "from mppo.report.console import StepConsole; c = StepConsole(2); c.start(0); "
    program += "c.step(1, {'objective/kl': 1.0}); c.warnings(['w']); c.stop()"
    environment = {**os.environ, "FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "SLURM_JOB_ID": "7"}
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert (found.stdout.count("\n"), found.stderr) == (1, "")
    assert found.stdout.startswith("step 1/2 | eta ")
    assert "\x1b" not in found.stdout


def test_secrets_in_samples_are_replaced_before_a_narrow_column_cuts_them(
    tmp_path, monkeypatch, capsys
):
    secret = "open5esame7cave" * 4
    monkeypatch.setenv("GITLAB_PAT", secret)
    subject = reporter(tmp_path)
    subject.start(0)
    subject.samples(1, [SampleRow("p" * 60, f"it is {secret}", secret, None, 1.0)])
    subject.close()
    assert "open5esame" not in capsys.readouterr().out
    assert "it is \\*\\*\\* | \\*\\*\\* |" in (tmp_path / "report.md").read_text()
    assert json_lines(tmp_path / "samples.jsonl")[0]["response"] == "it is ***"


@pytest.mark.parametrize(("style", "lines"), [("lines", 1), ("quiet", 0)])
def test_a_terminal_without_a_display(style, lines):
    out = io.StringIO()
    console = StepConsole(10, Console(file=out, force_terminal=True, width=100), style)
    console.start(0)
    console.step(1, METRICS)
    console.samples(1, [SampleRow("2+2", "4", "4", "4", 1.0)] if style == "quiet" else [])
    console.print_line("a warning")
    console.stop()
    printed = out.getvalue().splitlines()
    assert sum("reward" in line for line in printed) == lines
    assert "a warning" in printed[-1]


def test_eta_follows_the_steps(monkeypatch):
    clock = iter([0.0, 10.0, 20.0])
    monkeypatch.setattr("mppo.report.console.time.monotonic", lambda: next(clock))
    console = StepConsole(8, Console(file=io.StringIO()))
    console.start(0)
    assert console.seconds_left() is None
    console.step(1, {})
    console.step(2, {})
    assert console.seconds_left() == 60.0


def test_the_eta_excludes_validation_before_the_first_step(monkeypatch):
    clock = iter([0.0, 100.0, 110.0])
    monkeypatch.setattr("mppo.report.console.time.monotonic", lambda: next(clock))
    console = StepConsole(8, Console(file=io.StringIO()))
    console.start(0)
    console.step(0, {})
    assert console.seconds_left() is None
    console.step(1, {})
    assert console.seconds_left() == 70.0


def test_durations_and_visible_text():
    assert [format_duration(s) for s in (None, 45.4, 187, 7500)] == ["?", "45s", "3m07s", "2h05m"]
    assert visible("a\n\té漢\x1b") == "a\\n\\té漢\\x1b"


def test_tensorboard_files_hold_the_numbers(tmp_path):
    reason = "the optional package tensorboard is missing"
    pytest.importorskip("tensorboard", reason=reason)
    loader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason=reason
    )
    run(tmp_path, logger=("tensorboard",))
    events = loader.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    scalars = events.Scalars("critic/score/mean")
    assert [event.step for event in scalars] == [1, 2, 3, 4]
    assert [event.value for event in scalars] == pytest.approx([0.1, 0.2, 0.3, 0.4])


@pytest.mark.parametrize(
    ("logger", "module"),
    [
        ("tensorboard", "torch.utils.tensorboard"),
        ("wandb", "wandb"),
        ("mlflow", "mlflow"),
        ("swanlab", "swanlab"),
    ],
)
def test_a_missing_tracker_says_how_to_install_it(logger, module, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(ConfigError, match=rf"mppo\[{logger}\]"):
        reporter(tmp_path, logger=(logger,))


def test_without_jsonl_no_numbers_are_written_but_the_report_is(tmp_path):
    run(tmp_path, logger=("console",))
    assert not (tmp_path / "metrics.jsonl").exists()
    assert "| mean reward |" in (tmp_path / "report.md").read_text()


def test_what_is_logged_is_on_disk_before_a_checkpoint_is_complete(tmp_path, monkeypatch):
    flushed, fsync = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: flushed.add(os.fstat(file).st_ino) or fsync(file))
    subject = reporter(tmp_path)
    subject.flush()
    assert not flushed, "nothing is written before the start"
    subject.start(0)
    subject.event("start", 0, "x")
    subject.samples(1, [SampleRow("p", "r", "g", None, 1.0)])
    subject.log(1, {"a": 1.0})
    subject.flush()
    written = [tmp_path, *(tmp_path / f"{name}.jsonl" for name in ("metrics", "samples", "events"))]
    assert {path.stat().st_ino for path in written} <= flushed
