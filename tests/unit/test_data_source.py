"""Prompts from tasks and files."""

import json

import pytest
import torch

from mppo.data.examples import supervised_examples
from mppo.data.rows import MAX_FAULTS
from mppo.data.source import load_prompts
from mppo.hub.builtin import load_tokenizer, resolve_model
from mppo.recipe.errors import ConfigError
from mppo.recipe.sections.data import DataConfig

ROWS = [{"prompt": "1+2=", "answer": 3, "level": 1}, {"prompt": "10+20=", "answer": "30"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(resolve_model("builtin:tiny", tmp_path_factory.mktemp("models")))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(tokenizer, *files, split="train", **settings):
    return load_prompts(DataConfig(train_files=files, **settings), tokenizer, split)


def test_jsonl_rows_become_prompts(tokenizer, tmp_path):
    prompts = load(tokenizer, write(tmp_path / "sums.jsonl", ROWS)).prompts
    assert [prompt.text for prompt in prompts] == ["<bos>1+2=\n", "<bos>10+20=\n"]
    assert [prompt.ground_truth for prompt in prompts] == ["3", "30"]
    assert [prompt.uid for prompt in prompts] == [0, 1]
    assert prompts[0].data_source == "sums"
    assert prompts[0].extra == {"level": 1}
    assert tokenizer.decode(prompts[0].token_ids.tolist()) == prompts[0].text


def test_parquet_rows_are_the_same_as_jsonl_rows(tokenizer, tmp_path):
    reason = "the optional package pyarrow is missing"
    pyarrow = pytest.importorskip("pyarrow", reason=reason)
    parquet = pytest.importorskip("pyarrow.parquet", reason=reason)
    rows = [{"prompt": "1+2=", "answer": "3"}, {"prompt": "10+20=", "answer": "30"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "sums.parquet")
    from_jsonl = load(tokenizer, write(tmp_path / "sums.jsonl", rows))
    assert load(tokenizer, str(tmp_path / "sums.parquet")) == from_jsonl


def test_rows_in_the_form_of_verl_are_read(tokenizer, tmp_path):
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "1+2="}],
        "reward_model": {"style": "rule", "ground_truth": "3"},
    }
    path = write(tmp_path / "a.jsonl", [row])
    (prompt,) = load(tokenizer, path).prompts
    assert prompt == load(tokenizer, path, answer_key="reward_model.ground_truth").prompts[0]
    assert (prompt.text, prompt.ground_truth) == ("<bos>1+2=\n", "3")
    assert prompt.data_source == "openai/gsm8k"


