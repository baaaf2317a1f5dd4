"""Patches that let autograd accept tensors on "cuda" without a GPU, by ctypes alone.

torch's autograd engine queries three C++ registries before it runs a node whose tensors are on a
CUDA device. In a torch built for the CPU these are empty, and the engine aborts. In a torch built
for CUDA they report that there is no device. ``install`` changes them:

1. The device guard of "cuda". torch has a fake one (``FakeGuardImpl<CUDA>``), but
   ``torch._C._ensureCUDADeviceGuardSet`` installs it only in place of a guard that reports no
   device. If the registry is empty, ``install`` registers such a guard before this call.
2. ``at::accelerator::getAccelerator``, which ``InputBuffer::add`` calls for the current stream. Its
   first bytes are overwritten by ``return CUDA``.
3. ``hasPrimaryContext`` of the CUDA hooks. Their table of virtual functions is copied, and this
   entry replaced.

Checked with torch 2.13 on x86_64 and aarch64 Linux.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import platform
from pathlib import Path

import torch

_RETURN_CUDA = {
    "x86_64": bytes.fromhex("b801010000c3"),  # mov eax, 0x0101; ret
    "aarch64": bytes.fromhex("20208052c0035fd6"),  # mov w0, #0x101; ret
}
_CUDA = 1
"""c10::DeviceType::CUDA."""
_GUARD_METHODS = 64
_HOOKS_METHODS = 128
_HAS_PRIMARY_CONTEXT = 4
"""Index among the virtual functions of ATen/detail/AcceleratorHooksInterface.h; the first two are
destructors."""
_kept: list[object] = []


def is_supported() -> bool:
    """Whether ``install`` supports this machine's operating system and processor."""
    return platform.system() == "Linux" and platform.machine() in _RETURN_CUDA


@functools.cache
def install() -> None:
    """Change the registries. This cannot be undone; call it in a process that only simulates.

    Raises:
        RuntimeError: torch did not install its device guard; its version is not supported.
    """
    _set_guard()
    _set_accelerator()
    _set_hooks()
    torch.autograd.set_multithreading_enabled(False)


def _library(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))


def _set_guard() -> None:
    registry = (ctypes.c_void_p * 32).in_dll(
        _library("libc10.so"), "_ZN3c104impl26device_guard_impl_registryE"
    )
    if registry[_CUDA]:
        torch._C._ensureCUDADeviceGuardSet()
        return
    device_count = ctypes.CFUNCTYPE(ctypes.c_byte, ctypes.c_void_p)(lambda this: 0)
    method = ctypes.cast(device_count, ctypes.c_void_p).value
    methods = (ctypes.c_void_p * _GUARD_METHODS)(*[method] * _GUARD_METHODS)
    guard = (ctypes.c_void_p * 1)(ctypes.addressof(methods))
    registry[_CUDA] = ctypes.addressof(guard)
    torch._C._ensureCUDADeviceGuardSet()
    if registry[_CUDA] == ctypes.addressof(guard):
        raise RuntimeError(f"torch {torch.__version__} did not set its device guard for CUDA")


def _set_accelerator() -> None:
    code = _RETURN_CUDA[platform.machine()]
    function = _library("libtorch_cpu.so")["_ZN2at11accelerator14getAcceleratorEb"]
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)

    def protect(rights: int) -> None:
        if libc.mprotect(ctypes.c_void_p(begin), ctypes.c_size_t(2 * mmap.PAGESIZE), rights):
            raise OSError(ctypes.get_errno(), "mprotect of libtorch_cpu.so")

    protect(mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    ctypes.memmove(address, code, len(code))
    protect(mmap.PROT_READ | mmap.PROT_EXEC)


def _set_hooks() -> None:
    get_hooks = _library("libtorch_cpu.so")["_ZN2at6detail12getCUDAHooksEv"]
    get_hooks.restype = ctypes.c_void_p
    hooks = ctypes.cast(get_hooks(), ctypes.POINTER(ctypes.c_void_p))
    old = ctypes.cast(hooks[0], ctypes.POINTER(ctypes.c_void_p))  # type: ignore[arg-type]
    # two words lie before the first method: the offset to the top and the type's description
    methods = (ctypes.c_void_p * _HOOKS_METHODS)(*[old[i] for i in range(-2, _HOOKS_METHODS - 2)])
    no = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_byte)(lambda this, index: False)
    methods[2 + _HAS_PRIMARY_CONTEXT] = ctypes.cast(no, ctypes.c_void_p).value
    hooks[0] = ctypes.addressof(methods) + 2 * ctypes.sizeof(ctypes.c_void_p)
    _kept.extend((methods, no))
