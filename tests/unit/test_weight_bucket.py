"""A bucket's layout: aligned, the same after JSON, and the one that a receiver computes."""

from __future__ import annotations

import base64
import json
import pickle

import torch

from mppo.rollout.transport.buckets import SharedBuffer
from mppo.rollout.transport.checked_load import BYTES, TABLE
from mppo.weights.bucket import ALIGNMENT, BucketLayout, WeightBucket

NAMED = [
    ("norm", torch.arange(5, dtype=torch.bfloat16)),
    ("bias", torch.arange(3, dtype=torch.float32)),
    ("up", torch.arange(12, dtype=torch.bfloat16).view(3, 4).t()),
]


def test_a_bucket_holds_what_was_packed_at_aligned_places() -> None:
    bucket = WeightBucket.pack(NAMED)
    assert all(place.start % ALIGNMENT == 0 for place in bucket.layout.places)
    assert len(bucket.content) == bucket.layout.nbytes
    for (name, tensor), (packed_name, packed) in zip(NAMED, bucket, strict=True):
        assert packed_name == name
        assert packed.dtype == tensor.dtype
        assert torch.equal(packed, tensor)


def test_the_server_reads_the_layout_that_was_made_with_the_bucket(tmp_path) -> None:
    bucket, buffer = WeightBucket.pack(NAMED), SharedBuffer(torch.device("cpu"))
    buffer.fill(bucket)
    assert buffer.layout is bucket.layout
    payload = buffer.own_payload(tmp_path / "report", single_rank=True, checked=True)
    received = dict(pickle.loads(base64.b64decode(payload)))
    table = json.loads(received[TABLE].numpy().tobytes())
    layout = BucketLayout.from_json(table["layout"])
    assert layout == bucket.layout
    for (_, sent), (_, loaded) in zip(bucket, WeightBucket(layout, received[BYTES]), strict=True):
        assert torch.equal(sent, loaded)


def test_parts_of_one_dtype_have_no_gaps_as_a_receiver_of_shapes_expects() -> None:
    parts = list(WeightBucket.pack(NAMED).by_dtype())
    assert [[place.name for place in part.layout.places] for part in parts] == [
        ["norm", "up"], ["bias"]
    ]  # fmt: skip
    for part in parts:
        at = 0
        for place in part.layout.places:
            assert place.start == at
            at = place.end
        assert at == part.layout.nbytes
        assert all(torch.equal(tensor, dict(NAMED)[name]) for name, tensor in part)


def test_a_bucket_of_one_dtype_without_gaps_is_not_copied() -> None:
    bucket = WeightBucket.pack([("up", torch.ones(3, 8)), ("down", torch.ones(4, 2))])
    (part,) = bucket.by_dtype()
    assert part is bucket