def test_system_prompt_goes_first_and_plain_text_has_no_template(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", ROWS[:1])
    (prompt,) = load(tokenizer, path, system_prompt="Add.").prompts
    assert prompt.text == "<bos>Add.\n1+2=\n"
    (prompt,) = load(tokenizer, path, apply_chat_template=False).prompts
    assert tokenizer.decode(prompt.token_ids.tolist()) == "1+2="


def test_overlong_prompts_are_dropped_and_counted(tokenizer, tmp_path):
    found = load(tokenizer, write(tmp_path / "a.jsonl", ROWS), max_prompt_length=6)
    assert [prompt.ground_truth for prompt in found.prompts] == ["3"]
    assert found.summary() == "1 (a 1), 1 left out as too long"


@pytest.mark.parametrize(
    ("side", "text"), [("left", "0+20=\n"), ("right", "<bos>10+20"), ("middle", "<bos>1020=\n")]
)
def test_overlong_prompts_are_truncated_on_the_configured_side(side, text, tokenizer, tmp_path):
    limit = {"left": 6, "right": 6, "middle": 7}[side]
    path = write(tmp_path / "a.jsonl", ROWS[1:])
    found = load(
        tokenizer, path, max_prompt_length=limit, filter_overlong_prompts=False, truncation=side
    )
    assert found.summary() == "1 (a 1), 1 truncated"
    assert tokenizer.decode(found.prompts[0].token_ids.tolist()) == text
    assert len(found.prompts[0].token_ids) == limit


def test_sizes_and_splits(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", ROWS)
    assert len(load(tokenizer, path, train_size=1)) == 1
    assert len(load(tokenizer, path, split="val")) == 0
    assert len(load(tokenizer, path, split="val", val_files=(path,), val_size=1)) == 1
    many = write(tmp_path / "many.jsonl", ROWS * 50)
    assert len(load(tokenizer, path, split="val", val_files=(many,))) == 100
    assert len(load(tokenizer, path, split="val", val_files=(many,), val_size=0)) == 0
    task = DataConfig(task="sort_digits", train_size=50, val_size=7)
    assert len(load_prompts(task, tokenizer, "train")) == 50
    assert len(load_prompts(task, tokenizer, "val")) == 7


def test_a_task_makes_the_default_number_of_prompts(tokenizer):
    task = DataConfig(task="arithmetic", task_kwargs={"max_operand": 99})
    assert len(load_prompts(task, tokenizer, "train")) == 4096
    assert load_prompts(task, tokenizer, "val").summary() == "64 (arithmetic 64)"


def test_every_source_contributes_evenly_and_is_listed_with_its_count(tokenizer, tmp_path):
    files = [
        write(tmp_path / "short.jsonl", ROWS[:1]),
        write(tmp_path / "gsm8k.jsonl", [{**ROWS[0], "data_source": "openai/gsm8k"}] * 40),
        write(tmp_path / "math.jsonl", ROWS * 20),
    ]
    complete = load(tokenizer, *files)
    assert complete.summary() == "81 (short 1, openai/gsm8k 40, math 40)"
    cut = load(tokenizer, *files, train_size=21)
    assert cut.summary() == "21 (short 1, openai/gsm8k 10, math 10)"
    assert [prompt.data_source for prompt in cut.prompts[:12]][-1] == "math"


def test_a_template_wraps_a_tasks_question(tokenizer):
    data = DataConfig(task="arithmetic", task_kwargs={"template": "What is {question}?"})
    prompt = load_prompts(data, tokenizer, "train").prompts[0]
    assert prompt.text.startswith("<bos>What is ")
    assert prompt.text.endswith("=?\n")
    assert prompt.data_source == "arithmetic"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a", "answer": "b"}\n{oops}\n', r"bad\.jsonl line 2"),
        ('{"prompt": "a", "answer": "b"}\n\n\n["a"]\n', r"(?s)line 4.*not an object"),
        (
            '{"question": "a", "answer": "b"}\n',
            r"no key 'prompt'; the row has 'question', 'answer'",
        ),
        ('{"prompt": "a"}\n', "no key 'answer'"),
        ('{"prompt": "", "answer": "b"}\n', "empty text"),
        ('{"prompt": 3, "answer": "b"}\n', "neither a text nor a list of messages"),
        ('{"prompt": [{"text": "a"}], "answer": "b"}\n', "lacks 'role' or 'content'"),
        ('{"prompt": "a", "answer": null}\n', "is null"),
        ("", "holds no row"),
        ("\n \n", "holds no row"),
        (b'{"prompt": "\xff", "answer": "b"}\n', r"(?s)line 1.*not UTF-8"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(content, message, tokenizer, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message):
        load(tokenizer, str(path))


def test_several_bad_rows_are_reported_at_once_but_not_thousands(tokenizer, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text("oops\n" * 3)
    missing = str(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError) as error:
        load(tokenizer, str(path), missing)
    rows, no_file = error.value.issues
    assert (rows.key, no_file.key) == (f"{path} line 1", "data.train_files")
    assert rows.why.endswith(" (as in line 2, line 3)")
    path.write_text("oops\n" * 1000)
    with pytest.raises(
        ConfigError, match="as in line 2, line 3, line 4, line 5 and 995 further rows"
    ):
        load(tokenizer, str(path))
    path.write_text("".join(f"{' ' * column}oops\n" for column in range(100)))
    with pytest.raises(ConfigError) as error:
        load(tokenizer, str(path))
    assert len(error.value.issues) == MAX_FAULTS


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train_files": ("/no/such.jsonl",)}, "no such file"),
        ({"train_files": ("/etc/hostname.csv",)}, "unknown kind of file"),
        ({}, "neither given"),
        ({"train_files": ("a.jsonl",), "task": "arithmetic"}, "both given"),
        ({"task": "arithmetic", "task_kwargs": {"template": "x"}}, "{question}"),
        ({"task": "arithmetic", "max_prompt_length": 2}, "the shortest has 6 tokens"),
        (
            {"task": "arithmetic", "max_prompt_length": 2, "filter_overlong_prompts": False},
            "example 0 has 6 tokens",
        ),
        (
            {"task": "arithmetic", "apply_chat_template": False, "system_prompt": "x"},
            "needs a chat template",
        ),
    ],
)
def test_wrong_settings_are_explained(settings, message, tokenizer):
    with pytest.raises(ConfigError, match=message):
        load_prompts(DataConfig(**settings), tokenizer, "train")


def test_messages_need_a_chat_template(tokenizer, tmp_path):
    path = write(
        tmp_path / "a.jsonl", [{"prompt": [{"role": "user", "content": "x"}], "answer": 1}]
    )
    with pytest.raises(ConfigError, match="list of messages"):
        load(tokenizer, path, apply_chat_template=False)


def test_missing_pyarrow_says_how_to_install_it(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"mppo\[parquet\]"):
        load(tokenizer, str(tmp_path / "a.parquet"))


def test_a_file_that_is_not_parquet_is_named(tokenizer, tmp_path):
    pytest.importorskip("pyarrow", reason="the optional package pyarrow is missing")
    (tmp_path / "a.parquet").write_text("oops")
    with pytest.raises(ConfigError, match="not a usable parquet"):
        load(tokenizer, str(tmp_path / "a.parquet"))


def test_supervised_examples_are_prompt_and_answer_closed_by_eos(tokenizer):
    prompts = load_prompts(DataConfig(task="sort_digits", train_size=5), tokenizer, "train")
    examples = supervised_examples(prompts, tokenizer, 12, seed=0)
    truths = {tuple(prompt.token_ids.tolist()): prompt.ground_truth for prompt in prompts.prompts}
    for prompt_ids, answer_ids in examples:
        assert tokenizer.decode(answer_ids) == truths[tuple(prompt_ids.tolist())] + "<eos>"
    assert len(examples) == 12
    assert {tuple(prompt_ids.tolist()) for prompt_ids, _ in examples[:5]} == set(truths)

    def tokens(seed: int) -> list[list[int]]:
        return [torch.cat(e).tolist() for e in supervised_examples(prompts, tokenizer, 12, seed)]

    assert tokens(0) == [torch.cat(example).tolist() for example in examples]
    assert tokens(0) != tokens(1)
