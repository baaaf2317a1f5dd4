"""Copy tasks that assemble tensors from parts of other tensor files, and the copier that runs them.

Every tensor is treated as a matrix (a vector has one column). A task holds the place of a target
and the rectangles of the sources that fill it. The copier processes windows of rows of bounded size
with ``pread`` and ``pwrite``, so its memory does not depend on the size of the model.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mppo.safety.input_error import InputError
from mppo.weights.hf.output_folder import write_all
from mppo.weights.hf.safetensors_file import StoredTensor, byte_view, read_at

BUFFER_BYTES = 32 << 20
OPEN_FILES = 64


@dataclass(frozen=True)
class Scales:
    """Dequantisation factors of a source: one float per ``block`` of rows and columns."""

    stored: StoredTensor
    block: tuple[int, int]


@dataclass(frozen=True)
class Stretch:
    """A rectangle of a source and its place in the target, in rows and columns of matrices."""

    source: StoredTensor
    source_row: int
    target_row: int
    rows: int
    target_column: int = 0
    scales: Scales | None = None


@dataclass(frozen=True)
class CopyTask:
    """One tensor to write, with bytes just before (``head``) and after it (``tail``); InputError
    unless the stretches have its area."""

    name: str
    target: StoredTensor
    stretches: tuple[Stretch, ...]
    head: bytes = b""
    tail: bytes = b""

    def __post_init__(self) -> None:
        rows, columns = matrix(self.target.shape)
        covered = sum(s.rows * matrix(s.source.shape)[1] for s in self.stretches)
        if covered != rows * columns:
            raise InputError(
                f"{self.name}: the sources fill {covered} of {rows * columns} elements; the "
                "checkpoint is incomplete, or of another model"
            )

    @property
    def nbytes(self) -> int:
        return self.target.nbytes


def matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor seen as a matrix."""
    if len(shape) < 2:
        return (shape[0] if shape else 1), 1
    return shape[0], math.prod(shape[1:])


class Copier:
    """Reads sources and writes targets by open files and two buffers; one row may be larger."""

    def __init__(self, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._buffer = np.empty(buffer_bytes, dtype=np.uint8)
        self._temporary = np.empty(0, dtype=np.uint8)
        self._files: OrderedDict[tuple[Path, int], int] = OrderedDict()

    def run(self, task: CopyTask) -> None:
        """Write one task's head, data and tail; InputError if a source is cut short."""
        target = task.target
        descriptor = self._open(target.file, os.O_WRONLY)
        if task.head:
            write_all(descriptor, task.head, target.offset - len(task.head))
        row_bytes = _row_bytes(target)
        for first, window in self.windows(task):
            write_all(descriptor, window, target.offset + first * row_bytes)
        if task.tail:
            write_all(descriptor, task.tail, target.offset + target.nbytes)

    def windows(self, task: CopyTask, fill: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the target's bytes, window by window, without writing them: first row and the bytes
        from there; the array is reused by the next window. ``fill`` is a byte with which each
        window is filled first, to make holes visible."""
        rows, row_bytes = matrix(task.target.shape)[0], _row_bytes(task.target)
        step = max(1, len(self._buffer) // max(row_bytes, 1))
        for first in range(0, rows, step):
            count = min(step, rows - first)
            if count * row_bytes > len(self._buffer):
                self._buffer = np.empty(count * row_bytes, dtype=np.uint8)
            window = self._buffer[: count * row_bytes]
            if fill is not None:
                window.fill(fill)
            for stretch in task.stretches:
                self._fill(window, task.target, first, count, stretch)
            yield first, window

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def flush(self) -> None:
        for (_, mode), descriptor in self._files.items():
            if mode == os.O_WRONLY:
                os.fdatasync(descriptor)

    def _fill(
        self, window: np.ndarray, target: StoredTensor, first: int, count: int, stretch: Stretch
    ) -> None:
        begin = max(first, stretch.target_row)
        end = min(first + count, stretch.target_row + stretch.rows)
        if begin >= end:
            return
        source, row_bytes = stretch.source, _row_bytes(target)
        source_row = stretch.source_row + begin - stretch.target_row
        part = window[(begin - first) * row_bytes : (end - first) * row_bytes]
        columns, width = matrix(target.shape)[1], matrix(source.shape)[1]
        # full rows of the same dtype need no intermediate buffer
        if source.dtype == target.dtype and width == columns and stretch.scales is None:
            self._read(source, source_row, end - begin, byte_view(torch.from_numpy(part)))
            return
        values = self._rows(source, source_row, end - begin, stretch.scales)
        out = torch.from_numpy(part).view(target.dtype).view(end - begin, columns)
        out[:, stretch.target_column : stretch.target_column + width].copy_(values)

    def _rows(self, source: StoredTensor, first: int, count: int, scales: Scales | None) -> Tensor:
        nbytes = count * _row_bytes(source)
        if nbytes > len(self._temporary):
            self._temporary = np.empty(nbytes, dtype=np.uint8)
        raw = self._temporary[:nbytes]
        self._read(source, first, count, byte_view(torch.from_numpy(raw)))
        columns = matrix(source.shape)[1]
        values = torch.from_numpy(raw).view(source.dtype).view(count, columns)
        if scales is None:
            return values
        # read only the rows of scales that belong to these rows, then repeat each over its block
        rows_per, columns_per = scales.block
        top, bottom = first // rows_per, (first + count - 1) // rows_per + 1
        factors = torch.empty(
            bottom - top, matrix(scales.stored.shape)[1], dtype=scales.stored.dtype
        )
        self._read(scales.stored, top, bottom - top, byte_view(factors))
        row_index = torch.arange(first, first + count) // rows_per - top
        spread = factors.float()[row_index].repeat_interleave(columns_per, dim=1)[:, :columns]
        return values.float().mul_(spread)

    def _read(self, source: StoredTensor, first: int, count: int, into: memoryview) -> None:
        offset = source.offset + first * _row_bytes(source)
        read_at(self._open(source.file, os.O_RDONLY), into, offset, source.file)

    def _open(self, file: Path, mode: int) -> int:
        key = (file, mode)
        if key in self._files:
            self._files.move_to_end(key)
            return self._files[key]
        if len(self._files) >= OPEN_FILES:
            (_, oldest_mode), oldest = self._files.popitem(last=False)
            if oldest_mode == os.O_WRONLY:
                os.fdatasync(oldest)
            os.close(oldest)
        self._files[key] = os.open(file, mode)
        return self._files[key]


def _row_bytes(stored: StoredTensor) -> int:
    return matrix(stored.shape)[1] * stored.dtype.itemsize
