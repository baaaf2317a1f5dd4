"""The device seam: the only place that decides between CUDA with NCCL and the CPU with gloo.

Everything else asks ``device()``. On a machine without a GPU, ``prepare_megatron`` makes
Megatron-Core run on the CPU (see ``mppo.cpu.megatron_stand_ins``); with one it changes nothing.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from importlib.util import find_spec

import torch


def check() -> None:
    """The device that ``MPPO_DEVICE`` asks for must be there.

    Raises:
        ValueError: it is not, or the variable names no device.
    """
    asked = os.environ.get("MPPO_DEVICE", "")
    if asked not in ("", "cpu", "cuda"):
        raise ValueError(f"MPPO_DEVICE={asked}: choose cpu or cuda, or leave it unset")
    if asked == "cuda" and not torch.cuda.is_available():
        built = torch.version.cuda
        why = "torch sees no GPU" if built else "this torch is built for the CPU"
        fix = "start it where there is one (nvidia-smi)" if built else "install torch for CUDA"
        raise ValueError(f"MPPO_DEVICE=cuda, but {why}: {fix}, or unset the variable")


def is_cuda() -> bool:
    """Whether training runs on CUDA. ``MPPO_DEVICE=cpu`` forces the CPU."""
    return os.environ.get("MPPO_DEVICE", "") != "cpu" and torch.cuda.is_available()


def device() -> torch.device:
    """The device of this rank's models."""
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda() else torch.device("cpu")


def backend() -> str:
    """The torch.distributed backend for that device."""
    return "nccl" if is_cuda() else "gloo"


def name() -> str:
    """A readable name, such as ``NVIDIA H100`` or ``CPU (2 threads)``."""
    if is_cuda():
        return torch.cuda.get_device_name()
    return f"CPU ({torch.get_num_threads()} threads)"


def select(local_rank: int, ranks_on_node: int) -> None:
    """Give this rank its GPU, or its share of the node's cores.

    Args:
        local_rank: index of the rank on its node; where the launcher shows each rank fewer GPUs
            than the node has, it counts around those.
        ranks_on_node: ranks on that node; the CPU's cores are divided among them unless
            ``OMP_NUM_THREADS`` was set by the user to something other than torchrun's 1.

    Raises:
        ValueError: ``check``.
    """
    check()
    if is_cuda():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    elif os.environ.get("OMP_NUM_THREADS", "1") == "1":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        torch.set_num_threads(max(1, (cores or 1) // ranks_on_node))


def synchronize() -> None:
    """Wait for the device's queued work (nothing to wait for on the CPU)."""
    if is_cuda():
        torch.cuda.synchronize()


def peak_memory_bytes() -> int:
    """Peak memory: allocated on the GPU, or resident set size of the process on the CPU."""
    if is_cuda():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_reserved_bytes() -> int:
    """Peak of what the allocator holds; on the CPU, as :func:`peak_memory_bytes`."""
    return torch.cuda.max_memory_reserved() if is_cuda() else peak_memory_bytes()


def is_transport_error(error: BaseException) -> bool:
    """Whether gloo's transport raised an error: the other side of a connection has gone."""
    return "gloo/" in str(error)


def memory_summary() -> str:
    """Memory of this rank in a few words: in use, at its peak, and what the device has."""
    peak = peak_memory_bytes() / 2**30
    if not is_cuda():
        return f"peak {peak:.1f} GiB of the process, on {name()}"
    free, total = torch.cuda.mem_get_info()
    return (
        f"{torch.cuda.memory_allocated() / 2**30:.1f} GiB allocated, peak {peak:.1f} GiB, "
        f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free on {name()}"
    )


def device_random_state() -> torch.Tensor | None:
    """The GPU's random state; None on the CPU, whose state is torch's own."""
    return torch.cuda.get_rng_state() if is_cuda() else None


def set_random_state(state: torch.Tensor) -> None:
    """Put a saved GPU random state back; on the CPU there is none to set."""
    if is_cuda():
        torch.cuda.set_rng_state(state)


def has_transformer_engine() -> bool:
    """Whether Transformer Engine's layers are used (it needs CUDA)."""
    if not is_cuda():
        return False
    from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE

    return HAVE_TE


def accumulates_weight_gradients() -> bool:
    """Whether linear layers can add their weight's gradient to its buffer in one kernel.

    On CUDA that is Apex's extension; the CPU has ``mppo.cpu.fused``.
    """
    return not is_cuda() or find_spec("fused_weight_gradient_mlp_cuda") is not None


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""glibc's numbers of what ``mallopt`` sets (malloc.h)."""


def keep_freed_memory() -> None:
    """Let glibc keep blocks that were freed, as CUDA's allocator does.

    It gives those of some MiB back to the system, and every step faults all their pages in again.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 1 << 30)
        mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)


def prepare_megatron() -> None:
    """Make Megatron-Core usable on this machine. Call before building anything; idempotent."""
    if is_cuda():
        return
    keep_freed_memory()
    from mppo.cpu import fused, megatron_stand_ins, products

    megatron_stand_ins.install()
    fused.install()
    products.install()


def prepare_dtype(dtype: torch.dtype) -> None:
    """Make what is slow in ``dtype`` on this machine faster; nothing to do on CUDA."""
    if dtype is torch.bfloat16 and not is_cuda():
        from mppo.cpu import bfloat16

        bfloat16.install()
