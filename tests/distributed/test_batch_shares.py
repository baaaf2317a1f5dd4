"""A batch shared out over ranks: the numbers of one rank, and a part of its bytes."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import start_ranks
from torch import Tensor

from mppo import register
from mppo.algos.token_axis import sequence_token_indices
from mppo.batch.batch import Batch
from mppo.batch.episode import Episode, EpisodeTokens, with_scores
from mppo.batch.outputs import Experience, Outputs
from mppo.batch.prompt import Prompt
from mppo.batch.score import ResponseScore
from mppo.parallel.layout import Layout
from mppo.recipe.sections.algorithm import (
    TOKEN_BASELINES,
    AlgorithmConfig,
    PFPPOConfig,
    RolloutCorrectionConfig,
)
from mppo.recipe.sections.roles import ActorConfig, CriticConfig, PolicyLossConfig

LENGTHS = [3, 0, 5, 2, 9, 1, 40, 4, 7, 0, 12, 6]
LIMIT = 40
ESTIMATORS = register.estimator.own
SEGMENTS = {"segment_credit": True, "lam_length_adaptive_alpha": 1.5, "lam_value": 1.0}
SCANS = ("gae", "reinforce_plus_plus", "remax", *TOKEN_BASELINES)
"""Estimators whose recursion over tokens rounds according to the position on the token axis."""


def outputs_of(lengths: list[int], samples: int = 3) -> Outputs:
    """Random outputs of responses of the given lengths with prompts of two tokens."""
    random = torch.Generator().manual_seed(5)
    mask_T = torch.cat([torch.tensor([0.0, 0.0] + [1.0] * n) for n in lengths])
    starts = [2 * i + sum(lengths[:i]) for i in range(len(lengths))]
    for start in (start for start, n in zip(starts, lengths) if n >= 9):
        mask_T[start + 5 : start + 7] = 0.0  # an environment's tokens between two turns
    count = len(lengths)

    def numbers() -> Tensor:
        return torch.randn(len(mask_T), generator=random) * mask_T

    batch = Batch(
        tokens_T=torch.arange(len(mask_T)),
        cu_seqlens=torch.tensor([0, *(n + 2 for n in lengths)]).cumsum(0),
        response_mask_T=mask_T,
        rollout_logprobs_T=-numbers().abs(),
        group_B=torch.arange(count) // samples,
        scores_B=torch.randn(count, generator=random),
        truncated_B=torch.arange(count) % 2 == 1,
        weight_version_T=torch.arange(len(mask_T)) % 3,
        token_rewards_T=numbers(),
        parts_B=torch.randn(count, 2, generator=random),
    )
    logprobs = -numbers().abs(), -numbers().abs()
    return Outputs(batch, *logprobs, numbers(), squares_T=numbers().abs())


def shared(outputs: Outputs) -> Outputs:
    """The part of this rank."""
    from mppo.batch.shares import share_out

    batch = share_out(outputs.batch)
    where_T = sequence_token_indices(outputs.batch.cu_seqlens, batch.held_H)
    names = [f.name for f in fields(outputs) if f.name.endswith("_T")]
    return replace(outputs, batch=batch, **{n: getattr(outputs, n)[where_T] for n in names})


def same(part: Tensor, complete_T: Tensor, batch: Batch, complete: Batch, exact: bool) -> None:
    """Compare a tensor of the tokens held with that of all tokens."""
    expected = complete_T[sequence_token_indices(complete.cu_seqlens, batch.held_H)]
    tolerance = 0.0 if exact else 2e-6
    torch.testing.assert_close(part, expected, atol=tolerance, rtol=tolerance)


def compare_estimates() -> None:
    from mppo.trainer.advantages import current_kl, estimate
    from mppo.trainer.metrics import experience_metrics, mismatch_metrics

    alone = outputs_of(LENGTHS)
    episode_B = torch.arange(len(LENGTHS)) // 3
    several = replace(alone, batch=replace(alone.batch, episode_B=episode_B))
    correction = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_batch_normalize=True)
    options = [{}, {"whiten_rewards": True, "rollout_correction": correction}]
    cases = [*itertools.product(ESTIMATORS, options), ("gae", {"gae_unit": "turn", "lam": 0.9})]
    cases.append(("gae", SEGMENTS))
    for estimator, option in cases:
        complete = several if option is SEGMENTS else alone
        part = shared(complete)
        for whiten_over in ("batch", "group"):
            algorithm = AlgorithmConfig(
                adv_estimator=estimator,
                gdpo_reward_keys=("first", "second"),
                use_kl_in_reward=True,
                whiten_over=whiten_over,
                mask_truncated=True,
                **option,
            )
            baseline_B = complete.batch.scores_B.flip(0)
            one, here = (
                estimate(outputs, algorithm, 0.1, baseline_scores_B=baseline_B)
                for outputs in (complete, part)
            )
            exact = estimator not in SCANS
            for name in ("rewards_T", "advantages_T", "returns_T", "loss_weight_T"):
                same(getattr(here, name), getattr(one, name), part.batch, complete.batch, exact)
            assert current_kl(part, algorithm) == current_kl(complete, algorithm)
            unit = algorithm.gae_unit
            of_one = experience_metrics(one, unit) | mismatch_metrics(complete, 4)
            of_part = experience_metrics(here, unit) | mismatch_metrics(part, 4)
            assert of_part == (of_one if exact else pytest.approx(of_one, abs=2e-6, rel=2e-6))


def compare_targets(folder: Path) -> None:
    from mppo.batch.gathers import gather_of_mini_batch
    from mppo.dumps.experience_files import read_experience
    from mppo.trainer.advantages import estimate
    from mppo.trainer.batch_selection import resample_experience
    from mppo.trainer.dump import write_shares
    from mppo.trainer.targets import policy_targets, value_targets

    complete = outputs_of(LENGTHS)
    algorithm = AlgorithmConfig(adv_estimator="rloo")
    one, here = (
        resample_experience(estimate(outputs, algorithm, 0.0), PFPPOConfig(), seed=3)
        for outputs in (complete, shared(complete))
    )
    whole, batch = one.old.batch, here.old.batch
    modes = register.policy_loss.own
    aggregations = ActorConfig.model_fields["loss_agg_mode"].annotation.__args__
    pairs = [(mode, "token-mean") for mode in modes] + [("vanilla", agg) for agg in aggregations]
    indices = [7, 2, 0, 11, 5, 6]
    kept = [index for index in indices if batch.places([index]).item() >= 0]

    def compare(mine, everything) -> None:
        for field in fields(mine):
            if field.name.endswith("_T"):
                positions = [indices.index(index) for index in kept]
                where = sequence_token_indices(everything.cu_seqlens, positions)
                expected = getattr(everything, field.name)[where]
                assert torch.equal(getattr(mine, field.name), expected), field.name

    def gather_of(chosen):
        return gather_of_mini_batch(batch, chosen)

    for mode, aggregation in pairs:
        loss = PolicyLossConfig(
            loss_mode=mode, clip_cov_lb=-9.0, clip_cov_ratio=0.3, kl_cov_ratio=0.3
        )
        actor = ActorConfig(policy_loss=loss, loss_agg_mode=aggregation)
        compare(
            policy_targets(here, indices, actor, LIMIT, 1, gather_of),
            policy_targets(one, indices, actor, LIMIT, 1),
        )
        critic = CriticConfig(loss_agg_mode=aggregation)
        for unit in ("token", "turn"):
            compare(
                value_targets(here, indices, critic, LIMIT, gather_of, unit),
                value_targets(one, indices, critic, LIMIT, gae_unit=unit),
            )
    stored, world = folder / "stored", dist.get_world_size()
    write_shares(stored, here)
    dist.barrier()
    for held in (None, [0, 3, whole.num_sequences - 1], []):
        read = read_experience(stored, world, held)
        where = sequence_token_indices(whole.cu_seqlens, range(12) if held is None else held)
        assert torch.equal(read.advantages_T, one.advantages_T[where])
        assert torch.equal(read.old.batch.tokens_T, whole.tokens_T[where])
        assert torch.equal(read.old.batch.scores_B, whole.scores_B)


def token_bytes(experience: Experience) -> int:
    """Bytes of the tensors of tokens."""
    parts = (experience, experience.old, experience.old.batch)
    return sum(
        getattr(part, f.name).nbytes for part in parts for f in fields(part) if f.name[-2:] == "_T"
    )


def held_bytes() -> int:
    from mppo.trainer.advantages import estimate

    outputs = shared(outputs_of([100 + n for n in LENGTHS] * 8))
    return token_bytes(estimate(outputs, AlgorithmConfig(), 0.0))


def move_from_one_rank() -> None:
    """Responses that all arrived on the last rank move to even homes, which then stay."""
    from mppo.batch.selection import select_batch
    from mppo.batch.shares import share_out
    from mppo.models.microbatch import select_held

    batch, world, rank = outputs_of(LENGTHS).batch, dist.get_world_size(), dist.get_rank()
    kept = range(batch.num_sequences) if rank == world - 1 else ()
    received = replace(
        select_held(batch, list(kept)), home_B=torch.full_like(batch.home_B, world - 1)
    )
    moved, expected = share_out(received), share_out(batch)
    for field in fields(batch):
        value = getattr(expected, field.name)
        if isinstance(value, Tensor):
            assert torch.equal(getattr(moved, field.name), value), field.name
    assert share_out(moved) is moved
    # dynamic sampling: homes follow the sequences
    chosen = [4, 1, 6, 10]
    part, complete = select_batch(moved, chosen), select_batch(batch, chosen)
    same(part.tokens_T, complete.tokens_T, part, complete, exact=True)


def pack_where_responses_arrived() -> None:
    """Every rank packs the responses that it received; the last one received none."""
    from mppo.batch.packing import pack_episodes
    from mppo.batch.shares import pack_at_home
    from mppo.models.microbatch import select_held

    world, rank = dist.get_world_size(), dist.get_rank()
    made = [
        Episode.sampled(
            Prompt(i // 2, (1, 2), "t", "", ""),
            EpisodeTokens(
                range(3, 3 + n), [-0.1 * i] * n, torch.full((n + 1, 2, 1), i, dtype=torch.int16)
            ),
            "stop" if i % 2 else "length",
            i % 3,
        )
        for i, n in enumerate(LENGTHS)
    ]
    scores = torch.linspace(0, 1, len(made)).tolist()
    made = with_scores(made, list(map(ResponseScore, scores)))
    homes = [i % (world - 1) for i in range(len(made))]
    episodes = [
        replace(each, home=home) if home == rank else each.elsewhere(home)
        for each, home in zip(made, homes, strict=True)
    ]
    held = [i for i, home in enumerate(homes) if home == rank]
    packed = pack_at_home(episodes, end_slots_below=LIMIT)
    complete = pack_episodes(made, end_slots_below=LIMIT)
    assert packed.home_B.tolist() == homes
    expected = replace(select_held(complete, held), home_B=packed.home_B)
    for field in fields(packed):
        value, other = getattr(packed, field.name), getattr(expected, field.name)
        if isinstance(value, Tensor):
            assert torch.equal(value, other), field.name
            assert value.dtype == other.dtype, field.name
    # one response without expert choices: nobody uses them
    _, _, third, *others = episodes
    tokens = third.tokens and replace(third.tokens, experts=None)
    some = [replace(third, routed=None, tokens=tokens), *others]
    without = pack_at_home(some)
    assert without.routed_experts_T.shape == (len(without.tokens_T), 0, 0)


def fetch_what_a_rank_uses(layout: Layout) -> None:
    """A stage gets the expert choices of its own layers; hidden states and targets the last one."""
    from mppo.batch.gathers import gather_of_mini_batch
    from mppo.batch.microbatches import MicroBatchLimits, plan_microbatches
    from mppo.batch.mini_batch import PassInputs
    from mppo.models.work_share import PassMoves, fetch_share
    from mppo.trainer.advantages import estimate
    from mppo.trainer.targets import fetch_targets, value_targets

    complete, layers_of = outputs_of(LENGTHS), [[0, 2], [1]]
    tokens = len(complete.batch.tokens_T)
    choices_T = torch.arange(tokens * 3 * 2, dtype=torch.int16).view(tokens, 3, 2)
    batch = replace(complete.batch, routed_experts_T=choices_T)
    part = shared(replace(complete, batch=batch))
    states_T = torch.arange(tokens * 5.0).view(tokens, 5)
    held = PassInputs(states_T[sequence_token_indices(batch.cu_seqlens, part.batch.held_H)])
    plan = plan_microbatches(
        batch.lengths_B.tolist(), range(batch.num_sequences), layout.dp, MicroBatchLimits(3)
    )
    share, inputs = fetch_share(part.batch, PassMoves(layout, plan, part.batch), held, layers_of)
    place = layout.coordinates(dist.get_rank())
    numbers = sorted(number for micro_batch in plan[place.dp] for number in micro_batch)
    where = sequence_token_indices(batch.cu_seqlens, numbers)
    on_last = place.pp == layout.pp - 1
    assert torch.equal(share.tokens_T, batch.tokens_T[where])
    assert torch.equal(share.routed_experts_T, choices_T[where][:, layers_of[place.pp]])
    assert share.expert_layers == tuple(layers_of[place.pp])
    assert inputs.ref_hidden_T is not None
    assert torch.equal(inputs.ref_hidden_T, states_T[where][:, : 5 if on_last else 0])
    critic, everything = CriticConfig(), range(batch.num_sequences)
    targets = value_targets(
        estimate(part, AlgorithmConfig(), 0.0), everything, critic, LIMIT,
        lambda chosen: gather_of_mini_batch(part.batch, chosen),
    )  # fmt: skip
    sequences = part.batch.held_H.tolist()
    found, of = fetch_targets(targets, sequences, part.batch, plan, layout)
    assert of == (tuple(numbers) if on_last else ())
    assert len(found.returns_T) == (len(where) if on_last else 0)


def _worker(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
    (folder / f"bytes{rank}").write_text(str(held_bytes()))
    if world % 2 == 0:
        for layout in {Layout(world, pp=2), Layout(world, pp=2, cp=world // 2)}:
            fetch_what_a_rank_uses(layout)
    compare_estimates()
    compare_targets(folder)
    move_from_one_rank()
    pack_where_responses_arrived()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 3, 4])
def test_shares_have_the_numbers_of_the_batch_and_a_part_of_its_bytes(tmp_path, world):
    start_ranks(_worker, (world, tmp_path), world)
    alone = held_bytes()
    for rank in range(world):
        assert int((tmp_path / f"bytes{rank}").read_text()) < 1.05 * alone / world
