"""The device seam: the only place that decides between CUDA with NCCL and the CPU with gloo.

On a machine without a GPU, ``prepare_megatron`` makes Megatron-Core run on the CPU.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from mppo.parallel import node, staged_group
from mppo.parallel.node import check_gpus
from mppo.safety.input_error import InputError


def check() -> None:
    """InputError unless the device named by ``MPPO_DEVICE`` exists, or by default the node's GPUs
    are usable."""
    name = os.environ.get("MPPO_DEVICE", "")
    if name not in ("", "cpu", "cuda"):
        raise InputError(f"MPPO_DEVICE={name}: choose cpu or cuda, or leave it unset")
    if not name:
        check_gpus()
    share = os.environ.get("MPPO_SHARE_GPU", "")
    if share not in ("", "0", "1"):
        raise InputError(f"MPPO_SHARE_GPU={share}: set 1 for ranks that share a GPU, or unset it")
    if name == "cuda" and not torch.cuda.is_available():
        built = torch.version.cuda
        why = "torch sees no GPU" if built else "this torch is built for the CPU"
        fix = "start on a machine with one (see nvidia-smi)" if built else "install torch for CUDA"
        raise InputError(f"MPPO_DEVICE=cuda, but {why}: {fix}, or unset the variable")


def is_cuda() -> bool:
    """Whether training runs on CUDA. ``MPPO_DEVICE=cpu`` forces the CPU."""
    return os.environ.get("MPPO_DEVICE", "") != "cpu" and torch.cuda.is_available()


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda() else torch.device("cpu")


def shares_gpu() -> bool:
    """Whether several ranks may use one GPU (``MPPO_SHARE_GPU=1``): see ``staged_group``."""
    return is_cuda() and os.environ.get("MPPO_SHARE_GPU", "") == "1"


def backend() -> str:
    """The torch.distributed backend of this program's process groups (see ``backends``)."""
    return staged_group.register() if shares_gpu() else backends(is_cuda())


def backends(on_cuda: bool) -> str:
    """The torch.distributed backends by kind of device. On CUDA there are two: a rank that waits in
    a collective of CPU tensors waits in its process, while a collective of CUDA tensors waits
    inside a kernel, which takes the GPU's time from a rollout server on the same GPU. Object
    collectives and barriers use the CPU's."""
    return "cpu:gloo,cuda:nccl" if on_cuda else "gloo"


def weight_backend() -> str:
    """The torch.distributed backend for tensors on this rank's device alone."""
    return "nccl" if is_cuda() else "gloo"


def name() -> str:
    """Return the device's name, such as ``NVIDIA H100`` or ``CPU (2 threads)``."""
    if is_cuda():
        return torch.cuda.get_device_name()
    return f"CPU ({torch.get_num_threads()} threads)"


def nbytes() -> int | None:
    return torch.cuda.get_device_properties(device()).total_memory if is_cuda() else None


