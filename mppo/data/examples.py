"""Examples of other losses: documents for pretraining (PPO-ptx), and right answers for the
supervised warm start (SFT) of a model with random weights."""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mppo.batch.prompt import Prompt
from mppo.data.content import content_of
from mppo.data.rows import read_rows
from mppo.data.source import PromptSet
from mppo.hub.builtin import eos_id
from mppo.hub.tokenizing import tokens_of
from mppo.recipe.errors import config_error
from mppo.recipe.sections.data import DataConfig

SupervisedExample = tuple[Tensor, Tensor]
"""Prompt tokens, and answer tokens with the end-of-sequence token at their end."""


def load_documents(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    """Load the documents of ``data.ptx_files`` in file order, as ``Prompt.token_ids``, each with an
    end-of-sequence token.

    A document is cut to ``data.max_prompt_length + data.max_response_length`` tokens; one of fewer
    than two tokens has nothing to predict and is left out.

    Raises:
        ConfigError: a bad file or row, a row without a text, or no document of two tokens.
    """
    rows = read_rows(data.ptx_files, "data.ptx_files", data.ptx_key, None)
    odd = next((row for row in rows if not isinstance(row.prompt, str)), None)
    if odd is not None:
        why, fix = f"{odd.where} holds no text in this column", "name the column of the text"
        raise config_error("data.ptx_key", data.ptx_key, why, fix)
    limit = data.max_prompt_length + data.max_response_length
    encoded = tokens_of(tokenizer, [str(row.prompt) for row in rows])
    eos = eos_id(tokenizer)
    kept = []
    for row, ids in zip(rows, encoded):
        document = (*ids, eos)
        if len(document) > 1:
            kept.append(Prompt(len(kept), torch.tensor(document[:limit]), row.data_source, "", ""))
    if not kept:
        why, fix = "no document has two tokens", "give files with longer texts"
        raise config_error("data.ptx_files", list(data.ptx_files), why, fix)
    truncated = sum(len(ids) + 1 > limit for ids in encoded)
    content = content_of("data.ptx_files", list(data.ptx_files), rows)
    return PromptSet(tuple(kept), len(rows) - len(kept), truncated, contents=(content,))


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
