"""The route of the weights by pieces: each rollout rank is handed its own, by the rank beside it.

The training rank beside a rollout rank lays out what is for it in memory both can read; the rank
that talks to the server collects the handles and passes them on, one per rollout rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from mppo.config.sections.rollout import RolloutConfig
from mppo.parallel.collectives import all_gather_objects
from mppo.rollout.engine import WeightBucket, WeightSource
from mppo.rollout.sglang.fleet import Fleet
from mppo.rollout.transport.buckets import SharedBuffer
from mppo.rollout.transport.checked_load import tensor_checksum
from mppo.rollout.transport.slice_load import SLICE_LOADER, MessageRow, PieceRow, slice_table
from mppo.rollout.transport.sync import TensorTransport
from mppo.weights.slices.source import Key, Message, SliceBucket, SliceRequest, SliceStream


class SliceRoute(TensorTransport):
    """Shared memory on one machine, as ``TensorTransport``, but a rollout rank's own pieces only.

    Args:
        device: where the weights are.
        tensor_parallel: ranks of each server.
        reports: for each server, the file in which it tells what is wrong.
        report: that of this rank's servers.
        world: number of ranks.
        group: process group of the ranks; None is the default one.
    """

    _loader = SLICE_LOADER

    def __init__(
        self,
        device: torch.device,
        tensor_parallel: int,
        reports: Sequence[Path],
        report: Path,
        world: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(device, tensor_parallel, report=report)
        self._reports, self._world, self._everyone = reports, world, group
        self._of_slots: tuple[dict[int, SharedBuffer], dict[int, SharedBuffer]] = ({}, {})

    def send_slices(self, bucket: SliceBucket) -> None:
        """Take one bucket, as ``send``; every rank does this in step."""
        if bucket.empty:
            return
        turn, self._turn = self._turn, 1 - self._turn
        mine: dict[int, str] = {}
        self._try(lambda: mine.update(self._handles(turn, bucket)))
        # the others fill their buffers of the last turn as soon as the exchange is over
        self._try(lambda: self._wait(1 - turn))
        everyone = all_gather_objects(mine, self._world, self._everyone)
        handles = {slot: handle for part in everyone for slot, handle in part.items()}
        for server, api in self._servers.items():
            first = server * self._tensor_parallel
            payloads = [handles.get(first + rank, "") for rank in range(self._tensor_parallel)]
            if self._failure is None and all(payloads):
                future = self._pool.submit(self._load, api, payloads, self._version)
                self._in_flight[turn].append(future)
            elif self._failure is None:
                self._failure = RuntimeError(f"{api.url}: a rank had no weights to hand over")

    def _handles(self, turn: int, bucket: SliceBucket) -> dict[int, str]:
        """Fill this turn's buffers; a handle for each rollout rank hosted here."""
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
        """See ``Route``."""
        try:
            super().close()
        finally:
            if self._device.type != "cpu":  # device memory belongs to training between updates
                self._of_slots = ({}, {})

    def stop(self) -> None:
        """See ``Route``."""
        super().stop()
        self._of_slots = ({}, {})


def message_row(begin: int, message: Message, checks: Mapping[Key, tuple[int, int]]) -> MessageRow:
    """A message as the loader reads it."""
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
    """The pieces on their way, and which weights each server of this rank holds.

    Args:
        rollout: the recipe's section.
        fleet: the run's own servers.
        dtype: type of their weights.
        device: where the trainer's are.
        folder: where servers tell what is wrong.
        rank, world: this rank and the number of ranks.
        group: process group of the ranks; None is the default one.

    Raises:
        ValueError: the servers would forget what the next update takes for granted.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        fleet: Fleet,
        dtype: torch.dtype,
        device: torch.device,
        folder: Path,
        rank: int,
        world: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        delta, backup = rollout.sync_mode == "delta", "enable_weights_cpu_backup"
        if delta and device.type != "cpu" and not rollout.server_args.get(backup):
            raise ValueError(
                "rollout.sync_mode = delta builds on the weights servers hold, which sleeping on a "
                f"GPU throws away: set rollout.server_args.{backup} to true (it keeps them in host "
                "memory), or sync_mode to sliced"
            )
        self._world, self._group = world, group
        size = fleet.tensor_parallel
        heads = [fleet.head_of(server) for server in range(fleet.count)]
        self._request = SliceRequest(
            hosts=tuple(tuple((head + i) % world for i in range(size)) for head in heads),
            dtype=dtype,
            bucket_bytes=rollout.sync_bucket_mb << 20,
            keep=delta,
            checksum=tensor_checksum if rollout.verify_sync == "checksum" else None,
            expert_parallel=rollout.expert_parallel_size,
        )
        files = [(folder / f"refused_{rank}.txt").resolve() for rank in range(world)]
        reports = [files[head] for head in heads]
        self.route = SliceRoute(device, size, reports, files[rank], world, group)
        self._held: dict[int, int] = {}
        self._stream: SliceStream | None = None

    def takes(self, buckets: Iterable[WeightBucket]) -> bool:
        """Whether a stream can be had as pieces."""
        return isinstance(buckets, WeightSource) and buckets.slices is not None

    def send(self, source: WeightSource, version: int, servers: Collection[int]) -> None:
        """Send what these servers of this rank lack to them; collective, between the route's
        ``open`` and ``close``."""
        assert source.slices is not None
        stream = source.slices(self._request)
        if stream is not self._stream:  # what was sent before is another's
            self._stream, self._held = stream, {}
        mine = {self._held.pop(server, None) for server in servers}
        held = set().union(*all_gather_objects(mine, self._world, self._group))
        for bucket in stream.update(version, held.pop() if len(held) == 1 else None):
            self.route.send_slices(bucket)

    def holds(self, servers: Collection[int], version: int) -> None:
        """These servers have loaded all of a version."""
        self._held.update(dict.fromkeys(servers, version))

    def forget(self, servers: Collection[int]) -> None:
        """These servers hold something else, or nothing."""
        for server in servers:
            self._held.pop(server, None)

    def metrics(self) -> dict[str, float]:
        """Bytes of the last update, over all ranks."""
        if self._stream is None:
            return {}
        moved = vars(self._stream.bytes)
        return {f"rollout/sync_bytes/{name}": float(number) for name, number in moved.items()}
