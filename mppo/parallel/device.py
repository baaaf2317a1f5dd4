"""The device seam: the only place that decides between CUDA with NCCL and the CPU with gloo.

Other modules call ``device()``. On a machine without a GPU, ``prepare_megatron`` makes
Megatron-Core run on the CPU (see ``mppo.cpu.megatron_stand_ins``); with one it only defines
what Megatron misses without Transformer Engine (``mppo.parallel.megatron_without_te``).
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from importlib.util import find_spec

import torch


def check() -> None:
    """Check that the device named by ``MPPO_DEVICE`` exists.

    Raises:
        ValueError: it does not, or the variable has another value than cpu or cuda.
    """
    name = os.environ.get("MPPO_DEVICE", "")
    if name not in ("", "cpu", "cuda"):
        raise ValueError(f"MPPO_DEVICE={name}: choose cpu or cuda, or leave it unset")
    if name == "cuda" and not torch.cuda.is_available():
        built = torch.version.cuda
        why = "torch sees no GPU" if built else "this torch is built for the CPU"
        fix = "start on a machine with one (see nvidia-smi)" if built else "install torch for CUDA"
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
    """Return the device's name, such as ``NVIDIA H100`` or ``CPU (2 threads)``."""
    if is_cuda():
        return torch.cuda.get_device_name()
    return f"CPU ({torch.get_num_threads()} threads)"


def select(local_rank: int, ranks_on_node: int) -> None:
    """Select this rank's GPU, or its share of the node's cores.

    Args:
        local_rank: index of the rank on its node; taken modulo the number of visible GPUs, since
            some launchers show each rank only its own.
        ranks_on_node: ranks on that node; the CPU's cores are divided among them unless
            ``OMP_NUM_THREADS`` was set by the user to something other than torchrun's 1.

    Raises:
        ValueError: see ``check``.
    """
    check()
    if is_cuda():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    elif os.environ.get("OMP_NUM_THREADS", "1") == "1":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        torch.set_num_threads(max(1, (cores or 1) // ranks_on_node))


def synchronize() -> None:
    """Wait for the device's queued work; no effect on the CPU."""
    if is_cuda():
        torch.cuda.synchronize()


def peak_memory_bytes() -> int:
    """Peak memory in bytes: allocated on the GPU; on the CPU the process's resident set."""
    if is_cuda():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_reserved_bytes() -> int:
    """Peak memory in bytes that the allocator reserved; on the CPU :func:`peak_memory_bytes`."""
    return torch.cuda.max_memory_reserved() if is_cuda() else peak_memory_bytes()


def is_transport_error(error: BaseException) -> bool:
    """Whether an error is gloo's: the peer of a connection has exited."""
    return "gloo/" in str(error)


def memory_summary() -> str:
    """Describe this rank's memory: in use, peak and capacity of the device."""
    peak = peak_memory_bytes() / 2**30
    if not is_cuda():
        return f"peak {peak:.1f} GiB of the process, on {name()}"
    free, total = torch.cuda.mem_get_info()
    return (
        f"{torch.cuda.memory_allocated() / 2**30:.1f} GiB allocated, peak {peak:.1f} GiB, "
        f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free on {name()}"
    )


def device_random_state() -> torch.Tensor | None:
    """Return the GPU's random state; None on the CPU, where torch's own state is all there is."""
    return torch.cuda.get_rng_state() if is_cuda() else None


def set_random_state(state: torch.Tensor) -> None:
    """Restore a saved random state of the GPU; no effect on the CPU."""
    if is_cuda():
        torch.cuda.set_rng_state(state)


def has_transformer_engine() -> bool:
    """Whether Transformer Engine's layers are used; they need CUDA."""
    if not is_cuda():
        return False
    from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE

    return HAVE_TE


def accumulates_weight_gradients() -> bool:
    """Whether linear layers can add a weight's gradient to its buffer in one kernel.

    On CUDA that is Apex's extension; the CPU has ``mppo.cpu.fused``.
    """
    return not is_cuda() or find_spec("fused_weight_gradient_mlp_cuda") is not None


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's ``mallopt`` (malloc.h)."""


def keep_freed_memory() -> None:
    """Make glibc keep freed blocks, as CUDA's allocator does.

    By default glibc returns blocks of some MiB to the system, and every step faults their pages in
    again.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 1 << 30)
        mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)


def prepare_megatron() -> None:
    """Make Megatron-Core usable on this machine; idempotent. Call before building any model."""
    from mppo.parallel import megatron_without_te

    if not is_cuda():
        keep_freed_memory()
        from mppo.cpu import fused, megatron_stand_ins, products

        megatron_stand_ins.install()
        fused.install()
        products.install()
    megatron_without_te.install()


def prepare_dtype(dtype: torch.dtype) -> None:
    """Install faster CPU kernels for ``dtype`` if there are any; no effect on CUDA."""
    if dtype is torch.bfloat16 and not is_cuda():
        from mppo.cpu import bfloat16

        bfloat16.install()
