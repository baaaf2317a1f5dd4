"""Selecting sequences of a batch or an experience, for PF-PPO and dynamic sampling."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mppo.algos import pf_ppo
from mppo.batch.outputs import Experience
from mppo.batch.selection import select_experience
from mppo.recipe.sections.algorithm import PFPPOConfig


def resample_experience(experience: Experience, config: PFPPOConfig, seed: int) -> Experience:
    """PF-PPO: draw as many episodes with replacement, by score; advantages are resampled and not
    recomputed (verl). ``seed`` differs for each step."""
    batch = experience.old.batch
    episodes = batch.episodes
    scores_E = batch.scores_B[episodes.last_E]
    weight_E = pf_ppo.resampling_weights(scores_E, config.reweight_method, config.weight_pow)
    drawn = pf_ppo.resample(weight_E, seed)
    chosen = torch.tensor(episodes.sequences(drawn.tolist()))
    selected = select_experience(experience, chosen)
    sizes_E = torch.bincount(episodes.of_B, minlength=len(scores_E))
    # an episode drawn twice is two episodes
    episode_B = torch.arange(len(drawn)).repeat_interleave(sizes_E[drawn])
    old = selected.old
    return replace(selected, old=replace(old, batch=replace(old.batch, episode_B=episode_B)))


def first_groups(scores_B: Tensor, group_B: Tensor, count: int) -> Tensor:
    """Select ``count`` groups of adjacent sequences: those whose scores differ first, in order,
    then others. Returns int64 indices of their sequences, ascending."""
    informative_B = torch.zeros(len(group_B), dtype=torch.bool)
    informative_B[informative_sequences(scores_B, group_B)] = True
    groups, sizes = torch.unique_consecutive(group_B, return_counts=True)
    informative_G = informative_B[sizes.cumsum(0) - sizes]
    preferred = torch.argsort(informative_G.int(), descending=True, stable=True)[:count]
    return torch.isin(group_B, groups[preferred]).nonzero().squeeze(1)


def informative_sequences(scores_B: Tensor, group_B: Tensor) -> Tensor:
    """Select the sequences whose group's scores are not all equal, and groups of one: int64,
    ascending (DAPO, https://arxiv.org/abs/2503.14476; verl ``filter_groups``)."""
    _, index_B, counts = torch.unique(group_B, return_inverse=True, return_counts=True)
    lowest = scores_B.new_full((len(counts),), torch.inf)
    lowest = lowest.scatter_reduce(0, index_B, scores_B, "amin")
    highest = scores_B.new_full((len(counts),), -torch.inf)
    highest = highest.scatter_reduce(0, index_B, scores_B, "amax")
    kept = (highest > lowest) | (counts == 1)
    return kept[index_B].nonzero().squeeze(1)
