"""A loader answers only after its copies are done: on CUDA, copies are queued."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mppo.rollout.transport import checked_load, slice_load
from mppo.rollout.transport.checked_load import BYTES, TABLE
from mppo.weights.bucket import BucketLayout


class _Server(nn.Module):
    def load_weights(self, tensors: list) -> None:
        pass


@pytest.mark.skipif(torch.version.cuda is not None, reason="shows as an error without CUDA")
@pytest.mark.parametrize("loader", [checked_load, slice_load])
def test_a_loader_waits_for_the_stream_of_the_device_that_holds_the_bytes(loader, tmp_path):
    """A tensor on CUDA without data; torch without CUDA refuses to wait for its stream."""
    report = tmp_path / "report"
    if loader is checked_load:
        table = checked_load.bucket_table(BucketLayout((), 0), None, report, True)
    else:
        table = slice_load.slice_table([], report)
    for kind, waits in (("cuda", True), ("cpu", False)):
        with FakeTensorMode():
            content = torch.empty(0, dtype=torch.uint8, device=kind)
        loader.load(_Server(), [(BYTES, content), (TABLE, table)])
        assert ("CUDA" in (report.read_text() if report.exists() else "")) == waits
        report.unlink(missing_ok=True)
