"""Plain text for the pretraining loss."""

from __future__ import annotations

import json

import pytest

from mppo.data.examples import load_documents
from mppo.data.loader import PromptLoader
from mppo.hub.builtin import load_tokenizer, resolve_model
from mppo.recipe.errors import ConfigError
from mppo.recipe.sections.data import DataConfig
from mppo.trainer.pretraining_mix import PretrainingMix, text_batch


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(resolve_model("builtin:tiny", tmp_path_factory.mktemp("cache")), False)


def data_of(tmp_path, *texts, **keys) -> DataConfig:
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return DataConfig(ptx_files=(str(file),), max_prompt_length=4, max_response_length=3, **keys)


def test_documents_end_with_the_end_token_and_are_cut_to_the_longest_sequence(tokenizer, tmp_path):
    documents = load_documents(data_of(tmp_path, "1 + 1", "12345678901234"), tokenizer)
    short, long = (document.token_ids for document in documents.prompts)
    assert tokenizer.decode(short[:-1]) == "1 + 1"
    assert short[-1] == tokenizer.eos_token_id
    assert len(long) == 7
    assert (documents.filtered, documents.truncated) == (0, 1)


def test_every_token_but_the_first_is_predicted(tokenizer, tmp_path):
    documents = load_documents(data_of(tmp_path, "12", "345"), tokenizer).prompts
    batch = text_batch(documents)
    assert batch.lengths_B.tolist() == [len(d.token_ids) for d in documents]
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:]):
        assert batch.response_mask_T[start:end].tolist() == [0.0] + [1.0] * int(end - start - 1)


def test_rows_that_are_not_text_are_reported(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="ptx_key"):
        load_documents(data_of(tmp_path, [{"role": "user", "content": "x"}]), tokenizer)
    with pytest.raises(ConfigError, match="no key 'words'"):
        load_documents(data_of(tmp_path, "x", ptx_key="words"), tokenizer)


def test_a_resumed_stream_continues_with_the_next_document(tokenizer, tmp_path):
    documents = load_documents(data_of(tmp_path, *"123456789"), tokenizer)
    first, second = (PretrainingMix(PromptLoader(documents, 2, True, 3), 0.1) for _ in range(2))
    for _ in range(3):
        next(first.documents)
    second.documents.load_state_dict(first.documents.state_dict())
    assert next(second.documents) == next(first.documents)
