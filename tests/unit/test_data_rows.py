"""Forms of data files and the columns that are found without a setting."""

import json

import pytest

from mppo.data.rows import read_rows
from mppo.recipe.errors import ConfigError

USER, REPLY = {"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}


def read(path, rows, prompt="prompt", answer="answer"):
    path.write_text(rows if isinstance(rows, str) else json.dumps(rows))
    return read_rows([str(path)], "data.train_files", prompt, answer)


def test_a_json_file_holds_a_list_one_object_or_one_per_line(tmp_path):
    rows = [{"prompt": "1+2=", "answer": 3}, {"prompt": "a,[{", "answer": "]\n"}]
    lines = "\n".join(map(json.dumps, rows))
    found = read(tmp_path / "list.json", "\ufeff" + json.dumps(rows, indent=1))
    assert [(row.prompt, row.answer) for row in found] == [("1+2=", "3"), ("a,[{", "]\n")]
    assert [row.where.rpartition(" ")[2] for row in found] == ["2", "6"]
    assert [row.answer for row in read(tmp_path / "lines.json", lines)] == ["3", "]\n"]
    assert [row.answer for row in read(tmp_path / "one.json", rows[0])] == ["3"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"prompt": "a", "answer": "b"},\n {"prompt": ""}]', r"line 2 = .*\n.*an empty text"),
        ('[{"prompt": "a", "answer": "b"},\n\n 7]', r"line 3 = '7'\n.*a JSON int, not an object"),
        ('[{"prompt": "a", "answer": "b"},\n {"prompt" 3}]', r"rows.json'\n.*at line 2 column 12"),
        ('{"prompt": "a", "answer": "b"}\n{"prompt": \n', r"line 2 = .*\n.*not valid JSON"),
        ('"prompt"', r"line 1 = .*\n.*a JSON str, not an object"),
        ("[]", "the file holds no rows"),
        ("", "Expecting value at column 1"),
        ('[{"prompt": "a", "answer": NaN}]', "NaN is not JSON"),
        ("[" * 2000, "nested more than|Expecting value"),
    ],
)
def test_a_bad_json_file_is_named_with_the_line(text, message, tmp_path):
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path / "rows.json", text)
    assert len(caught.value.issues) == 1
    assert "fix: " in str(caught.value)


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"prompt": [USER], "reward_model": {"ground_truth": "3"}}, [USER], "3"),
        ({"input": "1+2=", "label": "3"}, "1+2=", "3"),
        ({"prompt": "1+2=", "completion": "3"}, "1+2=", "3"),
        ({"prompt": [USER], "completion": [REPLY]}, [USER], "3"),
        ({"messages": [USER, REPLY]}, [USER], "3"),
        ({"messages": [USER, REPLY], "answer": "4"}, [USER], "4"),
        ({"messages": [USER], "label": 3}, [USER], "3"),
    ],
    ids=["verl", "OpenRLHF", "TRL", "TRL chat", "TRL messages", "messages and answer", "label"],
)  # fmt: skip
def test_columns_of_other_systems_are_found(row, prompt, answer, tmp_path):
    (found,) = read(tmp_path / "a.json", row)
    assert (found.prompt, found.answer) == (prompt, answer)
    assert found.extra.keys() <= {"reward_model"}


def test_a_named_column_has_no_substitute(tmp_path):
    row = {"input": "a", "label": "b", "question": "c"}
    assert read(tmp_path / "a.json", row, "question", "label")[0].prompt == "c"
    with pytest.raises(ConfigError, match="no key 'text'"):
        read(tmp_path / "a.json", row, "text", "label")
    with pytest.raises(ConfigError, match="no key 'solution'"):
        read(tmp_path / "a.json", {"messages": [USER, REPLY]}, "messages", "solution")


def test_rows_need_no_answer_if_none_is_named(tmp_path):
    (row,) = read(tmp_path / "a.json", {"messages": [USER, REPLY]}, "messages", None)
    assert (row.prompt, row.answer) == ([USER], "")


def test_a_file_of_the_hubs_cache_is_named_after_its_data_set(tmp_path):
    folder = tmp_path / "datasets--openai--gsm8k" / "snapshots" / "0" / "main"
    folder.mkdir(parents=True)
    row = {"prompt": "1+2=", "answer": "3"}
    assert read(folder / "train-00000-of-00001.json", row)[0].data_source == "openai/gsm8k"
