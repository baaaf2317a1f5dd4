"""The tensors of a Hugging Face folder by name, with reading of slices."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import Tensor

from mppo.safety.input_error import InputError
from mppo.safety.input_files import inside, read_json
from mppo.weights.hf.safetensors_file import StoredTensor, byte_view, read_at, read_header

INDEX = "model.safetensors.index.json"
SCALE_SUFFIX = "_scale_inv"
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class HFFolder:
    """The tensors of a folder's safetensors files.

    8-bit float weights that have a tensor ``<name>_scale_inv`` are dequantised when they are read;
    ``tensors`` does not list the scales. ``bytes_read`` counts stored bytes, without headers.

    Raises:
        InputError: there is no safetensors file, a shard of the index is missing, a file is cut
            short, or a tensor is stored twice or not at all.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise InputError(f"{path}: no such folder")
        stored: dict[str, StoredTensor] = {}
        index = self._index()
        for file in self._files(index):
            for name, tensor in read_header(file).items():
                if name in stored:
                    raise InputError(
                        f"{name} is stored in {stored[name].file} and in {file}; remove one of "
                        "the files"
                    )
                stored[name] = tensor
        lost = [name for name in index or {} if name not in stored]
        if lost:
            raise InputError(
                f"{path}: {INDEX} names {len(lost)} tensors that no file holds, such as {lost[0]}; "
                "download the folder again"
            )
        self._scales = {
            name: tensor
            for name, tensor in stored.items()
            if name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in stored
        }
        self.tensors = {n: t for n, t in stored.items() if n not in self._scales}
        self.bytes_read = 0
        self._maps: dict[Path, mmap.mmap] = {}
        self._block_size: tuple[int, int] | None = None

    def _index(self) -> dict[str, str] | None:
        file = self.path / INDEX
        if not file.exists():
            return None
        places = read_json(file).get("weight_map")
        names = places.values() if isinstance(places, dict) else [None]
        if not all(isinstance(name, str) for name in names):
            raise InputError(
                f"{file}: unreadable index (no weight_map of tensors to files); download it again"
            )
        return places

    def _files(self, index: dict[str, str] | None) -> list[Path]:
        if index is None:
            names = sorted(file.name for file in self.path.glob("*.safetensors"))
            if not names:
                raise InputError(
                    f"{self.path}: no *.safetensors file; a folder with only *.bin must first be "
                    "saved again with save_pretrained(..., safe_serialization=True)"
                )
            return [inside(self.path, name) for name in names]
        files = [inside(self.path, name) for name in set(index.values())]
        missing = sorted(file.name for file in files if not file.exists())
        if missing:
            raise InputError(
                f"{self.path}: {INDEX} names {', '.join(missing)}, not in the folder; download "
                "the folder again"
            )
        return sorted(files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored(name).shape

    def scales(self, name: str) -> tuple[StoredTensor, tuple[int, int]] | None:
        """Return a tensor's scales and the block (rows, columns) of each; None if not quantised;
        InputError if an 8-bit float tensor has no scales, or scales of a wrong shape."""
        stored, scale = self._stored(name), self._scales.get(name + SCALE_SUFFIX)
        if stored.dtype not in FLOAT8:
            return None
        if scale is None:
            raise InputError(
                f"{name}: stored as {stored.dtype} without {name}{SCALE_SUFFIX}; use a folder with "
                "its scales, or an unquantised one"
            )
        rows, columns = self._quantisation_block()
        if len(stored.shape) != 2:
            raise InputError(f"{name}: stored as {stored.dtype}, but is not a matrix")
        expected = (-(-stored.shape[0] // rows), -(-stored.shape[1] // columns))
        if scale.shape != expected:
            raise InputError(
                f"{name}{SCALE_SUFFIX}: shape {list(scale.shape)}, but blocks of {rows} x "
                f"{columns} need {list(expected)}"
            )
        return scale, (rows, columns)

    def read_into(self, target: Tensor, name: str, dim: int = 0, start: int = 0) -> None:
        """Fill ``target``, of any device, dtype and strides, from a slice of a tensor; its size
        along ``dim`` is the length of the slice.

        Raises:
            InputError: no such tensor, a shape that does not fit, or 8-bit floats without scales.
        """
        stored = self._stored(name)
        length = target.shape[dim] if target.dim() else 1
        expected = (*stored.shape[:dim], length, *stored.shape[dim + 1 :])
        if tuple(target.shape) != expected or start + length > stored.shape[dim]:
            raise InputError(
                f"{name}: shape {list(stored.shape)} in {stored.file.name} does not hold "
                f"{list(target.shape)} at {start} of dimension {dim}; config.json and the weights "
                "do not belong together"
            )
        if stored.dtype in FLOAT8:
            self._dequantise_into(target, name, dim, start)
        elif (dim == 0 or length == stored.shape[dim]) and _takes_bytes(target, stored.dtype):
            self._read_bytes(target, stored, start)
        else:
            target.copy_(self._stretch(stored, dim, start, length))
            self._forget(stored, dim, start, length)

    def read(self, name: str) -> Tensor:
        """Read a full tensor in its stored dtype (float32 if it is dequantised)."""
        stored = self._stored(name)
        dtype = torch.float32 if stored.dtype in FLOAT8 else stored.dtype
        target = torch.empty(stored.shape, dtype=dtype)
        self.read_into(target, name)
        return target

    def _stored(self, name: str) -> StoredTensor:
        if name not in self.tensors:
            raise InputError(f"{self.path}: no tensor {name}")
        return self.tensors[name]

    def _read_bytes(self, target: Tensor, stored: StoredTensor, start: int) -> None:
        row = stored.nbytes // max(stored.shape[0], 1) if stored.shape else 0
        view = byte_view(target)
        with open(stored.file, "rb", buffering=0) as stream:
            read_at(stream.fileno(), view, stored.offset + start * row, stored.file)
        self.bytes_read += len(view)

    def _stretch(self, stored: StoredTensor, dim: int, start: int, length: int) -> Tensor:
        part = self._view(stored).narrow(dim, start, length)
        self.bytes_read += part.nbytes
        return part

    def _view(self, stored: StoredTensor) -> Tensor:
        """Map the stored bytes as a tensor, without reading them."""
        mapped = self._maps.get(stored.file)
        if mapped is None:
            with open(stored.file, "rb") as stream:
                mapped = mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_WRITE,
                                   flags=mmap.MAP_PRIVATE)  # fmt: skip
            self._maps[stored.file] = mapped
        count = stored.nbytes // stored.dtype.itemsize
        if not count:
            return torch.empty(stored.shape, dtype=stored.dtype)
        raw = torch.frombuffer(mapped, dtype=torch.uint8, count=stored.nbytes, offset=stored.offset)
        if stored.offset % stored.dtype.itemsize:
            raw = raw.clone()
        return raw.view(stored.dtype).view(stored.shape)

    def _forget(self, stored: StoredTensor, dim: int, start: int, length: int) -> None:
        """Return the mapped pages of a slice to the system after it was read."""
        row = stored.nbytes // max(stored.shape[0], 1) if stored.shape else 0
        first = stored.offset + (start * row if dim == 0 else 0)
        last = first + length * row if dim == 0 else stored.offset + stored.nbytes
        page = mmap.PAGESIZE
        begin = first // page * page
        mapped = self._maps[stored.file]
        if last > begin:
            mapped.madvise(mmap.MADV_DONTNEED, begin, min(last, len(mapped)) - begin)

    def _dequantise_into(self, target: Tensor, name: str, dim: int, start: int) -> None:
        """Fill ``target`` with ``weight * scale`` of a slice, with one scale per block."""
        stored, found = self._stored(name), self.scales(name)
        assert found is not None
        scale, (rows, columns) = found
        length = target.shape[dim]
        weight = self._stretch(stored, dim, start, length).to(torch.float32)
        block = (rows, columns)[dim]
        index = torch.arange(start, start + length) // block
        other = torch.arange(stored.shape[1 - dim]) // (rows, columns)[1 - dim]
        scales = self._stretch(scale, 0, 0, scale.shape[0]).to(torch.float32)
        spread = scales[index][:, other] if dim == 0 else scales[other][:, index]
        target.copy_(weight.mul_(spread))
        self._forget(stored, dim, start, length)

    def _quantisation_block(self) -> tuple[int, int]:
        if self._block_size is None:
            file = self.path / "config.json"
            settings = read_json(file).get("quantization_config") or {}
            block = settings.get("weight_block_size") or [128, 128]
            sizes = isinstance(block, list) and [n for n in block if type(n) is int and n > 0]
            if not sizes or len(sizes) != 2 or len(block) != 2:
                raise InputError(f"{file}: weight_block_size {block}; give rows and columns")
            self._block_size = (sizes[0], sizes[1])
        return self._block_size


def _takes_bytes(target: Tensor, dtype: torch.dtype) -> bool:
    return target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous()
