"""A foreign checkpoint is read without calling, creating or changing what its pickles name."""

from __future__ import annotations

import io
import pickle
import struct
from pathlib import Path

import pytest
import torch
from malicious_pickle import MaliciousPickle
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

from mppo.weights.torch_dist.contents import read_checkpoint
from mppo.weights.torch_dist.format import locate
from mppo.weights.torch_dist.pickles import read_pickle

SIZE = torch.Size((2, 3))
PLACE = (0, 1)
"""Offset and length of the chunk that ``write`` writes."""


def write(folder: Path, planner_data: object = None) -> Metadata:
    """A checkpoint of one tensor and one object."""
    stream = io.BytesIO()
    torch.save(torch.arange(6).reshape(SIZE), stream)
    data = stream.getvalue()
    (folder / "__0_0.distcp").write_bytes(data)
    chunk = ChunkStorageMetadata(offsets=torch.Size((0, 0)), sizes=SIZE)
    contents = Metadata(
        state_dict_metadata={
            "weight": TensorStorageMetadata(TensorProperties(torch.bfloat16), SIZE, [chunk]),
            "extra": BytesStorageMetadata(),
        },
        planner_data=planner_data,
        storage_data={
            MetadataIndex("weight", (0, 0)): _StorageInfo("__0_0.distcp", 0, len(data)),
            MetadataIndex("extra"): _StorageInfo("__0_0.distcp", 0, len(data)),
        },
    )
    save(folder, contents)
    return contents


def save(folder: Path, contents: object) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(contents))


