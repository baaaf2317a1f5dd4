"""Complete PPO iterations: the same metrics and weights in every combination of role layouts."""

from __future__ import annotations

import itertools
import json
import re
import warnings
from pathlib import Path

import pytest
import reward_functions
import torch
import torch.distributed as dist
from ranks import start_ranks
from safetensors.torch import load_file

STEPS = 2
COMMON = [
    "model.path=builtin:tiny",
    "model.dtype=float32",
    "data.task=arithmetic",
    "data.train_size=64",
    "data.val_size=8",
    "data.max_prompt_length=16",
    "data.max_response_length=7",
    "data.train_batch_size=6",
    "rollout.n=2",
    f"rollout.stop_token_ids={list(range(4, 50))}",
    "actor.ppo_mini_batch_size=4",
    "actor.optim.lr=1e-3",
    "actor.optim.eps=1e-2",
    "actor.ppo_epochs=2",
    "actor.entropy_coeff=0.01",
    "actor.positive_nll_coef=0.1",
    "actor.use_kl_loss=true",
    "critic.optim.lr=1e-3",
    "critic.optim.eps=1e-2",
    "actor.kl_loss_type=full",
    "actor.ptx_coef=0.5",
    "actor.ema_decay=0.9",
    "data.ptx_batch_size=3",
    "data.ptx_key=prompt",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_penalty=full",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.score_after_end=true",
    "algorithm.bootstrap_truncated=true",
    "critic.freeze=[self_attn]",
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.max_num_gen_batches=2",
    "reward.name=function",
    f"reward.function={reward_functions.__file__}:of_two",
    "algorithm.lam=0.95",
    f"trainer.total_training_steps={STEPS}",
    "trainer.test_freq=1",
]
TP, PP = "megatron.tensor_model_parallel_size", "megatron.pipeline_model_parallel_size"
VPP = "megatron.virtual_pipeline_model_parallel_size"
VARIANTS = {
    "actor TP2xPP2, critic TP4, reference PP4": [
        f"actor.{TP}=2", f"actor.{PP}=2", f"critic.{TP}=4", f"ref.{PP}=4",
    ],
    "actor TP2xPP2, critic and reference PP2, in one stream": [
        f"actor.{TP}=2", f"actor.{PP}=2", f"critic.{PP}=2", f"ref.{PP}=2",
        "actor.ppo_micro_batch_size_per_gpu=1",
    ],
    "actor PP2xVPP2, critic DP4, one sequence a micro-batch": [
        f"actor.{PP}=2", f"actor.{VPP}=2", "actor.ppo_micro_batch_size_per_gpu=1",
        "critic.ppo_micro_batch_size_per_gpu=1",
    ],
    "actor DP4, critic PP2, token budget": [
        f"critic.{PP}=2", "actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=20",
        "critic.use_dynamic_bsz=true", "critic.ppo_max_token_len_per_gpu=33",
    ],
}  # fmt: skip
ONE_BATCH = [
    "algorithm.filter_groups.enable=false", "trainer.total_training_steps=3", "trainer.save_freq=1",
    "trainer.checkpoint_hf=true", "algorithm.rollout_correction.rollout_is=token",
]  # fmt: skip
ON_POLICY = [
    "algorithm.filter_groups.enable=false", "actor.ppo_epochs=1", "actor.ppo_mini_batch_size=6",
    "algorithm.kl_penalty=kl", "actor.kl_loss_type=kl", "trainer.total_training_steps=1",
    "trainer.seed=4",
]  # fmt: skip
"""One mini-batch, once: no weight changes before the only pass over it."""
AHEAD = ["rollout.max_staleness=1", "rollout.mode=disaggregated"]
"""Recipes refuse these with the local engine, which generates at once: nothing overlaps, and all
else is as with servers apart."""
RESPONSES = "responses_*.safetensors"
HEAD = "score.weight"
"""The critic's value head, in the weights beside the actor's."""
RESUMED = ["trainer.resume_mode=resume_path", "trainer.resume_from_path={}/global_step_1"]


