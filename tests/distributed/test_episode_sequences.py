"""Episodes of several sequences: the same numbers as the same tokens in one sequence.

A conversation's turns are written down twice: as one sequence, in which the environment's tokens
have no loss, and as a sequence for each turn, whose history precedes it. Both are dumped and
replayed. The policy's tokens see the same tokens before them, so losses, gradients and weights must
be equal, in every layout.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import start_ranks

from mppo.dumps.inspection import main

TP, PP = "megatron.tensor_model_parallel_size", "megatron.pipeline_model_parallel_size"
CP = "megatron.context_parallel_size"
COMMON = [
    "model.path=builtin:tiny",
    "model.dtype=float32",
    "data.task=arithmetic",
    "data.train_size=64",
    "data.val_size=0",
    "data.max_prompt_length=16",
    "data.max_response_length=24",
    "data.train_batch_size=6",
    "rollout.n=2",
    f"rollout.stop_token_ids={list(range(4, 50))}",
    "rollout.agent.path=mppo.agents.number_hints:hint",
    "rollout.agent.max_turns=3",
    "rollout.agent.arguments={too_low: '<', too_high: '>', unclear: '?'}",
    "actor.ppo_mini_batch_size=4",
    "actor.optim.lr=1e-3",
    "actor.optim.eps=1e-2",
    "actor.entropy_coeff=0.01",
    "critic.optim.lr=1e-3",
    "critic.optim.eps=1e-2",
    "trainer.test_freq=-1",
]
DUMPED = [*COMMON, "trainer.total_training_steps=1", "trainer.dump_rollouts=true"]
REPLAYED = [*COMMON, "trainer.total_training_steps=2"]
ALGORITHMS = {
    "gae": ["algorithm.lam=1.0"],
    "gae, means of responses": [
        "algorithm.lam=1.0", "actor.loss_agg_mode=seq-mean-token-mean",
        "critic.loss_agg_mode=seq-mean-token-sum", "actor.ppo_epochs=2", "actor.shuffle=true",
    ],
    "grpo with KL in the reward": [
        "algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.kl_coef=0.3", "actor.loss_agg_mode=seq-mean-token-sum-norm",
    ],
    "rloo, scores by group": [
        "algorithm.adv_estimator=rloo", "algorithm.normalize_scores.mode=group",
    ],
    "opo": ["algorithm.adv_estimator=opo", "algorithm.normalize_scores.mode=batch"],
}  # fmt: skip
GAE, GRPO = list(ALGORITHMS)[1:3]
LAYOUTS = {
    "DP3": (3, []),
    "TP2": (2, [f"actor.{TP}=2", f"critic.{TP}=2"]),
    "PP2, one stream": (
        2, [f"actor.{PP}=2", f"critic.{PP}=2", f"ref.{PP}=2",
            "actor.ppo_micro_batch_size_per_gpu=1"],
    ),
    "CP2, token budget": (
        2, [f"actor.{CP}=2", f"critic.{CP}=2", "actor.use_dynamic_bsz=true",
            "actor.ppo_max_token_len_per_gpu=64"],
    ),
}  # fmt: skip


def _split(episode):
    """The same tokens as one sequence for each turn of the policy."""
    from mppo.batch.episode import NO_WEIGHTS, Episode, EpisodeTokens

    known, start, sequences = episode.prompt.token_ids, 0, []
    for version, count in episode.parts:
        ids = episode.here.ids[start : start + count]
        if version != NO_WEIGHTS:
            tokens = EpisodeTokens(ids, episode.here.logprobs[start : start + count])
            prompt = replace(episode.prompt, token_ids=known)
            sequences.append(Episode.sampled(prompt, tokens, "stop", version))
        known, start = torch.cat([known, ids]), start + count
    *earlier, last = sequences
    last = replace(last, finish_reason=episode.finish_reason, score=episode.score)
    return replace(last, earlier=tuple(earlier))


def _build(overrides, rank, world, stop):
    from mppo.parallel.launch import LaunchInfo
    from mppo.recipe.load import load_recipe
    from mppo.trainer.run_setup import build_run

    info = LaunchInfo(rank, world, rank, world, "127.0.0.1", 1, "python")
    return build_run(load_recipe(None, overrides), info, stop)


def _started(rank, world, out):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from mppo.parallel import device

    device.prepare_megatron()
    dist.init_process_group("gloo", f"file://{out}/store{world}", rank=rank, world_size=world)


def _write_down(rank: int, world: int, out: str) -> None:
    """Generate one step's conversations, and dump them as whole and as split episodes."""
    _started(rank, world, out)
    from mppo.dumps.step_dump import read_header_of, step_folder
    from mppo.supervision.stop_request import listening
    from mppo.trainer.advantages import estimate
    from mppo.trainer.dump import dump_step, read_episodes
    from mppo.trainer.forward_phase import ForwardPhase
    from mppo.trainer.generation.rollout_stage import Rollout, pack_scored
    from mppo.trainer.loop import train

    with listening() as stop:
        run = _build([*DUMPED, f"trainer.default_local_dir={out}/first"], rank, world, stop)
        train(run)
        folder = step_folder(Path(out) / "first", 1)
        episodes = read_episodes(folder, read_header_of(folder))
        for name, written in {"whole": episodes, "split": [_split(e) for e in episodes]}.items():
            run = _build([*DUMPED, f"trainer.default_local_dir={out}/{name}"], rank, world, stop)
            rollout = Rollout(written, pack_scored(run, written), torch.empty(0), [])
            forward = ForwardPhase(run.roles, rollout.batch)
            for roles in forward.passes:
                forward.compute(roles)
            outputs = forward.outputs()
            experience = estimate(outputs, run.recipe.algorithm, 0.0)
            dump_step(run, 1, rollout, outputs, experience)
    dist.destroy_process_group()


