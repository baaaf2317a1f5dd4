"""Messages of failures."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from mppo.parallel.launch import LaunchInfo, tasks_on_node
from mppo.recipe.load import load_recipe
from mppo.supervision.phase import phase
from mppo.trainer.failures import (
    advice,
    is_out_of_memory,
    needs_no_traceback,
    out_of_memory_message,
    report_failure,
)

RECIPE = load_recipe(None, ["model.path=builtin:tiny", "actor.ppo_micro_batch_size_per_gpu=8"])


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
    ],
)
def test_memory_that_ran_out_is_recognised(error):
    assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


def test_the_cpu_allocator_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value)


def test_the_message_names_phase_sizes_and_keys_with_their_values():
    text = out_of_memory_message("update, step 3 > updating actor, step 3", RECIPE)
    assert text.startswith("out of memory in: update, step 3 > updating actor, step 3; ")
    assert "GiB" in text
    assert "actor.ppo_micro_batch_size_per_gpu (now 8): lower" in text
    assert "actor.megatron.tensor_model_parallel_size (now 1): raise" in text


def test_a_rank_without_memory_says_what_it_did_and_what_would_help(capsys, monkeypatch):
    monkeypatch.setattr(
        "mppo.supervision.phase._failed_in", []
    )  # the phase of an earlier test's failure
    error = torch.OutOfMemoryError("CUDA out of memory")
    with phase("weight sync"):
        report_failure(error, LaunchInfo(3, 8, 3, 8, "127.0.0.1", 1, "torchrun"), RECIPE)
    failed, advised, *keys = capsys.readouterr().err.splitlines()
    assert failed.startswith("mppo: rank 3 of 8 failed while weight sync: OutOfMemoryError: CUDA")
    assert advised.startswith("mppo: rank 3 of 8: out of memory in: weight sync; ")
    assert keys == [
        "  rollout.sync_bucket_mb (now 512): lower",
        "  critic.megatron.offload (now auto): set parameters, gradients and optimizer to true",
    ]


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (errno.ENOSPC, "the disk is full: runs/x/metrics.jsonl; free some space"),
        (errno.EROFS, "the file system is read-only: runs/x/metrics.jsonl; make it writable"),
        (errno.EFBIG, "the file is longer than this process may write: runs/x/metrics.jsonl"),
    ],
)
def test_a_disk_that_takes_no_more_is_reported_without_a_traceback(capsys, number, why):
    error = OSError(number, os.strerror(number), "runs/x/metrics.jsonl")
    report_failure(error, LaunchInfo(0, 2, 0, 2, "127.0.0.1", 1, "torchrun"), RECIPE)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mppo: rank 0 of 2 failed while ")
    assert why in line
    assert "started again, the run continues" in line.lower()


def test_a_file_of_the_users_that_is_missing_is_no_fault_of_the_disk(capsys):
    error = FileNotFoundError(errno.ENOENT, "No such file", "answers.txt")
    report_failure(error, LaunchInfo(0, 2, 0, 2, "127.0.0.1", 1, "torchrun"), RECIPE)
    assert "the disk" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("where", "key"),
    [
        ("update, step 1 > updating critic, step 1", "critic.ppo_micro_batch_size_per_gpu"),
        ("updating in one stream, step 1 > updating actor", "actor.ppo_micro_batch_size_per_gpu"),
        (
            "computing in one stream > computing values with critic",
            "critic.log_prob_micro_batch_size_per_gpu",
        ),
        ("log_probs, step 1 > computing ref with ref", "ref.log_prob_micro_batch_size_per_gpu"),
        ("gen, step 1", "rollout.batch_size"),
        ("update_weights, step 1 > weight sync", "rollout.sync_bucket_mb"),
        ("save_checkpoint, step 1", "trainer.async_save"),
        ("building actor", "model.dtype"),
    ],
)
def test_every_phase_has_its_keys(where, key):
    assert any(line.startswith(f"{key} (now ") for line in advice(where, RECIPE))


def raised(function, *arguments) -> Exception:
    with pytest.raises(Exception) as caught:
        function(*arguments)
    return caught.value


def test_only_what_mppo_itself_says_about_a_value_needs_no_traceback():
    assert needs_no_traceback(raised(tasks_on_node, "two", 0))
    assert not needs_no_traceback(raised(int, "two"))  # of a call that was to succeed
    assert not needs_no_traceback(raised(tasks_on_node, None, 0))
    assert needs_no_traceback(RuntimeError("gone"))
