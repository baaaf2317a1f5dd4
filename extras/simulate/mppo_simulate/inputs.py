"""The inputs of a simulated step: the recipe by role, and a batch of the greatest length."""

from __future__ import annotations

from typing import Any

import torch

from mppo.batch.batch import Batch
from mppo.batch.episode import Episode, EpisodeTokens, with_scores
from mppo.batch.packing import pack_episodes
from mppo.batch.prompt import Prompt
from mppo.batch.score import ResponseScore
from mppo.recipe.model_shape import model_shape
from mppo.recipe.schema import Recipe

_STRIDE = 37
"""Difference in length between consecutive responses of an uneven batch, in tokens."""


def by_role(recipe: Recipe) -> Recipe:
    """Replace each model's path by its role's name.

    Roles may share a path, but have models of different depth in quick runs.
    """
    names = ["critic", "ref"] + ["reward_model"] * recipe.reward_model.in_use
    sections = {name: getattr(recipe, name).model_copy(update={"path": name}) for name in names}
    return recipe.model_copy(update=sections)


def longest_batch(recipe: Recipe, actor_config: Any = None, uneven: bool = False) -> Batch:
    """Make a batch of the recipe's size with prompts and responses of the greatest length.

    Args:
        recipe: the recipe.
        actor_config: Hugging Face config of the actor, for the experts that an engine chooses (R3);
            None: the batch carries none.
        uneven: responses have different lengths, from half the greatest one to that.
    """
    # one tensor for all, since every operation is simulated
    prompt = torch.tensor([1] * recipe.data.max_prompt_length, dtype=torch.int32)
    response = torch.tensor([2] * recipe.data.max_response_length, dtype=torch.int32)
    logprobs = torch.tensor([-0.5] * len(response))
    experts = None
    if actor_config is not None and recipe.actor.router_replay == "R3":
        experts = _chosen_experts(actor_config, len(prompt) + len(response))
    episodes = []
    for i in range(recipe.data.train_batch_size * recipe.rollout.n):
        shorter = i * _STRIDE % (len(response) // 2 + 1) if uneven else 0
        length = len(response) - shorter
        chosen = None if experts is None else experts[: len(prompt) + length]
        episodes.append(
            Episode.sampled(
                Prompt(i // recipe.rollout.n, prompt, "", "", ""),
                EpisodeTokens(response[:length], logprobs[:length], chosen),
                "length",
                0,
            )
        )
    scores = [ResponseScore(float(i % 2)) for i in range(len(episodes))]
    return pack_episodes(with_scores(episodes, scores), recipe.algorithm.score_after_end)


def _chosen_experts(config: Any, tokens: int) -> torch.Tensor:
    """Choices with which every expert gets as many tokens: int16 ``[tokens, layers, k]``."""
    shape, k = model_shape(config), config.num_experts_per_tok
    choices = torch.arange(tokens * k, dtype=torch.int32) % shape.num_experts
    layers = choices.view(tokens, 1, k).expand(tokens, shape.num_layers, k)
    return layers.to(torch.int16)
