"""A resumed run ends like an uninterrupted one: bit for bit in the same layout."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from pathlib import Path

import pytest
import reward_functions
import torch
import torch.distributed as dist
from ranks import start_ranks
from saved_moments import saved_moments

COMMON = [
    "model.dtype=float32",
    "data.task=arithmetic",
    "data.train_size=20",
    "data.val_size=4",
    "data.max_prompt_length=16",
    "data.max_response_length=5",
    "data.train_batch_size=8",
    "actor.ppo_mini_batch_size=4",
    "actor.optim.lr=1e-3",
    "actor.optim.eps=1e-2",
    "actor.optim.lr_decay_style=cosine",
    "actor.shuffle=true",
    "critic.optim.lr=1e-3",
    "critic.optim.eps=1e-2",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.kl_coef=0.1",
    "trainer.warm_start_steps=2",
    "trainer.total_training_steps=4",
    "trainer.save_freq=2",
    "trainer.test_freq=4",
    "trainer.val_before_train=false",
]
TP, PP = "megatron.tensor_model_parallel_size=2", "megatron.pipeline_model_parallel_size=2"
PEAK = 0.05
REMEMBERING = [
    "model.path=builtin:tiny",
    "critic.optim.lr_warmup_steps=2",
    "actor.ema_decay=0.9",
    "actor.ptx_coef=0.5",
    "data.ptx_files=[{out}/text.jsonl]",
    "data.ptx_key=text",
    "data.ptx_batch_size=3",
    "algorithm.normalize_scores.mode=running",
    "algorithm.use_pf_ppo=true",
    "algorithm.pf_ppo.reweight_method=max_random",
    "reward.name=function",
    f"reward.function={reward_functions.__file__}:of_three",
    f"trainer.peak_tflops_per_rank={PEAK}",
]
"""Options with state beside the weights: adaptive KL, schedules and others."""
SETUPS = {
    "dense": [*REMEMBERING, f"actor.{TP}", f"critic.{PP}"],
    "experts": ["model.path=builtin:tiny-moe", "actor.megatron.expert_model_parallel_size=2"],
}
ALL = "{parameters: true, gradients: true, optimizer: true}"
RESUMED = {
    "resumed": [],
    "resumed, offloaded": [
        f"actor.megatron.offload={ALL}",
        f"critic.megatron.offload={ALL}",
        "ref.megatron.offload.parameters=true",
    ],
}
OTHER_LAYOUT = [*REMEMBERING, f"actor.{PP}"]
SAO = [
    "model.path=builtin:tiny",
    "algorithm.preset=sao",
    "algorithm.use_kl_in_reward=false",
    "actor.ppo_mini_batch_size=8",
    "trainer.critic_warmup=1",
    "reward.name=function",
    f"reward.function={reward_functions.__file__}:of_three",
]
SAO_OTHER_DP = [*SAO, f"actor.{TP}", f"critic.{TP}"]
"""One data-parallel rank in place of two."""
SAME_LAYOUT = [*((name, further) for name in SETUPS for further in RESUMED), ("sao", "resumed")]
COMPARED = ("actor/", "critic/", "response", "prompt", "training/", "val", "objective/")


def _run(info, overrides: list[str], run_dir: Path) -> None:
    from delayed_save import delay_copies_in_loop

    from mppo.models.adam import steps_taken
    from mppo.recipe.load import load_recipe
    from mppo.supervision.stop_request import listening
    from mppo.trainer.loop import train
    from mppo.trainer.run_setup import build_run

    overrides = [*COMMON, *overrides, f"trainer.default_local_dir={run_dir}"]
    with listening() as stop:
        run = build_run(load_recipe(None, overrides), info, stop)
        delay_copies_in_loop(run)  # without the wait for copies, a save is of the next step
        train(run)
    roles = [getattr(run.roles, name) for name in run.roles.trained]
    counts = {role.name: steps_taken(role.optimizer.parts) for role in roles}
    (run_dir / f"adam_{info.rank}.json").write_text(json.dumps(counts))
    with run.roles.placement.sending_weights():
        for role in roles:
            if role.name == "actor" or not run.roles.placement.moves_weights:
                role.weights.save(run_dir / role.name)
        if run.roles.actor.weights.average is not None:
            run.roles.actor.weights.save_average(run_dir / "actor_ema")
    run.reporter.close()


def _half_done(run_dir: Path, copy: Path) -> None:
    """``copy`` is ``run_dir`` as it was when its first checkpoint was complete."""
    if dist.get_rank() == 0:
        shutil.copytree(run_dir, copy)
        shutil.rmtree(copy / "checkpoints/global_step_4")
        shutil.rmtree(copy / "actor")
        shutil.rmtree(copy / "critic", ignore_errors=True)
    dist.barrier()


def _worker(rank: int, out: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from mppo.parallel import device

    device.prepare_megatron()
    from mppo.parallel.launch import LaunchInfo

    dist.init_process_group("gloo", f"file://{out}/store", rank=rank, world_size=2)
    info = LaunchInfo(rank, 2, rank, 2, "127.0.0.1", 1, "python")
    filled = {name: [key.replace("{out}", str(out)) for key in SETUPS[name]] for name in SETUPS}
    for name, setup in filled.items():
        _run(info, setup, out / name)
        for resumed, further in RESUMED.items():
            _half_done(out / name, out / f"{name} {resumed}")
            _run(info, [*setup, *further], out / f"{name} {resumed}")
    _half_done(out / "dense", out / "other layout")
    other = [key.replace("{out}", str(out)) for key in OTHER_LAYOUT]
    _run(info, other, out / "other layout")
    _run(info, SAO, out / "sao")
    for resumed, settings in {"sao resumed": SAO, "sao, other dp": SAO_OTHER_DP}.items():
        _half_done(out / "sao", out / resumed)
        _run(info, settings, out / resumed)
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("resume")
    texts = [json.dumps({"text": f"{n} and {n + 1} are {2 * n + 1}"}) for n in range(7)]
    (out / "text.jsonl").write_text("\n".join(texts))
    start_ranks(_worker, (out,), 2)
    return out


def _metrics(run_dir: Path) -> list[dict[str, float]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(("name", "further"), SAME_LAYOUT)
def test_two_steps_resume_and_two_more_are_four_steps_bitwise(runs, name, further):
    complete, resumed = runs / name, runs / f"{name} {further}"
    want, got = _weights(complete / "actor"), _weights(resumed / "actor")
    assert all(torch.equal(want[key], got[key]) for key in want)
    lines, again = _metrics(complete), _metrics(resumed)
    assert [line["step"] for line in again] == [line["step"] for line in lines] == [1, 2, 3, 4]
    for line, other in zip(lines, again):
        for key, value in line.items():
            if key.startswith(COMPARED):
                assert other[key] == value, (line["step"], key)


@pytest.mark.parametrize("further", RESUMED)
def test_the_moving_average_resumes_bitwise(runs, further):
    weights = _weights(runs / "dense/actor")
    want, got = _weights(runs / "dense/actor_ema"), _weights(runs / f"dense {further}/actor_ema")
    assert all(torch.equal(want[key], got[key]) for key in want)
    assert any(not torch.equal(want[key], weights[key]) for key in want)


def test_the_resumed_state_is_not_trivial(runs):
    lines = _metrics(runs / "dense")
    assert len({line["actor/reward_kl_penalty_coeff"] for line in lines}) == 4
    assert len({line["actor/ptx_loss"] for line in lines}) == 4
    assert len({line["critic/raw_score/mean"] - line["critic/score/mean"] for line in lines}) == 4


def test_learning_rates_follow_the_schedules_of_their_roles(runs):
    lines = _metrics(runs / "dense")
    cosine = [1e-3 * (1 + math.cos(math.pi * step / 4)) / 2 for step in (0, 1, 2, 3)]
    assert [line["actor/lr"] for line in lines] == pytest.approx(cosine)
    assert [line["critic/lr"] for line in lines] == pytest.approx([0.0, 5e-4, 1e-3, 1e-3])


def test_an_update_logs_its_flops(runs):
    for line in _metrics(runs / "dense"):
        for role in ("actor", "critic"):
            rate = line[f"perf/tflops_per_rank/{role}"]
            assert rate > 0
            assert line[f"perf/mfu/{role}"] == pytest.approx(rate / PEAK)
    assert "perf/mfu/actor" not in _metrics(runs / "experts")[0]


@pytest.mark.parametrize(("name", "further"), SAME_LAYOUT)
def test_the_checkpoints_of_both_runs_hold_the_same_bytes(runs, name, further):
    from mppo.checkpoint.folder import read_manifest

    step = "checkpoints/global_step_4"
    complete = read_manifest(runs / name / step)
    resumed = read_manifest(runs / f"{name} {further}" / step)
    shards = [file for file in complete.files if file.endswith(".distcp")]
    assert len(shards) >= 4
    assert all(complete.files[file] == resumed.files[file] for file in shards)


def test_in_another_layout_the_weights_agree_to_a_millionth(runs):
    want, got = _weights(runs / "dense/actor"), _weights(runs / "other layout/actor")
    assert max((want[key] - got[key]).abs().max().item() for key in want) < 1e-6
    assert [line["step"] for line in _metrics(runs / "other layout")] == [1, 2, 3, 4]


def test_sao_resumes_with_another_number_of_data_parallel_ranks(runs):
    """The critic had two updates in each step, the actor one in each but the first."""
    complete, resumed = runs / "sao", runs / "sao, other dp"
    for folder, rank in ((complete, 0), (complete, 1), (resumed, 0), (resumed, 1)):
        counts = json.loads((folder / f"adam_{rank}.json").read_text())
        assert counts == {"actor": 3, "critic": 8}
    for role in ("actor", "critic"):
        want, got = _weights(complete / role), _weights(resumed / role)
        assert max((want[key] - got[key]).abs().max().item() for key in want) < 1e-6
        saved = Path("checkpoints/global_step_4") / role
        moments, others = saved_moments(complete / saved), saved_moments(resumed / saved)
        assert moments.keys() == others.keys()
        assert len(moments) >= 10
        for key, moment in moments.items():
            assert (others[key] - moment).abs().max() <= 1e-3 * moment.abs().max(), key
    lines, again = _metrics(complete), _metrics(resumed)
    assert [line["step"] for line in again] == [1, 2, 3, 4]
    for line, other in zip(lines[2:], again[2:]):
        for key in ("critic/score/mean", "prompt_length/mean", "critic/lr", "actor/lr"):
            assert other[key] == line[key], (line["step"], key)
        for key in ("critic/grad_norm", "critic/values/mean", "actor/grad_norm"):
            assert other[key] == pytest.approx(line[key], rel=1e-3), (line["step"], key)
