"""A checkpoint from elsewhere is read only where its pickles run nothing."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import pytest
import torch
from deed import Deed
from megatron.core.dist_checkpointing.strategies import torch as strategy
from torch.distributed._shard.sharded_tensor import metadata as sharded
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mppo.weights.pickles import check_pickles, read_metadata
from mppo.weights.torch_dist import read_checkpoint


def write(folder: Path, extra: object, planner_data: object = None) -> None:
    """A checkpoint of one tensor and one object."""
    stream = io.BytesIO()
    torch.save(extra, stream)
    (folder / "__0_0.distcp").write_bytes(b"before" + stream.getvalue())
    size = torch.Size((2, 3))
    chunk = ChunkStorageMetadata(offsets=torch.Size((0, 0)), sizes=size)
    contents = Metadata(
        state_dict_metadata={
            "weight": TensorStorageMetadata(TensorProperties(torch.bfloat16), size, [chunk]),
            "extra": BytesStorageMetadata(),
        },
        planner_data=planner_data,
        storage_data={
            MetadataIndex("weight", (0, 0)): _StorageInfo("__0_0.distcp", 0, 6),
            MetadataIndex("extra"): _StorageInfo("__0_0.distcp", 6, len(stream.getvalue())),
        },
    )
    (folder / ".metadata").write_bytes(pickle.dumps(contents))


def test_a_table_of_contents_and_plain_values_pass(tmp_path):
    write(tmp_path, {"step": 3, "tensor": torch.ones(2)}, {"key": (1, 2)})
    check_pickles(tmp_path)


@pytest.mark.parametrize(("place", "file"), [("table", ".metadata"), ("object", "__0_0.distcp")])
def test_what_would_run_is_named_and_not_run(tmp_path, place, file):
    deed = Deed(tmp_path / "mark")
    write(tmp_path, deed if place == "object" else None, deed if place == "table" else None)
    told = rf"{file}: more than a table of contents and plain values: it names [\w.]+; take a "
    with pytest.raises(ValueError, match=told):
        check_pickles(tmp_path)
    assert not (tmp_path / "mark").exists()


def test_a_table_that_would_run_something_is_read_nowhere(tmp_path):
    write(tmp_path, None, Deed(tmp_path / "mark"))
    for read in (read_metadata, read_checkpoint):
        with pytest.raises(ValueError, match=r"\.metadata: .*: it names posix\.mkdir; take a"):
            read(tmp_path)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("old", ["MCoreMetadata", "TensorProperties"])
def test_tables_of_older_programs_are_read(tmp_path, old):
    """Megatron-Core 0.15 named a subclass of its own; torch 2.2 kept a class elsewhere."""
    write(tmp_path, None, {"key": (1, 2)})
    table = tmp_path / ".metadata"
    contents = pickle.loads(table.read_bytes())
    if old == "MCoreMetadata":
        as_saved = dict(vars(contents), mcore_data={"weight": (2, 3)})
        contents = strategy.MCoreMetadata()
        vars(contents).update(as_saved)
    else:
        contents.state_dict_metadata["weight"].properties = sharded.TensorProperties(torch.float16)
    table.write_bytes(pickle.dumps(contents))
    assert old.encode() in table.read_bytes()
    assert read_metadata(tmp_path).planner_data == {"key": (1, 2)}
    check_pickles(tmp_path)


def test_a_pickle_of_something_else_is_no_table(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps([1]))
    with pytest.raises(ValueError, match="it holds a list"):
        check_pickles(tmp_path)


def test_a_broken_table_is_refused(tmp_path):
    (tmp_path / ".metadata").write_bytes(b"")
    with pytest.raises(ValueError, match="Ran out of input"):
        check_pickles(tmp_path)
