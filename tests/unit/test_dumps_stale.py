"""Dumps of lost work: a run that died and resumed twice, in other layouts, reads none silently."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from random_dump import write_dump

from mppo.dumps.inspection import main as inspect
from mppo.dumps.stale import STALE, mark_stale, remove_stale
from mppo.dumps.step_dump import dumped_steps, stale_dumps, step_folder
from mppo.recipe.schema import Recipe
from mppo.recipe.sections.trainer import TrainerConfig
from mppo.report.html.page import page_data
from mppo.report.reporter import Reporter
from mppo.report.run_record import read_events
from mppo.trainer.dump import replay_folders
from mppo.trainer.start.file_checks import check_files

LAST = 9


def started(run_dir: Path, done: int, layout: str) -> Reporter:
    """A start of a run after ``done`` steps, as the loop does it."""
    dump = Recipe().model_dump(mode="json")
    subject = Reporter(run_dir, TrainerConfig(), dump, LAST, is_main=True)
    subject.start(done)
    subject.event("start", done, layout)
    return subject


def train(subject: Reporter, *steps: int, dumps: bool = True, text: str = "ab") -> None:
    for step in steps:
        if dumps:
            remove_stale([step_folder(subject.run_dir, step)])  # as dump_step
            write_dump(subject.run_dir, step, text=text)
        subject.log(step, {"critic/score/mean": step / 10, "timing_s/step": 1.0})


def shown(run_dir: Path) -> tuple[list[int], set[int], list[int]]:
    """The steps that ``mppo-inspect`` takes, the report shows and ``trainer.replay`` trains on."""
    (run,) = page_data([run_dir])["runs"]
    replayed = [int(folder.name.removeprefix("step_")) for folder in replay_folders(str(run_dir))]
    return list(dumped_steps(run_dir)), {row["step"] for row in run["tokens"]}, replayed


def test_a_run_that_died_and_resumed_twice(tmp_path, capsys):
    train(started(tmp_path, 0, "2 ranks"), *range(1, 8), text="old")  # died at step 8
    (tmp_path / "timeline").mkdir()
    for step in (5, 7):
        (tmp_path / f"timeline/step_{step}.json").write_text("{}")
    assert shown(tmp_path)[0] == [1, 2, 3, 4, 5, 6, 7], "a dead run's last dumps are its own"

    second = started(tmp_path, 5, "4 ranks")
    assert shown(tmp_path) == ([1, 2, 3, 4, 5], {1, 2, 4, 5}, [1, 2, 3, 4, 5])
    assert list(stale_dumps(tmp_path)) == [6, 7]
    assert [path.name for path in (tmp_path / "timeline").iterdir()] == ["step_5.json"]
    train(second, 6)  # and died again
    assert shown(tmp_path)[0] == [1, 2, 3, 4, 5, 6]
    assert list(stale_dumps(tmp_path)) == [7]

    third = started(tmp_path, 5, "1 rank")
    assert list(stale_dumps(tmp_path)) == [6, 7]
    capsys.readouterr()
    assert inspect([str(tmp_path)]) == 0
    found = capsys.readouterr()
    assert "step 5: 2 sequences" in found.out
    assert "left out, stale: step 6, 7 (written before the run started again from step 5)" in (
        found.err
    )
    for arguments in (["--step", "7"], ["--step", "7", "--sequence", "0"]):
        with pytest.raises(SystemExit, match="2"):
            inspect([str(tmp_path), *arguments])
        assert "add --stale to see this step" in capsys.readouterr().err
        assert inspect([str(tmp_path), *arguments, "--stale"]) == 0
        found = capsys.readouterr()
        assert "stale: written before the run started again from step 5" in (
            " ".join(found.out.split())
        )
        assert not found.err
    train(third, 6, dumps=False)  # without dumps, a passed step loses its stale one
    assert list(stale_dumps(tmp_path)) == [7]
    assert not step_folder(tmp_path, 6).exists()
    train(third, 7, 8, 9, text="new")
    third.close()
    assert shown(tmp_path) == ([1, 2, 3, 4, 5, 7, 8, 9], {1, 3, 7, 9}, [1, 2, 3, 4, 5, 7, 8, 9])
    assert stale_dumps(tmp_path) == {}
    pieces = json.loads((step_folder(tmp_path, 7) / "rank_0.json").read_text())
    assert set(pieces.values()) >= {"new0"}
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == [
        f"step_{step}" for step in (1, 2, 3, 4, 5, 7, 8, 9)
    ]
    (run,) = page_data([tmp_path])["runs"]
    starts = [e["text"] for e in run["events"] if e["kind"] in ("start", "resumed")]
    assert starts == ["2 ranks", "4 ranks", "1 rank"]
    assert run["steps"] == list(range(1, LAST + 1))


def test_a_replay_of_stale_dumps_only_is_refused(tmp_path, capsys):
    for step in (1, 2):
        write_dump(tmp_path, step)
    mark_stale(tmp_path / "rollouts", 0)
    for place in (tmp_path, tmp_path / "rollouts/step_2"):
        assert replay_folders(str(place)) == []
        recipe = Recipe.model_validate({"trainer": {"replay": str(place)}})
        (issue,) = [i for i in check_files(recipe) if i.key == "trainer.replay"]
        assert "only stale dumps, of lost work (written before the run started anew)" in (issue.why)
        with pytest.raises(SystemExit, match="2"):
            inspect([str(place)])
        assert "holds only stale dumps; add --stale" in capsys.readouterr().err


def test_cases_of_non_finite_steps_are_marked_and_stay(tmp_path):
    (tmp_path / "nonfinite/step_7").mkdir(parents=True)
    subject = started(tmp_path, 5, "1 rank")
    train(subject, 6, 7, 8, dumps=False)
    assert "again from step 5" in (tmp_path / "nonfinite/step_7" / STALE).read_text()


@pytest.mark.parametrize(
    ("mark", "why"), [(b"\xff", "cannot be read"), (b"x" * 5000, "cannot be read"), (b"", "marked")]
)
def test_a_mark_that_cannot_be_read_is_a_mark(mark, why, tmp_path):
    (write_dump(tmp_path, 1) / STALE).write_bytes(mark)
    assert dumped_steps(tmp_path) == {}
    assert why in stale_dumps(tmp_path)[1][1]


def test_a_mark_that_a_start_could_not_remove_goes_at_the_next(tmp_path):
    write_dump(tmp_path, 2)
    mark_stale(tmp_path / "rollouts", 1)
    train(started(tmp_path, 3, "1 rank"), 4, dumps=False)
    assert stale_dumps(tmp_path) == {}


def test_a_dump_that_cannot_be_deleted_stays_marked(tmp_path):
    """Else what is left of a dump of lost work would count as the run's own."""
    dump = write_dump(tmp_path, 2)
    mark_stale(tmp_path / "rollouts", 1)
    (dump.with_name(".step_2.deleted")).write_text("not a folder, so the dump cannot move there")
    remove_stale([dump])
    assert list(stale_dumps(tmp_path)) == [2]
    assert dumped_steps(tmp_path) == {}

    (dump.with_name(".step_2.deleted")).unlink()
    (dump.with_name(".step_2.deleted")).mkdir()
    (dump.with_name(".step_2.deleted") / "rest").write_text("of a start that died while deleting")
    remove_stale([dump])
    assert list((tmp_path / "rollouts").iterdir()) == []


def test_a_start_after_a_death_needs_no_valid_metrics_file(tmp_path):
    train(started(tmp_path, 0, "1 rank"), 1, 2)  # and died
    (tmp_path / "metrics.jsonl").write_text("damaged\n")
    trainer = TrainerConfig(logger=["console"])
    Reporter(tmp_path, trainer, {}, LAST, is_main=True).start(1)
    assert [event.kind for event in read_events(tmp_path)][-1] == "died"
