"""Ranks of a test as separate processes, forked from a server that has imported the libraries.

Importing torch, Megatron-Core and transformers takes longer than most tests; the server does it
once per test run (``rank_imports``). It computes nothing, so a forked rank starts as clean as a new
process. Environment variables are those of the test run's first ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from typing import Any

import torch.multiprocessing as mp


def start_ranks(worker: Callable[..., None], arguments: tuple[Any, ...], world: int) -> None:
    """Run ``worker(rank, *arguments)`` in ``world`` processes and wait.

    Raises:
        ProcessRaisedException: with the traceback of a rank that failed.
    """
    context = begin_ranks(worker, arguments, world)
    while not context.join():
        pass


def begin_ranks(
    worker: Callable[..., None], arguments: tuple[Any, ...], world: int
) -> mp.ProcessContext:
    """Start the ranks without waiting for them."""
    multiprocessing.set_forkserver_preload(["rank_imports"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # the server imports from the same folders
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        os.environ.update({} if before is None else {"PYTHONPATH": before})
    return mp.start_processes(
        worker, arguments, nprocs=world, join=False, start_method="forkserver"
    )