def select(local_rank: int, ranks_on_node: int) -> None:
    """Select this rank's GPU and the cores near it, and its number of threads; InputError as
    ``check``. Some launchers show each rank only its own GPU. The threads are the rank's share of
    the cores, unless ``OMP_NUM_THREADS`` is something other than torchrun's 1."""
    check()
    if os.environ.get("OMP_NUM_THREADS", "1") == "1":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        torch.set_num_threads(max(1, (cores or 1) // ranks_on_node))
    if is_cuda():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
        node.bind_cores(_pci_address())


def _pci_address() -> str:
    """The PCI address of this rank's GPU, as the kernel writes it; empty if torch cannot tell."""
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    if not hasattr(gpu, "pci_domain_id"):  # torch 2.6
        return ""
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def synchronize() -> None:
    if is_cuda():
        torch.cuda.synchronize()


def wait_for_stream(place: torch.device) -> None:
    """Wait for the work queued on a device's current stream; no effect on the CPU."""
    if place.type == "cuda":
        torch.cuda.current_stream(place).synchronize()


_EXPANDABLE = "expandable_segments:True"


@contextmanager
def exportable_memory() -> Iterator[None]:
    """Allocate device memory that another process may open, in this context. CUDA IPC shares
    allocations of the driver; expandable segments, which are off here, are shared by
    ``pidfd_getfd``, which many containers forbid. torch's allocator then takes no free block of
    such a segment."""
    variables = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    expandable = any(_EXPANDABLE in os.environ.get(name, "") for name in variables)
    if not (is_cuda() and expandable):
        yield
        return
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(_EXPANDABLE)


def collect_shared_memory() -> None:
    """Free memory that was shared with another process and that neither uses; no effect on the CPU.
    torch keeps what it sent by CUDA IPC until it looks whether the receiver has closed it."""
    if is_cuda():
        torch.cuda.ipc_collect()


def give_back_memory() -> None:
    """Return the memory that this process holds unused to the GPU; no effect on the CPU. torch's
    allocator keeps freed blocks for itself. Another process cannot allocate them."""
    if is_cuda():
        gc.collect()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def pinned_memory(nbytes: int) -> torch.Tensor:
    """Allocate host memory, uint8 ``[nbytes]``, not initialised, pinned on CUDA; MemoryError if the
    host has too little, or may not pin it. It has whole pages of its own, because CUDA pins pages
    and refuses to pin one twice, and no more of them than asked:
    ``torch.empty(..., pin_memory=True)`` allocates the next power of two."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(_no_host_memory(nbytes, str(error))) from error
    content = torch.frombuffer(pages, dtype=torch.uint8)
    if is_cuda():
        runtime: Any = torch.cuda.cudart()
        address = content.data_ptr()
        error = int(runtime.cudaHostRegister(address, nbytes, 0))
        if error:
            raise MemoryError(_no_host_memory(nbytes, f"cudaHostRegister returned {error}"))
        # the tensor's storage, which all of its views share, holds the pages
        release = weakref.finalize(pages, runtime.cudaHostUnregister, address)
        release.atexit = False  # the process ends, and CUDA with it
    return content


def copied(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of CPU tensors on this rank's GPU, in their order; on the CPU the tensors themselves.
    There is one copy per dtype, from pinned memory, so that the host does not wait: CUDA copies
    ordinary memory only while the host waits for all that the current stream holds."""
    if not is_cuda():
        return list(tensors)
    found: dict[int, torch.Tensor] = {}
    for dtype in {x.dtype: None for x in tensors}:
        members = [number for number, x in enumerate(tensors) if x.dtype == dtype]
        lengths = [tensors[number].numel() for number in members]
        staged = torch.empty(sum(lengths), dtype=dtype, pin_memory=True)
        torch.cat([tensors[number].flatten() for number in members], out=staged)
        parts = staged.to(device(), non_blocking=True).split(lengths)
        found |= {n: part.view(tensors[n].shape) for n, part in zip(members, parts, strict=True)}
    return [found[number] for number in range(len(tensors))]


def _no_host_memory(nbytes: int, why: str) -> str:
    return (
        f"{nbytes / 2**30:.1f} GiB of host memory for parts of a model could not be allocated "
        f"({why}): see the host's memory in --dry-run; raise the job's memory limit, or "
        "offload less (megatron.offload)"
    )


def gpu_uuid() -> str:
    """The UUID of this rank's GPU, the same in every process of the machine; empty on the CPU."""
    if not is_cuda():
        return ""
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return uuid.removeprefix("GPU-")


def gpus_of_machine() -> list[str]:
    """UUIDs of the GPUs that this process may open, in the order of ``nvidia-smi``.
    ``CUDA_VISIBLE_DEVICES`` does not limit them. Call it on CUDA only: NVML comes with SGLang."""
    import pynvml  # pyright: ignore[reportMissingImports]  # nvidia-ml-py, which SGLang requires

    pynvml.nvmlInit()
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [str(pynvml.nvmlDeviceGetUUID(handle)).removeprefix("GPU-") for handle in handles]
    finally:
        pynvml.nvmlShutdown()


def gpu_indices(wanted: Sequence[str], machine: Sequence[str]) -> list[int]:
    """Indices of the GPUs ``wanted`` by UUID on a machine with those of ``gpus_of_machine``;
    InputError if one is not on it, or two are the same."""
    missing = [uuid for uuid in wanted if uuid not in machine]
    if missing:
        raise InputError(f"the GPUs {', '.join(missing)} are not among the {len(machine)} here")
    if len(set(wanted)) < len(wanted):
        raise InputError(f"several ranks share a GPU ({', '.join(wanted)})")
    return [machine.index(uuid) for uuid in wanted]


def visible_gpus(indices: Sequence[int]) -> dict[str, str]:
    """Environment variables that limit a process to some GPUs of the machine, given in the order of
    ``nvidia-smi``; none: no variables. SGLang 0.5.21 reads the variable as integers
    (``custom_all_reduce_utils.py``), so that UUIDs, which CUDA accepts, would stop it."""
    if not indices:
        return {}
    visible = ",".join(map(str, indices))
    return {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def peak_memory_bytes() -> int:
    """Allocated on the GPU; on the CPU the process's resident set."""
    if is_cuda():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_reserved_bytes() -> int:
    return torch.cuda.max_memory_reserved() if is_cuda() else peak_memory_bytes()


def is_transport_error(error: BaseException) -> bool:
    """Whether an error is gloo's: the peer of a connection has exited."""
    return "gloo/" in str(error)


def memory_summary() -> str:
    peak = peak_memory_bytes() / 2**30
    if not is_cuda():
        return f"peak {peak:.1f} GiB of the process, on {name()}"
    free, total = torch.cuda.mem_get_info()
    return (
        f"{torch.cuda.memory_allocated() / 2**30:.1f} GiB allocated, peak {peak:.1f} GiB, "
        f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free on {name()}"
    )


def device_random_state() -> torch.Tensor | None:
    """None on the CPU, where torch's own state is all there is."""
    return torch.cuda.get_rng_state() if is_cuda() else None


def set_random_state(state: torch.Tensor) -> None:
    if is_cuda():
        torch.cuda.set_rng_state(state)


def has_transformer_engine() -> bool:
    """Whether Transformer Engine's layers are used; they need CUDA."""
    if not is_cuda():
        return False
    from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE

    return HAVE_TE


def accumulates_weight_gradients() -> bool:
    """Whether Megatron's own linear layers can add a weight's gradient to its buffer in one kernel:
    Apex's, on CUDA. Transformer Engine's layers always can."""
    return is_cuda() and find_spec("fused_weight_gradient_mlp_cuda") is not None


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's ``mallopt`` (malloc.h)."""


def keep_freed_memory() -> None:
    """Make glibc keep freed blocks, as CUDA's allocator does: by default it returns blocks of some
    MiB to the system, and every step faults their pages in again."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 1 << 30)
        mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)


def prepare_megatron() -> None:
    """Make Megatron-Core usable on this machine; idempotent. Call before building any model."""
    from mppo.parallel import megatron_without_te, shared_groups

    if not is_cuda():
        keep_freed_memory()
        from mppo.cpu import megatron_stand_ins

        megatron_stand_ins.install()
    elif has_transformer_engine() and not accumulates_weight_gradients():
        megatron_without_te.fuse_weight_gradients()
    megatron_without_te.install()
    shared_groups.install(backend())


def prepare_dtype(dtype: torch.dtype) -> None:
    """Install faster CPU kernels for ``dtype`` if there are any; no effect on CUDA."""
    if dtype is torch.bfloat16 and not is_cuda():
        from mppo.cpu import bfloat16

        bfloat16.install()
