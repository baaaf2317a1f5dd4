"""Each warning about a run's course on histories that raise it and that do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from healthy_step import HEALTHY

from mppo.recipe.schema import Recipe
from mppo.recipe.sections.trainer import TrainerConfig
from mppo.report import warning_rules as rules
from mppo.report.reporter import Reporter
from mppo.report.warning_rules import RULES, current_warnings, warning_spans
from mppo.trainer.metrics import by_rank

KL, ENTROPY, GAP = "objective/kl", "policy/entropy_avg", "training/rollout_logprob_diff_mean"
GROUPS, CUT = "critic/score/equal_groups", "response_length/clip_ratio"
EXPLAINED, STARVED = "critic/vf_explained_var", "actor/moe/layer_3/min_vio"
VALUES = "critic/values/mean"
RANK_2, SKIPPED, BEST = "perf/rank_probe_ms/2", "training/skipped_steps", "critic/score/max"
LOG, SAVE = "timing_s/log_probs", "timing_s/save_checkpoint"
PAGE = Path(__file__).parents[2] / "docs/report.md"

# rule, metrics of the last steps just below its threshold and just above it, words of the message
RAISED = [
    ("kl_runs_away", {KL: 29.0}, {KL: 31.0}, "0.31 nats per token (31 per response)"),
    ("entropy_collapses", {ENTROPY: 0.081}, {ENTROPY: 0.079}, "fell from 0.8 nats"),
    ("rewards_are_equal", {BEST: 1e-6}, {BEST: 0.0}, "have one score (0)"),
    ("groups_are_equal", {GROUPS: 0.8}, {GROUPS: 0.81}, "81% of the prompts"),
    ("responses_are_cut_off", {CUT: 0.89}, {CUT: 0.91}, "91% of the responses"),
    ("critic_explains_nothing", {EXPLAINED: 0.051}, {EXPLAINED: 0.049}, "explains 4.9%"),
    ("critic_lags", {VALUES: 0.401}, {VALUES: 0.39}, "below the returns in each of the last 5"),
    ("critic_lags", {VALUES: 0.599}, {VALUES: 0.61}, "above the returns"),
    ("rollout_and_actor_disagree", {GAP: 0.049}, {GAP: 0.051}, "0.051 nats"),
    ("experts_starve", {STARVED: -0.979}, {STARVED: -0.981}, "in actor layer 3"),
    ("rank_is_slow", {RANK_2: 1.51}, {RANK_2: 1.54}, "rank 2 took at least 1.5 x the median"),
    ("phase_dominates", {"timing_s/gen": 8.9}, {"timing_s/gen": 9.1}, "gen takes 91% of a step"),
    ("phase_dominates", {"timing_s/update": 7.9}, {"timing_s/update": 8.1}, "update takes 81%"),
    ("phase_dominates", {LOG: 5.9}, {LOG: 6.1}, "log_probs takes 61%"),
    ("phase_dominates", {SAVE: 4.9}, {SAVE: 5.1}, "save_checkpoint takes 51%"),
    ("steps_are_skipped", {SKIPPED: 1.0}, {SKIPPED: 3.0}, "2 optimizer steps"),
]  # fmt: skip

# what docs/report.md says of each rule's threshold, from the constants that the rule compares with
DOCUMENTED = {
    "kl_runs_away": [f"above {rules.KL_PER_TOKEN:g} nats"],
    "entropy_collapses": [
        f"below {rules.ENTROPY_BELOW:g} nats",
        f"below {rules.ENTROPY_SHARE:.0%}",
    ],
    "rewards_are_equal": [f"each of {rules.WINDOW} steps"],
    "groups_are_equal": [f"above {rules.EQUAL_GROUPS:.0%}"],
    "responses_are_cut_off": [f"{rules.CUT_OFF:.0%} or more"],
    "critic_explains_nothing": [
        f"after {rules.EXPLAINED_AFTER} steps",
        f"below {rules.EXPLAINED:.0%}",
    ],
    "critic_was_not_pretrained": [
        f"before {rules.EXPLAINED_AFTER} steps",
        f"below {rules.EXPLAINED:.0%}",
    ],
    "critic_lags": [
        f"after {rules.EXPLAINED_AFTER} steps",
        f"{rules.WINDOW} steps",
        f"over {rules.LAGGING:.0%}",
    ],
    "rollout_and_actor_disagree": [f"above {rules.LOGPROB_GAP:g} nats"],
    "experts_starve": [f"below {rules.STARVING:g}", f"less than {1 + rules.STARVING:.0%}"],
    "rank_is_slow": [f"over {rules.SLOW_RANK:g} x", f"each of {rules.WINDOW} steps"],
    "phase_dominates": [
        *(f"{share:.0%} (`{phase}`)" for phase, share in rules.SHARE_OF_STEP.items()),
        f"{rules.OTHER_SHARE:.0%} (any other)",
    ],
    "steps_are_skipped": [f"within {rules.MOST_STEPS} steps"],
}

SILENT = [
    ("a run without a critic", {"critic/vf_explained_var": 0.0}, ["critic/vf_loss"]),
    ("a deterministic task from the start", {"policy/entropy_avg": 0.09}, []),
    ("one slow step", {}, []),
    ("numbers that are not finite", {"objective/kl": float("nan")}, []),
    ("generation as the longest phase", {"timing_s/gen": 8.5}, []),
]


def steps(changes: dict[str, float], before: int = 15, after: int = 5) -> list[dict[str, float]]:
    return [dict(HEALTHY) for _ in range(before)] + [HEALTHY | changes for _ in range(after)]


@pytest.mark.parametrize(("name", "below", "above", "words"), RAISED)
def test_a_rule_warns_above_its_threshold_with_number_and_advice(name, below, above, words):
    assert current_warnings(steps(below)) == []
    (found,) = current_warnings(steps(above))
    assert found.name == name
    assert words in found.text
    assert len(found.advice) > 20
    assert str(found) == f"{found.text}; try {found.advice}"


def test_a_slow_rank_of_512_is_named():
    """Of many ranks, the metrics name those with the highest numbers only."""
    healthy = {name: v for name, v in HEALTHY.items() if "rank_probe" not in name}
    times = [1.0 + rank / 10_000 for rank in range(512)]
    times[317] = 1.7
    rows = [healthy | by_rank("perf/rank_probe_ms/", times) for _ in range(20)]
    (found,) = current_warnings(rows)
    assert found.text.startswith("rank 317 took at least 1.7 x the median")
    times[317] = 1.0
    rows[-1] = healthy | by_rank("perf/rank_probe_ms/", times)
    assert current_warnings(rows) == []


def test_every_rule_has_a_history_that_raises_it():
    early = {"critic_was_not_pretrained"}
    assert set(RULES) == {row[0] for row in RAISED} | early


def test_an_actor_that_learns_from_a_new_critic_is_warned_of_until_the_critic_knows_something():
    knows_nothing = HEALTHY | {EXPLAINED: 0.049, "actor/pg_loss": 0.1}
    (found,) = current_warnings([knows_nothing] * 5)
    assert found.name == "critic_was_not_pretrained"
    assert "explains 4.9% of the returns' variance after 5 steps" in found.text
    assert "value_pretraining" in found.advice
    assert current_warnings([knows_nothing] * 5 + [knows_nothing | {EXPLAINED: 0.2}] * 5) == []
    (later,) = current_warnings([knows_nothing] * 20)
    assert later.name == "critic_explains_nothing"
    alone = {name: x for name, x in knows_nothing.items() if name != "actor/pg_loss"}
    assert current_warnings([alone] * 5 + [knows_nothing] * 5) == [], "it had steps of its own"
    without = {name: x for name, x in knows_nothing.items() if name != "critic/vf_loss"}
    assert current_warnings([without] * 5) == []


def test_values_on_both_sides_of_the_returns_do_not_lag():
    rows = steps({VALUES: 0.2})
    rows[-3] = rows[-3] | {VALUES: 0.51}
    assert current_warnings(rows) == []


def test_the_page_lists_every_rule_with_its_threshold():
    lines = PAGE.read_text().partition("## Warnings")[2].partition("\n## ")[0].splitlines()
    listed = {line.split("`")[1]: line for line in lines if line.startswith("| `")}
    assert listed.keys() == DOCUMENTED.keys() == RULES.keys()
    for name, texts in DOCUMENTED.items():
        for text in texts:
            assert text in listed[name], name


def test_every_phase_has_its_own_advice_or_a_page():
    for phase, words in (("gen", "max_staleness"), ("testing", "test_freq"), ("adv", "docs/")):
        (found,) = current_warnings(steps({f"timing_s/{phase}": 9.5}))
        assert words in found.advice


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
