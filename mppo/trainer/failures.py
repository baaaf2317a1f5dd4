"""Error messages of a failed run: phase, memory, and the recipe keys that help."""

from __future__ import annotations

import errno
import os
import traceback

import torch

from mppo.parallel import device
from mppo.parallel.launch import LaunchInfo
from mppo.recipe.errors import ConfigError
from mppo.recipe.schema import Recipe
from mppo.safety.input_error import InputError
from mppo.supervision import exit_report
from mppo.supervision.heartbeat import AlreadyReported
from mppo.supervision.phase import current

_CPU_ALLOCATOR = ("can't allocate memory", "not enough memory", "Cannot allocate memory")

_STORAGE = {
    errno.ENOSPC: ("the disk is full", "free some space, or use another disk"),
    errno.EDQUOT: ("your quota on this disk is used up", "free some space, or use another disk"),
    errno.EROFS: ("the file system is read-only", "make it writable, or use another disk"),
    errno.EFBIG: ("the file is longer than this process may write", "raise ulimit -f"),
    errno.EIO: ("the disk failed to read or write", "see the system's log, or use another disk"),
    errno.ESTALE: ("the network file system lost the file", "mount it again"),
}


def storage_message(error: BaseException) -> str | None:
    """Explain an error of the disk and its fix; None for other errors."""
    if not isinstance(error, OSError) or error.errno not in _STORAGE:
        return None
    why, fix = _STORAGE[error.errno]
    where = f": {error.filename}" if error.filename else ""
    return (
        f"{why}{where}; {fix} (trainer.default_local_dir). Started again, the run continues from "
        "its newest complete checkpoint"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on the device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _CPU_ALLOCATOR)


def needs_no_traceback(error: BaseException) -> bool:
    """Whether the text of an error is sufficient for the user."""
    return isinstance(error, RuntimeError | InputError) or storage_message(error) is not None


def advice(phase: str, recipe: Recipe) -> list[str]:
    """Recipe keys that reduce the memory of a phase, with their current values."""
    for marker, keys in _keys_by_phase(phase).items():
        if marker in phase:
            return [f"{key} (now {_value(recipe, key)}): {how}" for key, how in keys]
    return []


def _keys_by_phase(phase: str) -> dict[str, list[tuple[str, str]]]:
    roles = ("reward_model", "critic", "ref", "actor")
    role = next((name for name in roles if name in phase), "actor")
    layout = [
        (f"{role}.megatron.tensor_model_parallel_size", "raise"),
        (f"{role}.megatron.pipeline_model_parallel_size", "raise"),
    ]
    chunk = (f"{role}.head_chunk_tokens", "lower")
    offload = (
        f"{'actor' if role == 'critic' else 'critic'}.megatron.offload",
        "set parameters, gradients and optimizer to true",
    )
    return {
        "updating": [
            (f"{role}.ppo_micro_batch_size_per_gpu", "lower"),
            (f"{role}.ppo_max_token_len_per_gpu", "lower, with use_dynamic_bsz=true"),
            (f"{role}.megatron.recompute_granularity", "set to full"),
            (f"{role}.megatron.use_distributed_optimizer", "set to true"),
            offload,
            chunk,
            ("trainer.schedule", "set to sequential: one role is trained at a time"),
            *layout,
        ],
        "computing scores": [
            ("reward_model.micro_batch_size_per_gpu", "lower"),
            ("reward_model.forward_max_token_len_per_gpu", "lower, with use_dynamic_bsz=true"),
            *layout,
        ],
        "computing": [
            (f"{role}.log_prob_micro_batch_size_per_gpu", "lower"),
            (f"{role}.log_prob_max_token_len_per_gpu", "lower, with use_dynamic_bsz=true"),
            offload,
            chunk,
            *layout,
        ],
        "weight sync": [("rollout.sync_bucket_mb", "lower"), offload],
        "gen": [
            ("rollout.batch_size", "lower"),
            ("data.max_response_length", "lower"),
            ("rollout.tensor_model_parallel_size", "raise"),
            ("rollout.server_args", "lower mem_fraction_static"),
        ],
        "testing": [("data.val_batch_size", "lower"), ("rollout.batch_size", "lower")],
        "save_checkpoint": [("trainer.async_save", "set to false: makes no copy in host memory")],
        "building": [
            *layout,
            (f"{role}.megatron.use_distributed_optimizer", "set to true"),
            ("model.dtype", "set to bfloat16"),
        ],
    }


def _value(recipe: Recipe, key: str) -> object:
    value: object = recipe
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def out_of_memory_message(phase: str, recipe: Recipe) -> str:
    """Describe the memory in use, and the recipe keys that reduce it."""
    lines = [f"out of memory in: {phase}; {device.memory_summary()}"]
    lines += [f"  {line}" for line in advice(phase, recipe)]
    return "\n".join(lines)


def exit_code(error: BaseException, info: LaunchInfo, recipe: Recipe) -> int:
    """Report the error that ends a program, unless the heartbeat has; return 2 for a fault of the
    user's, 130 if the program was interrupted, else 1."""
    if isinstance(error, ConfigError):
        return exit_report.refuse_recipe(error, info.rank)
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, AlreadyReported):
        return 2 if isinstance(error.__cause__, InputError) else 1
    report_failure(error, info, recipe)
    return 2 if isinstance(error, InputError) else 1


def report_failure(error: BaseException, info: LaunchInfo, recipe: Recipe) -> None:
    """Print why this rank failed, and pass it to torchrun's report."""
    if not needs_no_traceback(error) or "MPPO_TRACEBACK" in os.environ:
        traceback.print_exception(error)
    where = f"rank {info.rank} of {info.world_size}"
    kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
    what = storage_message(error) or f"{kind}{error}"
    lines = [f"{where} failed while {current()}: {what}"]
    if is_out_of_memory(error):
        lines.append(f"mppo: {where}: {out_of_memory_message(current(), recipe)}")
    text = "\n".join(lines)
    exit_report.say(text)
    exit_report.write_reason(f"mppo: {text}")
