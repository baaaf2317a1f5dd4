"""Rows of parquet files: the same values as written, and limits of their size."""

from __future__ import annotations

import pytest

from mppo.data import records as reader
from mppo.data.records import read_records
from mppo.recipe.errors import ConfigError

pyarrow = pytest.importorskip("pyarrow", reason="the optional package pyarrow is missing")
parquet = pytest.importorskip("pyarrow.parquet", reason="the optional package pyarrow is missing")

ROWS = [
    {
        "prompt": [{"role": "user", "content": f"{n % 3}+1="}, {"role": "x", "content": None}],
        "answer": None if n == 4 else str(n),
        "data": {"level": n, "tags": ["a", "b"] * (n % 2), "score": 0.5, "raw": b"\x00\xff"},
        "empty": [],
        "same": "text",
    }
    for n in range(3000)
]


def write(path, rows, **options):
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return path


@pytest.mark.parametrize("options", [{}, {"use_dictionary": False}, {"row_group_size": 7}])
def test_rows_are_read_as_they_were_written(options, tmp_path):
    path = write(tmp_path / "rows.parquet", ROWS, **options)
    found = list(read_records(path, "data.train_files"))
    assert [content for _, content in found] == ROWS
    assert found[9][0] == f"{path} row 10"


def test_texts_count_wherever_they_occur():
    texts = pyarrow.array(["ab", None, "ab", "c"])
    nested = pyarrow.array([{"t": ["ab", "ab"]}, {"t": []}, None])
    encoded = nested.type.field(0).type.value_type
    assert encoded == pyarrow.string()
    assert reader._row_bytes(texts.dictionary_encode()) == 4 * 8 + 5
    assert reader._row_bytes(texts) == 4 * 8 + 5
    assert reader._row_bytes(nested) == 3 * 8 + 3 * 8 + 2 * 8 + 4


def test_a_file_may_be_as_large_as_its_limit(tmp_path, monkeypatch):
    path = write(tmp_path / "rows.parquet", [{"prompt": "x" * 1000}] * 100)
    total = 100 * (8 + 1000)
    monkeypatch.setattr(reader, "MAX_RATIO", 0)
    monkeypatch.setattr(reader, "MIN_BYTES", total)
    assert len(list(read_records(path, "data.train_files"))) == 100
    monkeypatch.setattr(reader, "MIN_BYTES", total - 1)
    with pytest.raises(ConfigError) as caught:
        list(read_records(path, "data.train_files"))
    (issue,) = caught.value.issues
    assert (issue.key, issue.value) == ("data.train_files", str(path))
    assert f"its rows have {total} bytes or more" in issue.why
    monkeypatch.setattr(reader, "MAX_VALUES", 99)
    with pytest.raises(ConfigError, match="claims to have 100 values"):
        list(read_records(path, "data.train_files"))
