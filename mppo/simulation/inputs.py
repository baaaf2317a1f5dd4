"""The inputs of a simulated step: the recipe by role, and a batch of the greatest length."""

from __future__ import annotations

import torch

from mppo.batch import Batch, Prompt, Trajectory
from mppo.config.schema import Recipe
from mppo.packed_batch import pack_trajectories


def by_role(recipe: Recipe) -> Recipe:
    """Replace each model's path by its role's name.

    Roles may share a path, but have models of different depth in quick runs.
    """
    names = ["critic", "ref"] + ["reward_model"] * recipe.reward_model.in_use
    sections = {name: getattr(recipe, name).model_copy(update={"path": name}) for name in names}
    return recipe.model_copy(update=sections)


def longest_batch(recipe: Recipe) -> Batch:
    """Make a batch of the recipe's size with prompts and responses of the greatest length."""
    # one tensor for all, since every operation is simulated
    prompt = torch.tensor([1] * recipe.data.max_prompt_length, dtype=torch.int32)
    response = torch.tensor([2] * recipe.data.max_response_length, dtype=torch.int32)
    logprobs = torch.tensor([-0.5] * len(response))
    trajectories = [
        Trajectory(
            Prompt(i // recipe.rollout.n, prompt, "", "", ""), response, logprobs, "length", 0
        )
        for i in range(recipe.data.train_batch_size * recipe.rollout.n)
    ]
    scores = [float(i % 2) for i in range(len(trajectories))]
    return pack_trajectories(trajectories, scores, recipe.algorithm.score_after_end)
