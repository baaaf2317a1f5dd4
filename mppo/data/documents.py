"""Plain text for the unsupervised loss (PPO-ptx), one document a row."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from mppo.batch import Prompt
from mppo.config.errors import ConfigError, ConfigIssue
from mppo.config.sections.data import DataConfig
from mppo.data.rows import read_rows
from mppo.data.source import PromptSet


def load_documents(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    """Documents of ``data.ptx_files``, each closed by the end-of-sequence token.

    A document is cut to ``data.max_prompt_length + data.max_response_length`` tokens; one of fewer
    than two tokens predicts nothing and is left out.

    Args:
        data: the recipe's section.
        tokenizer: the model's.

    Returns:
        The documents as token ids (in ``Prompt.token_ids``), in file order.

    Raises:
        ConfigError: a bad file or row, a row that is no text, or nothing to learn from.
    """
    rows = read_rows(data.ptx_files, "data.ptx_files", data.ptx_key, data.ptx_key)
    odd = next((row for row in rows if not isinstance(row.prompt, str)), None)
    if odd is not None:
        why, fix = f"{odd.where} holds no text there", "name the column that holds the text"
        raise ConfigError([ConfigIssue("data.ptx_key", data.ptx_key, why, fix)])
    limit = data.max_prompt_length + data.max_response_length
    encoded = tokenizer([str(row.prompt) for row in rows])["input_ids"]
    kept = []
    for row, ids in zip(rows, encoded):
        whole = (*ids, tokenizer.eos_token_id)
        if len(whole) > 1:
            kept.append(Prompt(len(kept), whole[:limit], row.data_source, "", ""))
    if not kept:
        why, fix = "no document has two tokens", "give files with text"
        raise ConfigError([ConfigIssue("data.ptx_files", list(data.ptx_files), why, fix)])
    truncated = sum(len(ids) + 1 > limit for ids in encoded)
    return PromptSet(tuple(kept), len(rows) - len(kept), truncated)
