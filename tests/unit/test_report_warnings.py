"""Each warning about a run's course on histories that raise it and that do not."""

from __future__ import annotations

import pytest

from mppo.config.schema import Recipe
from mppo.config.sections.trainer import TrainerConfig
from mppo.report.reporter import Reporter
from mppo.report.warning_rules import RULES, current_warnings, warning_spans

HEALTHY = {
    "objective/kl": 2.0,
    "response_length/mean": 100.0,
    "policy/entropy_avg": 0.8,
    "critic/score/min": 0.0,
    "critic/score/max": 1.0,
    "critic/score/equal_groups": 0.4,
    "response_length/clip_ratio": 0.1,
    "critic/vf_loss": 0.3,
    "critic/vf_explained_var": 0.6,
    "training/rollout_logprob_diff_mean": 0.004,
    "training/skipped_steps": 1.0,
    "actor/moe/layer_3/min_vio": -0.5,
    "timing_s/step": 10.0,
    "timing_s/gen": 6.0,
    "timing_s/log_probs": 2.0,
    "timing_s/old_log_prob": 2.0,
    "timing_s/update": 2.0,
    **{f"perf/rank_probe_ms/{rank}": 1.0 + rank / 100 for rank in range(4)},
}

# rule, metrics of the last steps that raise it, words of the message
RAISED = [
    ("kl_runs_away", {"objective/kl": 40.0}, "0.40 nats per token (40 per response)"),
    ("entropy_collapses", {"policy/entropy_avg": 0.02}, "from 0.8 nats in the first steps to 0.02"),
    ("rewards_are_equal", {"critic/score/max": 0.0}, "have one score (0)"),
    ("groups_are_equal", {"critic/score/equal_groups": 0.9}, "90% of the prompts"),
    ("responses_are_cut_off", {"response_length/clip_ratio": 0.97}, "97% of the responses"),
    ("critic_explains_nothing", {"critic/vf_explained_var": -0.2}, "explains -20.0%"),
    ("rollout_and_actor_disagree", {"training/rollout_logprob_diff_mean": 0.2}, "0.2 nats"),
    ("experts_starve", {"actor/moe/layer_3/min_vio": -0.99}, "in actor layer 3"),
    ("rank_is_slow", {"perf/rank_probe_ms/2": 3.0}, "rank 2 took at least 2.9 x the median"),
    ("phase_dominates", {"timing_s/update": 9.0}, "update takes 90% of a step"),
    ("phase_dominates", {"timing_s/save_checkpoint": 6.0}, "save_checkpoint takes 60%"),
    ("steps_are_skipped", {"training/skipped_steps": 3.0}, "2 optimizer steps"),
]  # fmt: skip

SILENT = [
    ("a run without a critic", {"critic/vf_explained_var": 0.0}, ["critic/vf_loss"]),
    ("a deterministic task from the start", {"policy/entropy_avg": 0.09}, []),
    ("one slow step", {}, []),
    ("numbers that are not finite", {"objective/kl": float("nan")}, []),
    ("generation as the longest phase", {"timing_s/gen": 8.5}, []),
]


def steps(changes: dict[str, float], before: int = 15, after: int = 5) -> list[dict[str, float]]:
    return [dict(HEALTHY) for _ in range(before)] + [HEALTHY | changes for _ in range(after)]


@pytest.mark.parametrize(("name", "changes", "words"), RAISED, ids=[row[0] for row in RAISED])
def test_a_rule_warns_with_number_and_advice(name, changes, words):
    (found,) = current_warnings(steps(changes))
    assert found.name == name
    assert words in found.text
    assert len(found.advice) > 20
    assert str(found) == f"{found.text}; try {found.advice}"


def test_every_rule_has_a_history_that_raises_it():
    assert {rule.__name__ for rule in RULES} == {row[0] for row in RAISED}


@pytest.mark.parametrize(("what", "changes", "without"), SILENT, ids=[row[0] for row in SILENT])
def test_rules_are_silent_on(what, changes, without):
    rows = steps(changes)
    if what.startswith("one slow"):
        rows[-2] = rows[-2] | {"perf/rank_probe_ms/1": 9.0}
    if what.startswith("a deterministic"):
        rows = [row | changes for row in rows]
    rows = [{k: v for k, v in row.items() if k not in without} for row in rows]
    assert current_warnings(rows) == []


def test_rules_need_some_steps_and_bear_missing_metrics():
    assert current_warnings([]) == []
    assert current_warnings([HEALTHY | {"objective/kl": 99.0}] * 4) == []
    assert current_warnings([{}] * 20) == []


def test_a_slow_collapse_of_the_entropy_is_seen_too():
    rows = [HEALTHY | {"policy/entropy_avg": 0.8 * 0.99**step} for step in range(300)]
    (found,) = warning_spans(list(enumerate(rows, start=1)))
    assert found.warning.name == "entropy_collapses"
    assert 200 < found.first < 240


def test_spans_name_first_and_last_step_and_ongoing_ones_come_first():
    rows = [*steps({"response_length/clip_ratio": 1.0}), *steps({}), *steps({"objective/kl": 90.0})]
    numbered = [(0, {"val/reward": 1.0}), *enumerate(rows, start=1)]
    now, earlier = warning_spans(numbered)
    assert (now.warning.name, now.last, now.ongoing) == ("kl_runs_away", 60, True)
    assert earlier.warning.name == "responses_are_cut_off"
    assert (earlier.first, earlier.last, earlier.ongoing) == (20, 20, False)


def test_console_and_report_show_a_lasting_warning_once(tmp_path, capsys):
    dump = Recipe().model_dump(mode="json")
    subject = Reporter(tmp_path, TrainerConfig(), dump, 20, is_main=True)
    subject.start(0)
    for step, row in enumerate(steps({"objective/kl": 90.0}), start=1):
        subject.log(step, row)
    subject.close()
    text = capsys.readouterr().out
    assert text.count("warning: the KL to the reference is") == 1
    report = (tmp_path / "report.md").read_text()
    assert report.index("## Warnings") < report.index("![reward and KL]")
    line = next(line for line in report.splitlines() if "KL to the reference is" in line)
    assert "until the end: " in line
    assert "; try a lower actor.optim.lr" in line
    assert '"kind": "warning"' in (tmp_path / "events.jsonl").read_text()