def _iterate(rank: int, world: int, cases: list[list[str]], out: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from mppo.parallel import device

    device.prepare_megatron()
    from mppo.parallel.launch import LaunchInfo
    from mppo.recipe.load import load_recipe
    from mppo.supervision.stop_request import listening
    from mppo.trainer.loop import train
    from mppo.trainer.run_setup import build_run

    store = f"file://{out}/store{world}"
    dist.init_process_group("gloo", store, rank=rank, world_size=world)
    info = LaunchInfo(rank, world, rank, world, "127.0.0.1", 1, "python")
    for i, case in enumerate(cases):
        run_dir = f"{out}/run{world}-{i}"
        files = [f"trainer.default_local_dir={run_dir}", f"data.ptx_files=[{out}/text.jsonl]"]
        overrides = [*COMMON, *case, *files]
        with listening() as stop:
            run = build_run(load_recipe(None, overrides), info, stop)
            train(run)
        buckets = run.roles.actor.weights.stream(1 << 20)
        weights = {name: tensor.clone() for bucket in buckets for name, tensor in bucket}
        buckets = run.roles.critic.weights.stream(1 << 20)
        (weights[HEAD],) = (t.clone() for bucket in buckets for name, t in bucket if name == HEAD)
        run.reporter.close()
        if rank == 0:
            torch.save(weights, f"{run_dir}/weights.pt")
    dist.barrier()
    dist.destroy_process_group()


def _results(run_dir: Path) -> tuple[list[dict], dict[str, torch.Tensor]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], torch.load(run_dir / "weights.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("iterations")
    texts = [{"prompt": f"{i} and {i} make {2 * i}."} for i in range(7)]
    (out / "text.jsonl").write_text("".join(f"{json.dumps(text)}\n" for text in texts))
    resumed = [key.format(out / "run1-2" / "checkpoints") for key in RESUMED]
    ahead = [*ONE_BATCH, *AHEAD]
    alone = [[], ONE_BATCH, ahead, [*ahead, *resumed], AHEAD, ON_POLICY]
    cases = [*VARIANTS.values(), [*ON_POLICY, *next(iter(VARIANTS.values()))]]
    start_ranks(_iterate, (1, alone, str(out)), 1)
    start_ranks(_iterate, (4, cases, str(out)), 4)
    names = zip(VARIANTS, range(len(VARIANTS)))
    variants = {name: _results(out / f"run4-{i}") for name, i in names}
    on_policy = [out / "run1-5", out / f"run4-{len(VARIANTS)}"]
    return _results(out / "run1-0"), variants, [out / f"run1-{i}" for i in range(5)], on_policy


@pytest.mark.parametrize("name", list(VARIANTS))
def test_role_layouts_change_no_metric_and_no_weight(results, name):
    (want, want_weights), variants, *_ = results
    got, got_weights = variants[name]
    layout_free = ("timing", "perf/", "time", "eps", "global_seqlen/")
    assert len(got) == len(want) == STEPS + 1
    for line, reference in zip(got, want):
        assert _names(line) == _names(reference)
        for key, value in reference.items():
            if isinstance(value, float) and not key.startswith(layout_free):
                assert line[key] == pytest.approx(value, rel=1e-4, abs=2e-5), key
    for weight_name, weight in got_weights.items():
        torch.testing.assert_close(weight, want_weights[weight_name], rtol=1e-4, atol=1e-5)


def _names(line: dict[str, float]) -> list[str]:
    """The names of metrics that do not count the ranks."""
    return sorted(name for name in line if not name.startswith("perf/rank_"))


NAMES = """
critic/{score,rewards,advantages,returns,values}/{mean,max,min}
critic/{vf_explained_var,vf_loss,vf_clipfrac,vpred_mean,grad_norm,lr}
actor/{pg_loss,pg_clipfrac,pg_clipfrac_lower,ppo_kl,entropy,kl_loss,kl_coef,grad_norm,lr}
actor/{reward_kl_penalty,reward_kl_penalty_coeff}
response_length/{mean,max,min,clip_ratio} prompt_length/{mean,max,min,clip_ratio}
response/aborted_ratio
timing_s/{gen,reward,old_log_prob,ref,values,adv,update_critic,update_actor,update_weights,step}
timing_per_token_ms/{gen,ref,values,adv,update_critic,update_actor}
perf/{total_num_tokens,time_per_step,throughput}
perf/{max_memory_allocated_gb,max_memory_reserved_gb,cpu_memory_used_gb}
perf/{rank_memory_gb,rank_probe_ms}/0
rollout_corr/{kl,k3_kl,training_ppl,rollout_ppl,log_ppl_diff,ppl_ratio,chi2_token,chi2_seq}
rollout_corr/{rollout_is_mean,rollout_is_max,rollout_is_min,rollout_is_std}
rollout_corr/rollout_is_eff_sample_size
global_seqlen/{min,max,minmax_diff,balanced_min,balanced_max,mean}
training/{global_step,epoch}
objective/{kl,entropy,non_score_reward,rlhf_reward,scores}
policy/{approxkl_avg,clipfrac_avg,entropy_avg} loss/{policy_avg,value_avg}
val/{clipfrac_avg,ratio,ratio_var,num_eos_tokens} {lr,episode,eps}
"""
"""The metric names of a step: verl's, then TRL's."""


def _spelt_out(pattern: str) -> list[str]:
    """``a/{b,c}`` as ``a/b`` and ``a/c``."""
    parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
    return ["".join(choice) for choice in itertools.product(*parts)]


def test_a_run_logs_every_metric_under_verls_and_trls_names(results):
    (lines, _), *_ = results
    names = [name for pattern in NAMES.split() for name in _spelt_out(pattern)]
    assert len(names) == len(set(names)) > 90
    for line in lines[1:]:
        assert [name for name in names if name not in line] == []


def test_the_first_step_starts_on_policy(results):
    (lines, _), variants, *_ = results
    for line in (lines[1], *(v[0][1] for v in variants.values())):
        assert abs(line["actor/reward_kl_penalty"]) < 1e-6  # reference and actor are one model
        assert line["training/rollout_logprob_diff_max"] < 1e-4


def test_the_policy_of_the_first_update_is_the_one_that_sampled_and_the_reference(results):
    for run_dir in results[3]:
        (step,) = _steps(run_dir)
        assert abs(step["actor/ppo_kl"]) < 1e-6
        assert step["val/ratio"] == pytest.approx(1, abs=1e-5)
        assert step["policy/approxkl_avg"] < 1e-10
        assert abs(step["objective/kl"]) < 1e-6
        assert abs(step["actor/kl_loss"]) < 1e-6
        assert abs(step["actor/reward_kl_penalty"]) < 1e-6
        assert step["actor/grad_norm"] > 1e-3


def test_initial_weights_follow_from_the_seed_in_every_layout(results):
    (_, of_seed_0), *_, run_dirs = results
    alone, together = (torch.load(run_dir / "weights.pt") for run_dir in run_dirs)
    for name in (HEAD, "lm_head.weight"):
        torch.testing.assert_close(together[name], alone[name], rtol=1e-4, atol=1e-5)
        other = of_seed_0[name].flatten()
        assert torch.cosine_similarity(alone[name].flatten(), other, dim=0).abs() < 0.5


def test_the_options_have_an_effect(results):
    (lines, _), *_ = results
    assert 1 <= lines[1]["train/num_gen_batches"] <= 2
    assert 0 < lines[1]["train/informative_groups"] <= 1
    assert lines[2]["actor/ptx_loss"] < lines[1]["actor/ptx_loss"]
    assert lines[2]["actor/reward_kl_penalty"] > 0  # a KL over the vocabulary is never negative
    assert lines[1]["val/num_eos_tokens"] > 0


def test_the_engine_follows_the_actor_after_every_sync(results):
    (lines, _), variants, *_ = results
    for line in (lines[2], *(v[0][2] for v in variants.values())):
        assert line["training/rollout_logprob_diff_max"] < 1e-4


LAGS = ("training/weight_version_lag_mean", "training/weight_version_lag_max")


def _steps(run_dir: Path) -> list[dict[str, float]]:
    """The metrics of each step."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").open())
    return [line for line in lines if LAGS[0] in line]


def _lags(run_dir: Path) -> list[tuple[float, float]]:
    """Mean and largest age of each step's tokens, in updates."""
    return [(line[LAGS[0]], line[LAGS[1]]) for line in _steps(run_dir)]


def _checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"global_step_{step}"


def _model(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    """The actor's weights after a step."""
    return load_file(run_dir / "hf" / f"global_step_{step}" / "model.safetensors")


def _drawn(run_dir: Path, step: int) -> dict:
    """The position in the order of prompts of a checkpoint."""
    state = _checkpoint(run_dir, step) / "run.json"
    return json.loads(state.read_text())["parts"]["prompts"]


def test_a_batch_generated_ahead_is_one_update_old(results):
    _, plain, ahead, resumed, dynamic = results[2]
    assert _lags(plain) == [(0, 0)] * 3
    assert _lags(ahead) == [(0, 0), (1, 1), (1, 1)]
    assert _lags(resumed) == [(1, 1), (1, 1)]
    first, second = _lags(
        dynamic
    )  # if the first batch does not suffice, the second one is not prefetched
    assert first == (0, 0)
    assert 0 < second[0] <= second[1] == 1


def test_the_first_step_is_the_same_with_and_without_a_batch_ahead(results):
    _, plain, ahead, _, _ = results[2]
    for step, same in ((1, True), (3, False)):
        one, other = (_model(run, step) for run in (plain, ahead))
        # the probabilities of responses that were generated beside others may round differently
        differ = max(float((other[name] - tensor).abs().max()) for name, tensor in one.items())
        assert (differ < 1e-5) == same, differ


def test_a_resumed_run_trains_on_the_prefetched_batch(results):
    _, _, ahead, resumed, _ = results[2]
    saved = [step for step in (1, 2, 3) if [*_checkpoint(ahead, step).glob(RESPONSES)]]
    assert saved == [1, 2], "none is ahead of the last step"
    for step in (2, 3):
        want, got = (_model(run, step) for run in (ahead, resumed))
        assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    for want, got in zip(_steps(ahead)[1:], _steps(resumed), strict=True):
        names = [name for name in want if name.startswith(("actor/", "critic/", "training/"))]
        assert [want[name] for name in names] == [got[name] for name in names]


def test_prefetching_neither_loses_nor_repeats_a_prompt(results):
    _, plain, ahead, resumed, _ = results[2]
    for step in (1, 2, 3):
        assert _drawn(ahead, step) == _drawn(plain, step)
        assert step == 1 or _drawn(resumed, step) == _drawn(plain, step)
