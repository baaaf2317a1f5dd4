"""Huge pages under the heap of a process on the CPU.

In pages of 4 KiB, a step of even a small model touches more of them than the processor keeps
addresses of (TLB), and on a virtual machine each miss walks two page tables. Most systems give
pages of 2 MiB only to memory that asks for them (``transparent_hugepage/enabled`` is ``madvise``).
glibc can ask for its whole heap, but only by a variable set before the process starts
(``GLIBC_TUNABLES=glibc.malloc.hugetlb=1``); PyTorch (``THP_MEM_ALLOC_ENABLE=1``) for tensors of
2 MiB and more.
"""

from __future__ import annotations

import ctypes
import functools
import os

_MADV_HUGEPAGE = 14
"""Linux's number (asm-generic/mman-common.h)."""

_BLOCK = 1 << 29
"""Bytes; less than what malloc takes from the heap, see ``device.keep_freed_memory``."""

_SHARE = 4
"""The heap is grown to one part in so many of the machine's memory."""


@functools.cache
def advise_heap() -> int:
    """Grow the heap once, untouched, and ask for huge pages under all that was grown.

    malloc places blocks there first, whoever allocates them; a heap that outgrows it goes on in
    small pages. Untouched memory costs nothing but addresses. Does nothing where the C library or
    the kernel cannot.

    Returns:
        Bytes advised.
    """
    libc = ctypes.CDLL(None)
    if not all(hasattr(libc, name) for name in ("mallopt", "madvise", "malloc")):
        return 0
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    page = os.sysconf("SC_PAGE_SIZE")
    wanted = os.sysconf("SC_PHYS_PAGES") * page // _SHARE
    blocks, advised = [], 0
    while (len(blocks) + 1) * _BLOCK <= wanted and (address := libc.malloc(_BLOCK)):
        blocks.append(address)
        start, end = address // page * page, -(-(address + _BLOCK) // page) * page
        if libc.madvise(start, end - start, _MADV_HUGEPAGE) == 0:
            advised += end - start
    for address in blocks:
        libc.free(address)
    return advised
