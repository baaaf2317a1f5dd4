"""The table of malformed data files: each gives one clear message."""

from __future__ import annotations

import json
import re

import pytest

from mppo.config.checks import load_checked
from mppo.config.errors import ConfigError
from mppo.data.source import load_prompts
from mppo.hub.builtin import byte_tokenizer

# lines of a jsonl file and settings: name, text, settings, message
DATA = [
    ("no JSON", '{"prompt": "1+1=", "answer": "2"}\n{"prompt": ', "", r"line 2.*not valid JSON"),
    ("a list", "[1, 2]", "", r"line 1.*not an object"),
    ("a number", "7", "", r"line 1.*not an object"),
    ("no prompt", '{"answer": "2"}', "", r"line 1.*no key 'prompt'; the row has 'answer'"),
    ("no answer", '{"prompt": "1+1="}', "", r"line 1.*no key 'answer'"),
    ("an answer of null", '{"prompt": "1+1=", "answer": null}', "", r"line 1.*'answer' is null"),
    ("an empty prompt", '{"prompt": "", "answer": "2"}', "", r"line 1.*an empty text"),
    ("a prompt of numbers", '{"prompt": 5, "answer": "2"}', "", r"line 1.*neither a text nor"),
    ("a message without content", '{"prompt": [{"role": "user"}], "answer": "2"}', "",
     r"line 1.*lacks 'role' or 'content'"),
    ("a nested answer that is missing", '{"prompt": "a", "reward_model": {}}',
     "data.answer_key=reward_model.ground_truth", r"no key 'reward_model.ground_truth'"),
    ("a missing column in every row", '{"prompt": "1+1=", "solution": {"final": "2"}}\n' * 30, "",
     r"line 1.*the row has 'prompt', 'solution.final' \(as in line 2.*25 further rows"),
    ("bytes that are no text", b'{"prompt": "\xff", "answer": "2"}', "", r"not UTF-8 at byte 13"),
    ("only blank lines", "\n\n\n", "", r"the file holds no row"),
    ("prompts too long", json.dumps({"prompt": "x" * 90, "answer": "2"}), "",
     r"all 1 prompts are longer"),
    ("a prompt too long to keep", json.dumps({"prompt": "x" * 90, "answer": "2"}),
     "data.filter_overlong_prompts=false", r"data.max_prompt_length = 32"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "settings", "expected"), [row[1:] for row in DATA],
                         ids=[row[0] for row in DATA])  # fmt: skip
def test_malformed_data_file(content, settings, expected, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    overrides = ["data.max_prompt_length=32", f"data.train_files=[{path}]", *settings.split()]
    recipe = load_checked(None, overrides, 1)
    with pytest.raises(ConfigError) as caught:
        load_prompts(recipe.data, byte_tokenizer(), "train")
    assert len(caught.value.issues) == 1
    assert re.search(expected, str(caught.value), re.DOTALL), str(caught.value)
