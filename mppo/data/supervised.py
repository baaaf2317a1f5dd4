"""Examples of right answers, for the supervised warm start (SFT) of a model with random weights."""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mppo.data.source import PromptSet
from mppo.hub.builtin import eos_id
from mppo.hub.tokenizing import tokens_of

SupervisedExample = tuple[Tensor, Tensor]
"""Prompt tokens, and answer tokens with the end-of-sequence token at their end."""


def supervised_examples(
    prompt_set: PromptSet, tokenizer: PreTrainedTokenizerBase, n: int, seed: int
) -> list[SupervisedExample]:
    """Draw ``n`` examples; every prompt is used once before any is used again."""
    random = Random(f"supervised {seed}")
    order: list[int] = []
    while len(order) < n:
        epoch = list(range(len(prompt_set)))
        random.shuffle(epoch)
        order += epoch
    chosen = [prompt_set.prompts[index] for index in order[:n]]
    if not chosen:
        return []
    answers = tokens_of(tokenizer, [prompt.ground_truth for prompt in chosen], special=False)
    eos = eos_id(tokenizer)
    return [
        (prompt.token_ids, torch.tensor([*answer_ids, eos], dtype=torch.int32))
        for prompt, answer_ids in zip(chosen, answers)
    ]
