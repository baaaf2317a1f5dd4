"""What the page answers first, its list of all metrics, and the difference of two runs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from mppo.report.code_files import keep_code, kept_code
from mppo.report.html.headline import headline, trend
from mppo.report.html.page import page_data
from mppo.report.html.plots import POINTS
from mppo.report.warning_rules import warning_spans

SECRET = "hf_qWeRtYuIoPaSdFgHjK0123"


def answers(rows, failed=False) -> dict[str, tuple[str, str]]:
    found = headline(rows, warning_spans(rows), failed)["answers"]
    return {question: (answer, look) for question, answer, look in found}


def rewards(values) -> list[tuple[int, dict[str, float]]]:
    times = {"timing_s/step": 2.0, "timing_s/gen": 1.5, "timing_s/update": 0.5}
    return [(i, {"critic/score/mean": v, **times}) for i, v in enumerate(values, start=1)]


def write_run(folder: Path, rows, recipe: str = "{}") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": step, **row}) + "\n" for step, row in rows]
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / "recipe.yaml").write_text(recipe)
    return folder


@pytest.mark.parametrize(
    ("values", "begins", "look"),
    [
        ([0.1 * i for i in range(12)], "yes: mean reward 0 → 1.1, best 1.1 at step 12", "good"),
        ([1 - 0.05 * i for i in range(12)], "no, the reward falls: mean reward 1 → 0.45", "bad"),
        ([0.5, 0.4] * 6, "no trend in the reward: ", "unknown"),
        ([0.0] * 12, "no: the mean reward of every step is 0", "bad"),
        ([0.1, 0.9], "2 steps are too few to say: mean reward 0.1 → 0.9", "unknown"),
        ([], "no reward has been logged", "unknown"),
    ],
)
def test_the_first_answer_is_the_trend_of_the_reward(values, begins, look):
    answer, found = answers(rewards(values))["Does it learn?"]
    assert answer.startswith(begins)
    assert found == look


def test_the_trend_is_the_slope_in_its_standard_errors():
    # by hand: mean 2.5, slope 0.8, rests -0.3, 0.9, -0.9, 0.3; error sqrt(1.8 / 2 / 5)
    assert trend([1, 3, 2, 4]) == pytest.approx(0.8 / math.sqrt(1.8 / 2 / 5))
    assert trend([2, 2, 2]) == 0
    assert trend([3, 2, 1]) == -math.inf


def test_the_other_answers_are_warnings_and_time():
    found = answers(rewards([0.1, 0.2, 0.3]))
    assert found["Is it stable?"][1] == "unknown"
    assert found["Where does the time go?"][0] == "gen 75%, update 25%; 3 steps took 6s, 2 s each"
    assert found["What is wrong?"] == ("nothing that a rule looks for", "good")
    failed = answers(rewards([0.1, 0.2, 0.3]), failed=True)["What is wrong?"]
    assert failed == ("the run failed; its output says why", "bad")
    far = {"objective/kl": 80.0, "response_length/mean": 100.0}
    rows = [(step, {**row, **far}) for step, row in rewards([0.1] * 3 + [0.2] * 5)]
    found = answers(rows)
    assert found["Is it stable?"] == (
        "no: the KL to the reference is 0.80 nats per token (80 per response)", "bad",
    )  # fmt: skip
    assert found["What is wrong?"] == ("warnings, below: 1 ongoing", "bad")
    calm = {"objective/kl": 0.5, "response_length/mean": 100.0}
    answer, look = answers([*rows, *((s, {**rows[0][1], **calm}) for s in range(9, 30))])[
        "Is it stable?"
    ]
    assert answer.startswith("now, but not always (step 5 to ")
    assert look == "unknown"


def test_every_metric_is_in_the_list_and_what_a_reward_function_returns_is_drawn(tmp_path):
    steps = 3 * POINTS
    rows = [
        (step, {"reward/src/acc/mean": step / steps, "odd/one": 1e-6 * step, "no/number": math.nan})
        for step in range(1, steps + 1)
    ]
    rows[-1][1].update({"val-core/a/b/acc/mean": 0.5, "val-core/a/b/acc/pass@4": 0.75})
    rows[-1][1].update({"conversation/turns/mean": 2.0, "reward/errors": 0.0})
    data = page_data([write_run(tmp_path, [(s, finite(row)) for s, row in rows])])
    listed = {metric["name"]: metric["runs"][0] for metric in data["metrics"]}
    assert set(listed) == {name for _, row in rows for name in row} - {"no/number"}
    odd = listed["odd/one"]
    assert odd["count"] == steps
    assert odd["numbers"] == [1e-6, 6e-4, 1e-6, 6e-4]
    assert (len(odd["x"]), odd["x"][0], odd["x"][-1]) == (POINTS, 1, steps)
    lines = {plot["title"]: [line["label"] for line in plot["lines"]] for plot in data["plots"]}
    assert lines == {
        "Validation: other numbers": ["a/b/acc/mean", "a/b/acc/pass@4"],
        "Numbers of the reward function": ["src/acc"],
        "Turns of a conversation": ["mean"],
    }, "lines of zeros that count faults are left out"


def finite(row: dict[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in row.items()}


def test_the_code_of_a_recipe_is_kept_and_a_change_of_it_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine.py", "agent.py", "plug.py", "tool.py", "beside.py"):
        Path(name).write_text(f"# {name}\nkey = '{SECRET}'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = {
        "reward": {"function": "mine.py:score", "url": "localhost:80"},
        "rollout": {
            "agent": {
                "run": "beside:run", "path": None, "command": "python agent.py --seed 3",
                "tools": [{"path": "tool.py:call"}, {"path": "mppo.agents.hermes:HermesAgent"}],
            }
        },
        "trainer": {"plugins": ["plug.py", "missing.py"]},
    }  # fmt: skip
    run = tmp_path / "run"
    assert keep_code(run, recipe, 0) == []
    assert list(kept_code(run)) == [
        "reward.function: mine.py", "rollout.agent.command: agent.py", "rollout.agent.run: "
        "beside.py", "rollout.agent.tools.0.path: tool.py", "trainer.plugins.0: plug.py",
    ]  # fmt: skip
    assert SECRET not in "".join(kept_code(run).values())
    assert keep_code(run, recipe, 3) == [], "nothing has changed"
    Path("mine.py").write_text("# better\n")
    assert keep_code(run, recipe, 5) == ["reward.function"]
    kept = run / "code/reward.function"
    assert (kept / "mine.py").read_text() == "# better\n"
    assert (kept / "mine.py.until_step_5").read_text().startswith("# mine.py\n")


def test_two_runs_differ_in_keys_and_in_lines_of_code(tmp_path):
    for name, text in (("a", "def f():\n    return 1\n"), ("b", "def f():\n    return 2\n")):
        recipe = f"trainer: {{project_name: p, experiment_name: {name}}}"
        folder = write_run(tmp_path / name, rewards([0.1, 0.2]), recipe)
        (folder / "code/reward.function").mkdir(parents=True)
        (folder / "code/reward.function/mine.py").write_text(text)
    data = page_data([tmp_path / "a", tmp_path / "b"])
    assert [row["key"] for row in data["recipes"]] == ["trainer.experiment_name"]
    (difference,) = data["code"]
    assert difference["title"] == "reward.function: p/b against p/a"
    assert [line for line in difference["lines"] if line[0] in "+-"][2:] == [
        "-    return 1", "+    return 2",
    ]  # fmt: skip
    assert page_data([tmp_path / "a"])["code"] == [
        {"title": "reward.function: mine.py", "lines": ["def f():", "    return 1"]}
    ]
