"""The tables of malformed data files and of bad sources: each gives one clear message."""

from __future__ import annotations

import json
import re

import pytest
from bad_recipe import GOOD, assert_one_fault

from mppo.data.source import load_prompts
from mppo.hub.builtin import byte_tokenizer
from mppo.recipe.errors import ConfigError
from mppo.train import main
from mppo.trainer.start.loading import load_checked

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


TASK = "{task: reverse}"
# settings of a recipe, key and message of the one issue
SOURCES = [
    ("an unknown key", "data.sources=[{task: reverse, wieght: 2}]", "data.sources.0.wieght",
     "did you mean data.sources.*.weight?"),
    ("a weight of nothing", "data.sources=[{task: reverse, weight: 0}]", "data.sources.0.weight",
     "a value > 0"),
    ("a weight of true", "data.sources=[{task: reverse, weight: true}]", "data.sources.0.weight",
     "not a number"),
    ("a word for a weight", f"data.sources=[{TASK},{{task: reverse, weight: half}}]",
     "data.sources.1.weight", "valid number"),
    ("one source without a list", f"data.sources={TASK}", "data.sources", "give a list"),
    ("a word for a source", "data.sources=[reverse]", "data.sources.0", "is a section"),
    ("a source of nothing", "data.sources=[{weight: 2}]", "data.sources.0.task",
     "set data.sources.0.task (arithmetic, ...) or data.sources.0.train_files"),
    ("a source of two kinds", "data.sources=[{task: reverse, train_files: [{file}]}]",
     "data.sources.0.task", "leave out data.sources.0.task or data.sources.0.train_files"),
    ("arguments without their task",
     f"data.sources=[{TASK},{{train_files: [{{file}}], task_kwargs: {{seed: 1}}}}]",
     "data.sources.1.task_kwargs", "has no effect without data.sources.1.task"),
    ("a task beside the sources", f"data.task=reverse data.sources=[{TASK}]", "data.task",
     "move it into one of data.sources"),
    ("a task beside files", "data.task=reverse data.sources=[{train_files: [{file}]}]",
     "data.task", "move it into one of data.sources"),
    ("files beside the sources", f"data.train_files={{file}} data.sources=[{TASK}]",
     "data.train_files", "data.sources is given too"),
    ("validation beside the sources", f"data.val_files=[{{file}}] data.sources=[{TASK}]",
     "data.val_files", "data.sources is given too"),
    ("a file that is missing", "data.sources=[{train_files: [nowhere.json]}]",
     "data.sources.0.train_files", "no such file"),
    ("a file of another form", f"data.sources=[{TASK},{{train_files: [{{text}}]}}]",
     "data.sources.1.train_files", "use .jsonl (a JSON object per line), .json"),
    ("no validation in any source", "data.sources=[{train_files: [{file}]}] trainer.test_freq=5",
     "data.sources.0.val_files", "needs validation prompts"),
    ("a verifier for a function", "data.sources=[{task: reverse, verifier: exact}] "
     "reward.name=function reward.function=a:b", "data.sources.0.verifier", "has no effect with"),
    ("rules without answers", "data.train_files=[{file}] data.answer_key=null", "data.answer_key",
     "compares responses with the ground truth"),
    ("a data set without an owner", "data.train_files=[hf:gsm8k]", "data.train_files",
     "is not of the form hf:OWNER/NAME"),
    ("a data set with an empty split", "data.sources=[{train_files: [\"hf:a/b:\"]}]",
     "data.sources.0.train_files", "write hf:OWNER/NAME, hf:OWNER/NAME:SPLIT"),
    ("no such hub", "data.task=reverse model.hub=modelscop", "model.hub",
     "did you mean modelscope?"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "key", "expected"), [row[1:] for row in SOURCES],
                         ids=[row[0] for row in SOURCES])  # fmt: skip
def test_a_bad_source_is_one_issue(settings, key, expected, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "rows.txt").write_text("1+1=2\n")
    settings = settings.replace("{file}", "rows.jsonl").replace("{text}", "rows.txt")
    (tmp_path / "recipe.yaml").write_text(GOOD.replace("task: arithmetic, ", ""))
    assert main(["--config", "recipe.yaml", *re.split(r" (?=\w+\.)", settings)]) == 2
    assert_one_fault(capsys.readouterr().err, key, expected)