def _replay(rank: int, world: int, cases: list[tuple[str, list[str]]], out: str) -> None:
    """Train on each case's dump; write metrics and weights into ``out/NAME``."""
    _started(rank, world, out)
    from mppo.supervision.stop_request import listening
    from mppo.trainer.loop import train

    for name, overrides in cases:
        with listening() as stop:
            run = _build([*REPLAYED, *overrides, f"trainer.default_local_dir={out}/{name}"],
                         rank, world, stop)  # fmt: skip
            train(run)
        buckets = run.roles.actor.weights.stream(1 << 20)
        weights = {name: tensor.clone() for bucket in buckets for name, tensor in bucket}
        run.reporter.close()
        if rank == 0:
            torch.save(weights, f"{out}/{name}/weights.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs ``ALGORITHM-whole`` and ``-split`` in one process, and splits in the layouts."""
    out = tmp_path_factory.mktemp("sequences")
    start_ranks(_write_down, (1, str(out)), 1)
    alone = [
        (f"{name}-{kind}", [*options, f"trainer.replay={out}/{kind}"])
        for name, options in ALGORITHMS.items()
        for kind in ("whole", "split")
    ]
    start_ranks(_replay, (1, alone, str(out)), 1)
    for world in (2, 3):
        cases = [
            (f"{name}-{layout}", [*ALGORITHMS[name], *options, f"trainer.replay={out}/split"])
            for layout, (ranks, options) in LAYOUTS.items()
            for name in (GAE, GRPO)
            if ranks == world
        ]
        start_ranks(_replay, (world, cases, str(out)), world)
    return out


def test_the_conversations_have_several_turns(folder):
    from mppo.dumps.step_dump import read_header_of, step_folder

    whole, split = (read_header_of(step_folder(folder / name, 1)) for name in ("whole", "split"))
    assert len(whole.rows) == 12
    assert len(split.rows) > 18
    assert len({row.episode for row in split.rows}) == 12
    assert len({row.score for row in whole.rows}) > 1


def test_inspection_shows_the_episode_of_each_sequence(folder, capsys):
    assert main([str(folder / "split")]) == 0
    shown = capsys.readouterr().out
    assert "episode" in shown
    assert main([str(folder / "whole")]) == 0
    assert "episode" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_sequence_and_several_train_alike(folder, name):
    _compare(folder / f"{name}-split", folder / f"{name}-whole")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [GAE, GRPO])
def test_every_layout_trains_alike(folder, name, layout):
    _compare(folder / f"{name}-{layout}", folder / f"{name}-whole")


def _metrics(run: Path) -> list[dict[str, float]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["step"]]


def _compare(got: Path, want: Path) -> None:
    """Losses, gradient norms and weights of both steps."""
    metrics, others = _metrics(got), _metrics(want)
    assert len(metrics) == len(others) == 2
    for found, expected in zip(metrics, others, strict=True):
        names = [
            name
            for name in expected
            if name.endswith(("_loss", "grad_norm"))
            or name.startswith(("critic/score", "objective"))
        ]
        assert len(names) > 6
        for name in names:
            assert found[name] == pytest.approx(expected[name], rel=2e-5, abs=2e-6), name
    weights, other = torch.load(got / "weights.pt"), torch.load(want / "weights.pt")
    for name, weight in other.items():
        torch.testing.assert_close(weights[name], weight, atol=5e-6, rtol=1e-4, msg=name)
