"""Weight updates by slices: each rollout rank reads its own slices from its host.

The host, a training rank on the same device, puts the slices into memory that both can read. The
head rank of a server collects the handles and sends them in one request, one per rollout rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch

from mppo.parallel import device as device_seam
from mppo.parallel.collectives import all_gather_objects
from mppo.recipe.sections.rollout import RolloutConfig
from mppo.rollout.engine import WeightSource
from mppo.rollout.sglang.fleet import Fleet
from mppo.rollout.transport.buckets import SharedBuffer
from mppo.rollout.transport.checked_load import tensor_checksum
from mppo.rollout.transport.slice_load import SLICE_LOADER, MessageRow, PieceRow, slice_table
from mppo.rollout.transport.sync import TensorTransport
from mppo.weights.slices.slice_plan import Key, SliceRequest
from mppo.weights.slices.slice_source import Message, SliceBucket, SliceStream


class SliceTransport(TensorTransport):
    """Shared memory on one machine, as ``TensorTransport``, with each rollout rank's slices only.
    ``reports``: the file of each server to which it writes errors."""

    _loader = SLICE_LOADER

    def __init__(
        self,
        device: torch.device,
        tensor_parallel: int,
        reports: Sequence[Path],
        report: Path,
        world: int,
    ) -> None:
        super().__init__(device, tensor_parallel, report=report)
        self._reports, self._world = reports, world
        self._of_slots: tuple[dict[int, SharedBuffer], dict[int, SharedBuffer]] = ({}, {})

    def send_slices(self, bucket: SliceBucket) -> None:
        """Send one bucket, as ``send``; collective."""
        if bucket.empty:
            return
        turn, self._turn = self._turn, 1 - self._turn
        mine: dict[int, str] = {}
        self._try(lambda: mine.update(self._handles(turn, bucket)))
        # after this exchange the other ranks refill the buffers of the previous turn, which this
        # rank's servers may still be reading
        self._try(lambda: self._wait(1 - turn))
        everyone = all_gather_objects(mine, self._world)
        handles = {slot: handle for part in everyone for slot, handle in part.items()}
        for server, api in self._servers.items():
            first = server * self._tensor_parallel
            payloads = [handles.get(first + rank, "") for rank in range(self._tensor_parallel)]
            if self._failure is None and all(payloads):
                future = self._pool.submit(self._load, api, payloads, self._version)
                self._in_flight[turn].append(future)
            elif self._failure is None:
                self._failure = RuntimeError(
                    f"{api.url}: a training rank could not fill its buffer; see that rank's error"
                )

    def _handles(self, turn: int, bucket: SliceBucket) -> dict[int, str]:
        handles = {}
        for slot, messages in bucket.messages.items():
            buffer = self._of_slots[turn].setdefault(slot, SharedBuffer(self._device))
            begins = buffer.fill_bytes([message.content for message in messages])
            rows = [
                message_row(*placed, bucket.checks) for placed in zip(begins, messages, strict=True)
            ]
            report = self._reports[slot // self._tensor_parallel]
            handles[slot] = buffer.described_payload(slice_table(rows, report))
        return handles

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self._device.type != "cpu":  # device memory belongs to training between updates
                self._of_slots = ({}, {})
                device_seam.collect_shared_memory()

    def stop(self) -> None:
        super().stop()
        self._of_slots = ({}, {})


def message_row(begin: int, message: Message, checks: Mapping[Key, tuple[int, int]]) -> MessageRow:
    """A row of the loader's table; ``begin``: the message's first byte in the rollout rank's
    buffer."""
    pieces = [
        PieceRow(
            piece.target.name,
            piece.target.shape,
            piece.target.expert,
            piece.dim,
            piece.offset,
            piece.shape,
            str(piece.dtype).removeprefix("torch."),
            piece.begin,
            checks.get(piece.key),
        )
        for piece in message.pieces
    ]
    return MessageRow(begin, begin + len(message.content), message.blocks, pieces)


class SliceSync:
    """Updates servers that mppo started by slices, and records which version each server of this
    rank holds. ``request``: the slices that they need; the role plans by it at the first update."""

    def __init__(
        self,
        rollout: RolloutConfig,
        fleet: Fleet,
        dtype: torch.dtype,
        device: torch.device,
        folder: Path,
        rank: int,
        world: int,
    ) -> None:
        self._world = world
        size = fleet.tensor_parallel
        heads = [fleet.head_of(server) for server in range(fleet.count)]
        self.request = SliceRequest(
            hosts=tuple(tuple((head + i) % world for i in range(size)) for head in heads),
            dtype=dtype,
            bucket_bytes=rollout.sync_bucket_mb << 20,
            keep=rollout.sync_mode == "delta",
            checksum=tensor_checksum if rollout.verify_sync == "checksum" else None,
            expert_parallel=rollout.expert_parallel_size,
        )
        files = [(folder / f"refused_{rank}.txt").resolve() for rank in range(world)]
        reports = [files[head] for head in heads]
        self.transport = SliceTransport(device, size, reports, files[rank], world)
        self._held: dict[int, int] = {}
        self._stream: SliceStream | None = None

    def send(self, source: WeightSource, version: int, servers: Collection[int]) -> None:
        """Send to servers of this rank the slices they lack, between ``transport.open`` and
        ``close``. Collective."""
        assert source.slices is not None
        with source.reading():
            stream = source.slices(self.request)
            if stream is not self._stream:  # no changes are known to another stream's weights
                self._stream, self._held = stream, {}
            mine = {self._held.pop(server, None) for server in servers}
            held: set[int | None] = set().union(*all_gather_objects(mine, self._world))
            # changes can be sent only if all servers hold the same version
            for bucket in stream.update(version, held.pop() if len(held) == 1 else None):
                self.transport.send_slices(bucket)

    def record(self, servers: Collection[int], version: int) -> None:
        """Record that servers have loaded all weights of a version."""
        self._held.update(dict.fromkeys(servers, version))

    def forget(self, servers: Collection[int]) -> None:
        """Record that servers hold other weights, or none."""
        for server in servers:
            self._held.pop(server, None)

    def metrics(self) -> dict[str, float]:
        """Bytes of the last update, over all ranks (``rollout/sync_bytes/*``)."""
        if self._stream is None:
            return {}
        moved = vars(self._stream.bytes)
        return {f"rollout/sync_bytes/{name}": float(number) for name, number in moved.items()}
