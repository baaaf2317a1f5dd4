"""Dumps of a run's steps (``trainer.dump_rollouts``), and training from them (``replay``)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mppo.algos.token_axis import cumulative
from mppo.batch.batch import unknown_expert
from mppo.batch.episode import Episode, EpisodeTokens
from mppo.batch.outputs import Experience, Outputs
from mppo.batch.prompt import Prompt
from mppo.batch.score import ResponseScore
from mppo.dumps.experience_files import read_batch_tensor, read_experience, write_share
from mppo.dumps.stale import remove_stale
from mppo.dumps.step_dump import (
    UNREADABLE,
    SequenceRow,
    StepDump,
    dumped_steps,
    read_header_of,
    recipe_hash,
    step_folder,
    write_header,
    write_pieces,
)
from mppo.parallel.collectives import group_size, raise_on_any_rank
from mppo.parallel.partition import partition
from mppo.recipe.model_shape import model_shape
from mppo.safety.disk import set_aside
from mppo.safety.input_error import InputError
from mppo.trainer.advantages import needs_greedy_baseline
from mppo.trainer.failures import storage_message
from mppo.trainer.generation.rollout_stage import Rollout, pack_scored
from mppo.trainer.metrics import conversation_metrics, reward_metrics
from mppo.trainer.run import Run

_LEFT_OUT = ("old.ref_hidden_T",)
"""Not dumped: a hidden state has thousands of numbers per token, and a replay computes it."""


def write_shares(folder: Path, experience: Experience, leave_out: Collection[str] = ()) -> None:
    """Write an experience into ``folder`` (an existing one is renamed), each rank the sequences it
    holds; RuntimeError on every rank if one cannot. Collective."""
    rank = dist.get_rank() if dist.is_initialized() else 0

    def prepare() -> None:
        if folder.exists():
            set_aside(folder)
        folder.mkdir(parents=True)

    _on_all_ranks(prepare if rank == 0 else lambda: None)
    _on_all_ranks(lambda: write_share(folder, rank, experience, leave_out))


def _on_all_ranks(action: Callable[[], None]) -> None:
    """Run an action on every rank; raise on every rank if it fails on one. Collective."""
    error = None
    try:
        action()
    except OSError as failure:
        error = storage_message(failure) or str(failure)
    raise_on_any_rank(error, group_size())


def dump_step(
    run: Run, step: int, rollout: Rollout, outputs: Outputs, experience: Experience
) -> None:
    """Write the dump of a step: responses with raw scores, the models' outputs before the update,
    and the experience before PF-PPO's resampling. Collective."""
    folder, rank = step_folder(run.reporter.run_dir, step), dist.get_rank()
    if rank == 0:
        remove_stale([folder])
    raw = replace(outputs.batch, token_rewards_T=rollout.batch.token_rewards_T)
    write_shares(folder, replace(experience, old=replace(outputs, batch=raw)), _LEFT_OUT)
    tokens = outputs.batch.tokens_T.unique().tolist()
    texts = run.tokenizer.batch_decode([[token] for token in tokens]) if tokens else []
    _on_all_ranks(lambda: write_pieces(folder, rank, dict(zip(tokens, texts, strict=True))))
    plain = run.recipe.model_dump(mode="json")
    header = StepDump(step, recipe_hash(plain), group_size(), run.kl.coef, tuple(_rows(rollout)))
    _on_all_ranks(lambda: write_header(folder, header) if rank == 0 else None)


def _rows(rollout: Rollout) -> list[SequenceRow]:
    rows = [
        (number, episode, sequence)
        for number, episode in enumerate(rollout.episodes)
        for sequence in episode.sequences
    ]
    baselines = rollout.baseline_B.tolist() or [None] * len(rows)
    return [
        SequenceRow(
            uid=episode.prompt.uid,
            data_source=episode.prompt.data_source,
            prompt=episode.prompt.text,
            ground_truth=str(episode.prompt.ground_truth),
            finish_reason=sequence.finish_reason,
            parts=sequence.parts,
            score=episode.scored.score,
            baseline=baseline,
            numbers=episode.scored.numbers,
            error=episode.scored.error,
            unscored=episode.scored.unscored,
            token_total=episode.scored.token_total,
            answer=episode.scored.answer,
            right=episode.scored.right,
            episode=number,
        )
        for (number, episode, sequence), baseline in zip(rows, baselines, strict=True)
    ]


def replay_folders(replay: str) -> list[Path]:
    """The folders of the dumped steps that ``trainer.replay`` names, in order of the steps; those
    of lost work are left out."""
    return list(dumped_steps(Path(replay)).values())