class MemberOfAnEnum:
    """As Python 3.11.0 to 3.11.3 pickle a member."""

    def __reduce__(self) -> tuple:
        return getattr, (sharded.MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")


def test_members_of_enums_are_read_as_any_python_writes_them(tmp_path):
    write(tmp_path, {"format": MemberOfAnEnum()})
    assert read_checkpoint(tmp_path).keys() == {"weight"}


def test_tensors_are_read_and_objects_are_not(tmp_path):
    write(tmp_path, {"key": (1, 2)})
    found = read_checkpoint(tmp_path)
    assert found.keys() == {"weight"}
    assert (found["weight"].shape, found["weight"].dtype) == ((2, 3), torch.bfloat16)
    stored = locate(found["weight"].chunks[0])
    assert (stored.shape, stored.dtype) == ((2, 3), torch.int64)
    data = stored.file.read_bytes()[stored.offset :][: stored.nbytes]
    assert struct.unpack("<6q", data) == (0, 1, 2, 3, 4, 5)


def test_a_table_that_would_run_code_is_named_and_not_run(tmp_path):
    write(tmp_path, MaliciousPickle(tmp_path / "mark"))
    reported = r"\.metadata: holds more than a checkpoint's metadata: it names posix\.mkdir; use"
    with pytest.raises(ValueError, match=reported):
        read_checkpoint(tmp_path)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("old", ["MCoreMetadata", "TensorProperties"])
def test_tables_of_older_programs_are_read(tmp_path, old):
    """Megatron-Core 0.15 used its own subclass; torch 2.2 had a class in another module."""
    contents = write(tmp_path)
    if old == "MCoreMetadata":
        as_saved = dict(vars(contents), mcore_data={"weight": (2, 3)})
        contents = strategy.MCoreMetadata()
        vars(contents).update(as_saved)
    else:
        contents.state_dict_metadata["weight"].properties = sharded.TensorProperties(torch.float16)
    save(tmp_path, contents)
    assert old.encode() in (tmp_path / ".metadata").read_bytes()
    expected = torch.bfloat16 if old == "MCoreMetadata" else torch.float16
    assert read_checkpoint(tmp_path)["weight"].dtype == expected


def forge(contents: Metadata, how: str) -> object:
    """A table of contents with something in it that torch never puts there."""
    entries, stored = contents.state_dict_metadata, contents.storage_data
    weight = entries["weight"]
    place = stored[MetadataIndex("weight", (0, 0))]
    match how:
        case "a list":
            return [1]
        case "no tables":
            contents.storage_data = None
        case "an object with chunks":
            entries["extra"].chunks = []
        case "a key that is a number":
            entries[1] = BytesStorageMetadata()
        case "a tensor of another class":
            entries["weight"] = weight.chunks[0]
        case "a shape that is a list":
            weight.size = [2, 3]
        case "a negative size":
            weight.size = torch.Size((-2, 3))
        case "a size of true":
            weight.size = (True, 6)
        case "no dtype":
            weight.properties = BytesStorageMetadata()
        case "a chunk outside":
            weight.chunks[0].offsets = torch.Size((1, 0))
        case "an offset before the file":
            place.offset = -1
        case "a length beyond the file":
            place.length = 1 << 40
        case "a length of a fraction":
            place.length = 1.5
        case "a name with dots":
            place.relative_path = "../__0_0.distcp"
        case "an absolute name":
            place.relative_path = "/etc/passwd"
        case "a packed chunk":
            place.transform_descriptors = ["zstd"]
    return contents


@pytest.mark.parametrize(
    ("how", "reported"),
    [
        ("a list", "it holds a list in the place of a MCoreMetadata"),
        ("no tables", "it holds no tables"),
        ("an object with chunks", "a BytesStorageMetadata in it has 'chunks'"),
        ("a key that is a number", "a key is not a text"),
        ("a tensor of another class", "it holds a ChunkStorageMetadata in the place of"),
        ("a shape that is a list", "weight has no shape and chunks"),
        ("a negative size", "weight has no shape and chunks"),
        ("a size of true", "weight has no shape and chunks"),
        ("no dtype", "a tensor has no dtype"),
        ("a chunk outside", "a chunk of weight exceeds it"),
        ("an offset before the file", "weight has no valid byte range of a file"),
        ("a length beyond the file", "cut short: weight ends at byte"),
        ("a length of a fraction", "weight has no valid byte range of a file"),
        ("a name with dots", "leads out of the folder"),
        ("an absolute name", "leads out of the folder"),
        ("a packed chunk", "is compressed"),
    ],
)
def test_a_forged_table_is_refused(tmp_path, how, reported):
    save(tmp_path, forge(write(tmp_path), how))
    with pytest.raises(ValueError, match=reported):
        read_checkpoint(tmp_path)


def name(module: str, attribute: str) -> bytes:
    """The pickle operations that name an object."""
    return pickle.GLOBAL + f"{module}\n{attribute}\n".encode()


def text(value: str) -> bytes:
    return pickle.BINUNICODE + struct.pack("<I", len(value)) + value.encode()


TABLES = "torch.distributed.checkpoint.metadata"
ATTRIBUTES = pickle.EMPTY_DICT + text("chunks") + pickle.NONE + pickle.SETITEM
PROGRAMS = {
    "attributes of a class": (
        name(TABLES, "BytesStorageMetadata") + pickle.NONE + ATTRIBUTES + pickle.TUPLE2
        + pickle.BUILD,
        "it sets attributes of a Name",
    ),
    "attributes of a function": (
        name("torch.serialization", "_get_layout") + ATTRIBUTES + pickle.BUILD,
        "it sets attributes of a Name",
    ),
    "attributes twice": (
        name(TABLES, "Metadata") + pickle.EMPTY_TUPLE + pickle.NEWOBJ + ATTRIBUTES + pickle.BUILD
        + ATTRIBUTES + pickle.BUILD,
        "it sets attributes of a Record",
    ),
    "a call of what was made": (
        name(TABLES, "Metadata") + pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.EMPTY_TUPLE
        + pickle.REDUCE,
        "it calls a Record",
    ),
    "a persistent object": (pickle.PERSID + b"1\n", "it is damaged"),
    "an instance": (pickle.MARK + pickle.INST + b"os\nsystem\n", "it is damaged"),
    "an extension": (pickle.EXT1 + b"\1", "it is damaged"),
    "a size of itself": (
        name("torch", "Size") + pickle.EMPTY_LIST + pickle.TUPLE1 + pickle.REDUCE, None,
    ),
    "a tuple nested a million times as key": (
        pickle.EMPTY_DICT + pickle.EMPTY_TUPLE + pickle.TUPLE1 * 10**6 + pickle.NONE
        + pickle.SETITEM,
        "its dict has no plain keys",
    ),
    "a place four billion in the memo": (
        pickle.NONE + pickle.LONG_BINPUT + b"\xff\xff\xff\xff", None,
    ),
    "a text longer than the file": (
        pickle.BINUNICODE8 + struct.pack("<Q", 1 << 40), "cut short|damaged",
    ),
    "nothing": (b"", "it is cut short"),
}  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_pickle_operation_has_an_effect(program):
    """With Python's own unpickler each of these runs code, changes a class or ends the process."""
    body, reported = PROGRAMS[program]
    data = pickle.PROTO + b"\4" + body + pickle.STOP if body else b""
    if reported is None:
        read_pickle(data)
    else:
        with pytest.raises(pickle.UnpicklingError, match=reported):
            read_pickle(data)
    assert not hasattr(BytesStorageMetadata, "chunks")
    assert not hasattr(torch.serialization._get_layout, "chunks")
