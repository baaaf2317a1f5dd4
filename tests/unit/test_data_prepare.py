"""Preparation of known data sets from files in the form of their authors."""

import json
import os
import re
import subprocess
import sys

import pytest

from mppo.data.__main__ import main
from mppo.data.rows import read_rows
from mppo.rewards.programs import parse_tests
from mppo.rewards.verifiers import verifier_for

CHAT = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Why?\n\nAssistant:"
PROGRAM = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}


def eurus(truth, ability="math", source="numina_olympiads"):
    return {
        "data_source": source,
        "prompt": [{"role": "system", "content": "[ASSESS]"}, {"role": "user", "content": "x?"}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "dummy", "index": 0},
    }  # fmt: skip


def gsm8k(answer):
    return {"question": "How many?", "answer": f"5 * 2 = <<5*2=10>>10\n{answer}"}


def math(solution):
    return {"problem": "Find $x$.", "level": "Level 5", "type": "Algebra", "solution": solution}


def write(folder, files):
    for name, rows in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = rows if isinstance(rows, list) else [rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    return folder


def prepared(name, tmp_path, files, form="jsonl"):
    source, out = write(tmp_path / "raw", files), tmp_path / "new" / "out"
    assert main(["prepare", name, "--from", str(source), "--out", str(out), "--format", form]) == 0
    return {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()]
        for path in out.iterdir()
        if form == "jsonl"
    }


def truths(rows):
    return [row["reward_model"]["ground_truth"] for row in rows]


def test_gsm8k(tmp_path):
    files = {
        "main/train.jsonl": [gsm8k("#### 10"), gsm8k("#### -1,234.5"), gsm8k("#### 7 or #### 8")],
        "main/test.jsonl": [gsm8k("#### 2")],
        "socratic/train.jsonl": [gsm8k("#### 99")],
        "notes.json": {"about": "no row of the data set"},
    }
    found = prepared("gsm8k", tmp_path, files)
    assert found.keys() == {"train", "test"}
    assert truths(found["train"]) == ["10", "-1234.5", "7"]
    instruction = 'Let\'s think step by step and output the final answer after "####".'
    assert found["test"] == [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"How many? {instruction}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "2"},
            "extra_info": {
                "split": "test",
                "index": 0,
                "question": "How many?",
                "answer": gsm8k("#### 2")["answer"],
            },
        }
    ]
    assert [row["extra_info"]["index"] for row in found["train"]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"First \boxed{1}, thus $\boxed{\frac{1}{\sqrt{2}}}$.", r"\frac{1}{\sqrt{2}}"),
        (r"Thus $x = \boxed 7$ holds.", "7"),
        (r"Thus \fbox{12}.", "12"),
        (r"A set: \boxed{\{1,2\}}", r"\{1,2\}"),
    ],
)
def test_math(solution, answer, tmp_path):
    # the original has a file per problem
    files = {"train/algebra/1.json": math(solution), "test/algebra/2.json": math(r"\boxed{3}")}
    found = prepared("math", tmp_path, files)
    assert truths(found["train"]) == [answer]
    (row,) = found["test"]
    assert row["prompt"][0]["content"] == (
        "Find $x$. Let's think step by step and output the final answer within \\boxed{}."
    )
    assert row["extra_info"] == {
        "level": "Level 5", "type": "Algebra", "split": "test", "index": 0
    }  # fmt: skip
    assert verifier_for(row["data_source"]) == "math"


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": f"{CHAT} So.", "rejected": f"{CHAT} No."},
        {"prompt": CHAT, "response": " So.", "chosen": " So.", "rejected": " No."},
        {"prompt": CHAT, "chosen": " So.", "rejected": " No."},
    ],
    ids=["Anthropic's", "Dahoas's", "without a response"],
)
def test_full_hh_rlhf(row, tmp_path):
    found = prepared("full_hh_rlhf", tmp_path, {"data.jsonl": [row]})
    assert found == {
        "train": [
            {
                "data_source": "Dahoas/full-hh-rlhf",
                "prompt": [{"role": "user", "content": CHAT}],
                "ability": "alignment",
                "reward_model": {"style": "model", "ground_truth": " So."},
                "extra_info": {"split": "train", "index": 0},
            }
        ]
    }


