"""Dumps of a run on two ranks: metrics from them, training from them, and reading them."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from healthy_step import HEALTHY
from launched_run import LaunchedRun, metrics_logged
from metrics_by_hand import NOT_IN_A_DUMP, metrics_by_hand

from mppo.dumps.experience_files import read_experience
from mppo.dumps.inspection import main as inspect
from mppo.dumps.step_dump import dumped_steps, read_header_of, recipe_hash, stale_dumps
from mppo.recipe.schema import Recipe
from mppo.report.html.page import page_data
from mppo.report.html.plots import SPECS
from mppo.report.run_record import Status, write_status
from mppo.safety.redact import redact
from mppo.trainer.advantages import current_kl, estimate
from mppo.trainer.dump import read_episodes, replay_folders
from mppo.trainer.metrics import batch_metrics, kl_metrics, reward_metrics

STEPS = 2
SETTINGS = (
    "rollout.n=2",
    "algorithm.use_kl_in_reward=true",
    "algorithm.normalize_scores={mode: given, mean: 0.25, std: 2}",
    "trainer.save_freq=-1",
    "trainer.export_hf=false",
    f"trainer.total_training_steps={STEPS}",
)
NOT_REPLAYED = ("training/epoch", "perf/", "timing")


@pytest.fixture(scope="module")
def dumped(tmp_path_factory) -> Path:
    """A run of two steps on two ranks with dumps."""
    run_dir = tmp_path_factory.mktemp("dumped")
    more = ["trainer.dump_rollouts=true", "trainer.profile={steps: [2], ranks: [1]}"]
    more += ["trainer.save_freq=1"]
    run = LaunchedRun(run_dir, [*SETTINGS, *more])
    assert run.codes() == [0, 0], run.texts()
    return run_dir


def steps_of(run_dir: Path) -> list[dict[str, float]]:
    return [row for row in metrics_logged(run_dir) if row["step"]]


def test_metrics_equal_a_recomputation_from_the_dump(dumped):
    recipe = Recipe.model_validate(yaml.safe_load((dumped / "recipe.yaml").read_text()))
    logged = {row["step"]: row for row in steps_of(dumped)}
    steps = dumped_steps(dumped)
    assert list(steps) == [1, 2]
    for step, folder in steps.items():
        header = read_header_of(folder)
        plain = yaml.safe_load((dumped / "recipe.yaml").read_text())
        assert header.recipe == recipe_hash(plain) == recipe_hash(redact(plain))
        stored = read_experience(folder, header.ranks)
        outputs, batch = stored.old, stored.old.batch
        again = estimate(outputs, recipe.algorithm, header.kl_coef)
        for name in ("rewards_T", "advantages_T", "returns_T", "loss_weight_T"):
            torch.testing.assert_close(getattr(again, name), getattr(stored, name))
        raw = replace(batch, scores_B=torch.tensor([row.score for row in header.rows]))
        kl = current_kl(outputs, recipe.algorithm)
        found = batch_metrics(raw, outputs, again, step, recipe)
        found |= kl_metrics(kl, header.kl_coef, recipe.actor)
        found |= reward_metrics(read_episodes(folder, header), [])
        assert len(found) > 60
        expected = {name: logged[step][name] for name in found}
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_every_metric_is_written_out_from_the_dump_or_has_a_reason(dumped):
    recipe = Recipe.model_validate(yaml.safe_load((dumped / "recipe.yaml").read_text()))
    for line in (dumped / "metrics.jsonl").read_text().splitlines():
        logged = json.loads(line)
        step = logged.pop("step")
        folder = dumped_steps(dumped)[step]
        header = read_header_of(folder)
        found = metrics_by_hand(read_experience(folder, header.ranks), header, recipe, step)
        assert found == pytest.approx({name: logged[name] for name in found}, rel=1e-4, abs=1e-5)
        left = logged.keys() - found.keys()
        of_reason = {p: {n for n in left if re.fullmatch(p, n)} for p in NOT_IN_A_DUMP}
        assert set().union(*of_reason.values()) == left
        assert all(of_reason.values()), "a reason for no metric"


def test_the_metrics_of_warnings_and_plots_are_those_of_a_run(dumped):
    names = set(json.loads((dumped / "metrics.jsonl").read_text().splitlines()[-1]))
    # no experts, validation, further numbers of the reward, conversations, tokens of several ages,
    # several epochs
    not_here = re.compile(
        r"actor/moe/|val/reward|val-core/|reward/\(\.\+\)/|conversation/|.*_by_age/|"
        r"critic/vf_loss_(first|last)"
    )
    read = [name for name in HEALTHY if not re.match("perf/rank_probe_ms/[23]", name)]
    assert [name for name in read if name not in names and not not_here.match(name)] == []
    for spec in SPECS:
        for _, pattern in spec.metrics:
            fits = re.match if spec.kind == "ranks" else re.fullmatch  # a prefix, or all of it
            logged = any(fits(pattern, name) for name in names)
            assert logged or "moe" in pattern or not_here.match(pattern), pattern


def test_entropies_are_those_of_the_actor(dumped):
    folder = dumped_steps(dumped)[1]
    stored = read_experience(folder, 2).old
    inside = stored.batch.response_mask_T > 0
    assert (stored.entropy_T[inside] > 0).all()
    # before the first update, the entropy is the mean surprisal of sampled tokens, up to noise
    mean = float(stored.entropy_T[inside].mean())
    assert mean == pytest.approx(float(-stored.logprobs_T[inside].mean()), rel=0.3)


def test_a_replay_without_an_engine_repeats_the_updates(dumped, tmp_path):
    replay = [f"trainer.replay={dumped}", "rollout.name=sglang"]  # whose servers nothing starts
    run = LaunchedRun(tmp_path, [*SETTINGS, *replay])
    assert run.codes() == [0, 0], run.texts()

    def kept(row: dict[str, float]) -> dict[str, float]:
        return {name: value for name, value in row.items() if not name.startswith(NOT_REPLAYED)}

    first, again = steps_of(dumped), steps_of(tmp_path)
    assert len(again) == STEPS
    for was, now in zip(first, again, strict=True):
        same = {name: was[name] for name in kept(now)}
        assert kept(now) == pytest.approx(same, rel=1e-5, abs=1e-6)
        assert "actor/grad_norm" in now
    times = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert all("timing_s/replay" in row and "timing_s/gen" not in row for row in times)


def test_only_the_chosen_step_of_the_chosen_rank_is_profiled(dumped):
    (trace,) = (dumped / "profile").iterdir()
    assert trace.name == "step_2_rank_1.json.gz"
    with gzip.open(trace) as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"aten::mm", "aten::addmm", "aten::matmul"} & names


def test_each_rank_reports_its_memory_and_speed(dumped):
    for line in (dumped / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for name in ("perf/rank_memory_gb", "perf/rank_probe_ms"):
            assert min(row[f"{name}/0"], row[f"{name}/1"]) > 0


def test_the_report_shows_the_dumped_tokens(dumped):
    (run,) = page_data([dumped])["runs"]
    assert {row["step"] for row in run["tokens"]} == {1, 2}
    assert all(row["pieces"] and row["numbers"]["advantage"] for row in run["tokens"])
    assert [event["kind"] for event in run["events"]] == ["start", "end"]
    assert run["events"][0]["text"].startswith("2 ranks; actor TP2")


def test_a_dump_of_two_ranks_is_read_by_one(dumped):
    folder = dumped_steps(dumped)[2]
    header = read_header_of(folder)
    episodes = read_episodes(folder, header)
    stored = read_experience(folder, header.ranks).old.batch
    assert len(episodes) == len(header.rows) == stored.num_sequences
    tokens = [torch.cat([each.prompt.token_ids, each.here.ids]) for each in episodes]
    assert torch.equal(torch.cat(tokens), stored.tokens_T.int())
    assert [each.parts[-1][0] for each in episodes] == [1] * len(tokens)
    held = [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]
    assert all(held), "each rank wrote the sequences it holds"
    assert {each.home for each in episodes} == {0}


def test_inspect_shows_a_step_and_an_episode(dumped, capsys):
    assert inspect([str(dumped)]) == 0
    text = capsys.readouterr().out
    assert "step 2: 16 sequences" in text
    assert inspect([str(dumped), "--step", "1", "--sequence", "3"]) == 0
    text = capsys.readouterr().out
    rows = [line for line in text.splitlines() if line.startswith("│")]
    header = read_header_of(dumped_steps(dumped)[1])
    stored = read_experience(dumped_steps(dumped)[1], 2, [3])
    assert len(rows) == len(stored.advantages_T)
    assert f"{float(stored.advantages_T[-1]):.4g}" in rows[-1]
    assert f"score {header.rows[3].score:.4g}" in text
    for arguments in (["--step", "9"], ["--sequence", "99"]):
        with pytest.raises(SystemExit, match="2"):
            inspect([str(dumped), *arguments])
    assert "the dumped steps are 1 to 2" in capsys.readouterr().err


def test_a_replay_of_a_damaged_dump_ends_with_its_folder(dumped, tmp_path):
    folder = tmp_path / "dump/rollouts/step_1"
    folder.mkdir(parents=True)
    for file in dumped_steps(dumped)[1].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "rank_1.safetensors").write_bytes(b"x" * 4000)
    run = LaunchedRun(tmp_path / "run", [*SETTINGS, f"trainer.replay={tmp_path / 'dump'}"])
    assert 2 in run.codes(), run.texts()
    assert f"{folder} cannot be read" in run.texts()
    assert "restore it from a copy" in run.texts()
    assert "Traceback" not in run.texts()


def test_a_run_that_died_and_goes_on_in_another_layout_keeps_no_dump_of_lost_work(
    dumped, tmp_path, capsys
):
    """A copy of the run as if it had died in step 4, after it saved step 1."""
    shutil.copytree(dumped, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints/global_step_2")
    write_status(tmp_path, Status("running", 2, STEPS))
    lost = tmp_path / "rollouts/step_3"
    shutil.copytree(tmp_path / "rollouts/step_2", lost)
    one_rank = [f"{role}.megatron.tensor_model_parallel_size=1" for role in ("actor", "ref")]
    one_rank += ["critic.megatron.pipeline_model_parallel_size=1"]
    settings = [*SETTINGS, *one_rank, "trainer.dump_rollouts=true", "trainer.save_freq=1"]
    run = LaunchedRun(tmp_path, settings, world=1)
    assert run.codes() == [0], run.texts()
    assert "resumed from" in run.texts()
    ranks = [read_header_of(folder).ranks for folder in dumped_steps(tmp_path).values()]
    assert ranks == [2, 1], "step 1 of the first start, step 2 of the second"
    names = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert names == ["step_1", "step_2", "step_3"]
    assert list(stale_dumps(tmp_path)) == [3], "not reached again"
    (found,) = page_data([tmp_path])["runs"]
    assert {row["step"] for row in found["tokens"]} == {1, 2}
    assert replay_folders(str(tmp_path)) == list(dumped_steps(tmp_path).values())
    assert inspect([str(tmp_path)]) == 0
    assert "step 2: 16 sequences" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        inspect([str(tmp_path), "--step", "3"])