def replay_rollout(run: Run, step: int) -> tuple[Rollout, dict[str, float]]:
    """Read the responses and scores of a dumped step instead of generating them. Collective. Step s
    trains on the s-th dump, and begins again with the first after the last. Returns the responses,
    shared out, and metrics of scoring. InputError: the dump is damaged or not the recipe's."""
    replayed = str(run.recipe.trainer.replay)
    folders = replay_folders(replayed)
    if not folders:
        raise InputError(f"trainer.replay={replayed}: the dumps are gone; restore the folder")
    folder = folders[(step - 1) % len(folders)]
    try:
        header = read_header_of(folder)
        episodes = read_episodes(folder, header)
    except UNREADABLE as error:
        why = " ".join(str(error).split())
        raise InputError(
            f"trainer.replay={replayed}: {folder} cannot be read ({why}); restore it from a copy, "
            "or remove this step's folder"
        ) from error
    _check_suits(run, folder, header, episodes)
    run.roles.placement.prepare("forward")
    batch = pack_scored(run, episodes)
    baseline_B = torch.empty(0)
    if needs_greedy_baseline(run.recipe.algorithm):
        baseline_B = torch.tensor([row.baseline for row in header.rows])
    metrics = reward_metrics(episodes, [])
    if run.recipe.rollout.agent is not None:
        metrics |= conversation_metrics(episodes)
    return Rollout(episodes, batch, baseline_B, []), metrics


def _check_suits(run: Run, folder: Path, header: StepDump, episodes: list[Episode]) -> None:
    recipe, error = run.recipe, None
    sequences = [each for episode in episodes for each in episode.sequences]
    tokens = [each.here.ids for each in sequences if each.tokens is not None and each.length]
    largest = int(torch.cat(tokens).max()) if tokens else 0
    vocabulary = model_shape(run.roles.actor.hf_config).vocab
    if len(episodes) % recipe.rollout.n:
        error = f"has {len(episodes)} responses, not a multiple of rollout.n={recipe.rollout.n}"
    elif largest >= vocabulary:
        error = f"has token {largest}, but the model has {vocabulary} tokens"
    elif needs_greedy_baseline(recipe.algorithm) and any(r.baseline is None for r in header.rows):
        error = "has no scores of greedy responses, which algorithm.adv_estimator = remax needs"
    try:
        raise_on_any_rank(error, group_size())
    except RuntimeError as found:
        raise InputError(
            f"trainer.replay: {folder} {found}; replay it with the model and rollout.n of the run "
            "that wrote it"
        ) from None


def read_episodes(folder: Path, header: StepDump) -> list[Episode]:
    """The scored responses of a dump, of which this rank holds those whose home it is."""
    world = group_size()
    rank = dist.get_rank() if world > 1 else 0
    lengths_B = read_batch_tensor(folder, "lengths_B")
    if len(lengths_B) != len(header.rows):
        raise InputError(f"{len(header.rows)} rows for {len(lengths_B)} sequences")
    home_B = read_batch_tensor(folder, "home_B")
    if header.ranks != world:
        for home, part in enumerate(partition(lengths_B.tolist(), world)):
            home_B[part] = home
    held = list(range(len(header.rows)))
    if world > 1:
        held = (home_B == rank).nonzero()[:, 0].tolist()
    read = read_experience(folder, header.ranks, held)
    ends = cumulative(lengths_B[torch.tensor(held, dtype=torch.int64)]).tolist()
    batch = read.old.batch
    sequences: list[Episode] = []
    sizes = zip(batch.prompt_B.tolist(), batch.answer_B.tolist(), strict=True)
    where = dict(zip(held, ends))
    shape = batch.routed_experts_T.shape[1:]  # the same on every rank, also if it holds nothing
    for index, ((prompt_tokens, tokens), row) in enumerate(zip(sizes, header.rows, strict=True)):
        # other ranks need only the number of a prompt's tokens
        ids = torch.zeros(prompt_tokens, dtype=torch.int32)
        if index in where:
            first = where[index]
            ids = batch.tokens_T[first : first + prompt_tokens]
        prompt = Prompt(row.uid, ids, row.data_source, row.ground_truth, row.prompt)
        parts = tuple((int(version), int(count)) for version, count in row.parts)
        home = max(int(home_B[index]), 0)
        routed = None if 0 in shape else (prompt_tokens + tokens, shape[0], shape[1])
        own, rewards = None, []
        if index in where:
            start, end = first + prompt_tokens, first + prompt_tokens + tokens
            if batch.token_rewards_T[start:end].any():
                rewards = batch.token_rewards_T[start:end].tolist()
            own = EpisodeTokens(
                batch.tokens_T[start:end],
                batch.rollout_logprobs_T[start:end],
                _experts(batch.routed_experts_T[first:end]),
            )
        score = ResponseScore(
            row.score,
            row.numbers,
            row.error,
            row.unscored,
            token_total=row.token_total,
            token_rewards=rewards,
            answer=row.answer,
            right=row.right,
        )
        sequences.append(Episode(prompt, parts, row.finish_reason, home, routed, own, score=score))
    return _joined(sequences, header.rows)


def _joined(sequences: Sequence[Episode], rows: Sequence[SequenceRow]) -> list[Episode]:
    found: dict[int, list[Episode]] = {}
    for number, (sequence, row) in enumerate(zip(sequences, rows, strict=True)):
        found.setdefault(number if row.episode is None else row.episode, []).append(sequence)
    return [
        replace(last, earlier=tuple(replace(each, score=None) for each in earlier))
        for *earlier, last in found.values()
    ]


def _experts(experts_T: Tensor) -> Tensor | None:
    """The engine's choices of a sequence as ``EpisodeTokens`` has them; None without any."""
    if 0 in experts_T.shape[1:]:
        return None
    wide_T = experts_T.to(torch.int16)
    return torch.where(experts_T == unknown_expert(experts_T.dtype), -1, wide_T)