@pytest.mark.parametrize("label", ["label", "completion"])
def test_tldr(label, tmp_path):
    row = {"prompt": "SUBREDDIT: r/tifu\nPOST: Long.\nTL;DR:", label: " Short."}
    found = prepared("tldr", tmp_path, {"train.jsonl": [row], "valid.jsonl": [row, row]})
    assert {split: len(rows) for split, rows in found.items()} == {"train": 1, "validation": 2}
    assert found["train"][0]["prompt"] == [{"role": "user", "content": row["prompt"]}]
    assert truths(found["validation"]) == [" Short."] * 2


def test_eurus_in_parquet_is_read_as_it_was_written(tmp_path, capsys):
    reason = "the optional package pyarrow is missing"
    pyarrow = pytest.importorskip("pyarrow", reason=reason)
    parquet = pytest.importorskip("pyarrow.parquet", reason=reason)
    rows = [
        eurus("2"),
        eurus(json.dumps(PROGRAM), "code", "taco"),
        eurus(json.dumps({**PROGRAM, "fn_name": "add"}), "code", "apps"),
    ]
    (tmp_path / "raw").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "raw" / "validation.parquet")
    prepared("eurus", tmp_path, {}, "parquet")
    assert "left out 1 rows whose tests call a function" in capsys.readouterr().out
    path = tmp_path / "new" / "out" / "validation.parquet"
    found = read_rows([str(path)], "data.train_files", "prompt", "answer")
    assert [row.answer for row in found] == ["2", json.dumps(PROGRAM)]
    assert found[0].prompt == rows[0]["prompt"]
    assert [verifier_for(row.data_source) for row in found] == ["math_flexible", "code"]
    assert [row.extra["extra_info"]["index"] for row in found] == [0, 1]
    assert parse_tests(found[1].answer) == [
        {"input": "1 2\n", "output": "3\n"}, {"input": "3 4\n", "output": "7\n"}
    ]  # fmt: skip


BAD = [
    ("gsm8k", {"train.jsonl": [gsm8k("#### 1"), gsm8k("none")]},
     r"train.jsonl line 2 = .*\n.*no number after '#### '\n.*gsm8k has question, and answer"),
    ("gsm8k", {"train.jsonl": [{"prompt": "a"}]}, r"line 1 = .*\n.*no key 'question'; the row has"),
    ("gsm8k", {"train.jsonl": [{"question": 3, "answer": "#### 1"}]}, "'question' is not a text"),
    ("gsm8k", {"train.txt": ["a"]}, r"--from = .*\n.*holds no data files"),
    ("math", {"train/1.json": math("no box")}, r"1.json line 1 = .*\n.*no .boxed answer"),
    ("math", {"train/1.json": math(r"\boxed{1")}, r"no .boxed answer"),
    ("full_hh_rlhf", {"a.jsonl": [{"chosen": "Hello"}]}, "no question before 'Assistant:'"),
    ("tldr", {"a.jsonl": [{"prompt": "POST"}]}, "no key 'label'"),
    ("eurus", {"a.jsonl": [eurus("[", "code")]}, "of a program is not JSON"),
    ("eurus", {"a.jsonl": [{**eurus("1"), "prompt": [{"role": "user"}]}]}, "lacks 'role' or"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "files", "message"), BAD)
def test_a_bad_row_ends_the_preparation_and_nothing_is_written(
    name, files, message, tmp_path, capsys
):
    source, out = write(tmp_path / "raw", files), tmp_path / "out"
    arguments = ["prepare", name, "--from", str(source), "--out", str(out), "--format", "jsonl"]
    assert main(arguments) == 2
    assert re.search(message, capsys.readouterr().err)
    assert sorted(os.listdir(tmp_path)) == ["raw"]


def test_a_folder_with_files_is_not_overwritten(tmp_path, capsys):
    source = write(tmp_path / "raw", {"train.jsonl": [gsm8k("#### 1")]})
    arguments = ["prepare", "gsm8k", "--from", str(source), "--out", str(source)]
    assert main(arguments) == 2
    assert "is not an empty folder" in capsys.readouterr().err
    assert os.listdir(source) == ["train.jsonl"]


def test_the_command_is_the_documented_one(tmp_path):
    command = [sys.executable, "-m", "mppo.data", "prepare", "gsm8k", "--from", "/no/such", "--out"]
    result = subprocess.run([*command, str(tmp_path / "out")], capture_output=True, text=True)
    assert result.returncode == 2
    assert "no such folder" in result.stderr
    assert "Traceback" not in result.stderr
