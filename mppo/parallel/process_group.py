"""The default process group: rendezvous, and destruction on every exit."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from mppo.parallel import device
from mppo.parallel.addresses import interface_towards, resolves_to_loopback
from mppo.parallel.collectives import all_gather_objects
from mppo.parallel.launch import LaunchInfo
from mppo.safety.input_error import InputError

_STORE_ATTEMPTS = 5
_POLL_S = 0.05


@contextmanager
def process_group(info: LaunchInfo, timeout_s: float) -> Iterator[None]:
    """The default process group, destroyed on every exit; a collective with a missing rank fails
    after ``timeout_s``. MPI is finalised on a clean exit only: ``mpirun`` ends the other ranks at
    once if one exits without."""
    hook = sys.excepthook
    init_process_group(info, timeout_s)
    try:
        yield
    finally:
        sys.excepthook = hook  # torch's writes the rank before each line, also of later exceptions
        if dist.is_initialized():
            dist.destroy_process_group()
    if info.how == "mpi":
        from mpi4py import MPI

        if not MPI.Is_finalized():
            MPI.Finalize()


def init_process_group(info: LaunchInfo, timeout_s: float) -> None:
    """Select this rank's device and join the default process group. Collective. RuntimeError:
    torchrun has exited, or a rank did not join within ``timeout_s``."""
    device.select(info.local_rank, info.local_world_size)
    if info.world_size > info.local_world_size and resolves_to_loopback():
        # gloo would give the other nodes the loopback address at which the host name resolves
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_towards(info.master_addr))
    # No device_id: with one, NCCL has a communicator per group instead of one per group and pair of
    # ranks, and the messages of a schedule's lists, which run in two directions at once, can hang.
    place: dict[str, Any] = {"init_method": f"tcp://{info.master_addr}:{info.master_port}"}
    if info.how == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        _check_agent(info)
        place = {"store": _store_of_this_start(info, timeout_s)}
    try:
        dist.init_process_group(
            device.backend(),
            rank=info.rank,
            world_size=info.world_size,
            timeout=timedelta(seconds=timeout_s),
            **place,
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise InputError(
            f"MASTER_PORT={info.master_port}: another program on this machine uses the port: set "
            "MASTER_PORT to a free one, or end that program"
        ) from error
    if device.is_cuda() and not device.shares_gpu():
        check_distinct(all_gather_objects(device.gpu_uuid()))


def check_distinct(gpus: Sequence[str]) -> None:
    """Raise InputError if two ranks have the same GPU, which NCCL refuses without naming them."""
    first: dict[str, int] = {}
    for rank, gpu in enumerate(gpus):
        if first.setdefault(gpu, rank) != rank:
            raise InputError(
                f"ranks {first[gpu]} and {rank} have the same GPU ({gpu}): start as many ranks per "
                "node as it has GPUs, or let ranks share them, slowly, with MPPO_SHARE_GPU=1"
            )


def _store_of_this_start(info: LaunchInfo, timeout_s: float) -> Store:
    """torchrun's store under a prefix that is new at every start of the ranks. Collective.

    The store outlives the ranks: restarted ranks find the addresses of the previous ones in it. The
    restart count cannot be the prefix, since the agents of several nodes count differently. So each
    rank publishes a random token, and the first rank answers to each token with the prefix. A rank
    of an earlier start never gets an answer to its token. RuntimeError: some rank did not join.
    """
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(info.master_addr, info.master_port, timeout=timeout, wait_for_workers=False)
    token = secrets.token_hex(16)
    if info.rank:
        store.set(f"mppo/token/{info.rank}", token)
        prefix = store.get(f"mppo/prefix/{token}").decode()
        store.add(f"{prefix}/joined", 1)
        return PrefixStore(prefix, store)
    # the first rank: its own token is the prefix
    deadline = time.monotonic() + timeout_s
    while (joined := 1 + store.add(f"{token}/joined", 0)) < info.world_size:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"{joined} of {info.world_size} ranks joined within {timeout_s:.0f} s"
            )
        for key in [f"mppo/token/{rank}" for rank in range(1, info.world_size)]:
            if store.check([key]):
                store.set(f"mppo/prefix/{store.get(key).decode()}", token)
        time.sleep(_POLL_S)
    return PrefixStore(token, store)


def _check_agent(info: LaunchInfo) -> None:
    """Raise RuntimeError unless torchrun's store answers. If torchrun was killed while its ranks
    were starting, they would wait for the store until the collective timeout."""
    for attempt in range(1, _STORE_ATTEMPTS + 1):
        try:
            socket.create_connection((info.master_addr, info.master_port), timeout=10).close()
            return
        except OSError as error:
            if attempt == _STORE_ATTEMPTS:
                raise RuntimeError(
                    f"torchrun's store at {info.master_addr}:{info.master_port} does not answer "
                    f"({error}): torchrun has exited; start the job again"
                ) from error
            time.sleep(1.0)
