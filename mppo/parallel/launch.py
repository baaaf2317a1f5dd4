"""Rank, world size and rendezvous address of this process under every launcher.

``torchrun`` and ``srun`` give them in environment variables, ``mpirun`` through MPI (one broadcast
of rank 0's address and a free port). Plain ``python`` is a world of one. ``MPPO_LAUNCHER``
overrides the choice of launcher.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import psutil

from mppo.parallel.addresses import LOOPBACK, free_port, own_address
from mppo.safety.input_error import InputError

Launcher = Literal["torchrun", "mpi", "slurm", "python"]
LAUNCHERS: tuple[Launcher, ...] = ("torchrun", "mpi", "slurm", "python")
MPI_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MPI_LOCALRANKID")
PATIENCE_S = 30.0
"""Seconds that torchrun waits by default between the signal to stop and SIGKILL."""
PARENT = os.getppid()
"""Process id of the launcher, unless the launcher exited before this module was imported."""
_THRESHOLDS = gc.get_threshold()
_WHILE_IMPORTING = 100_000
"""New objects between two collections."""


@dataclass(frozen=True)
class LaunchInfo:
    """Place of one process in the job."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    how: Launcher

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.world_size and self.local_rank >= 0):
            raise InputError(
                f"{self.how} gave rank {self.rank} (local {self.local_rank}) of "
                f"{self.world_size}: start every process through one launcher"
            )


def prepare_imports() -> None:
    """Call it before torch, Megatron-Core and transformers are imported.

    It hides their warnings on optional packages and deprecated calls, on which a user cannot act.
    Until ``keep_imports`` garbage is collected rarely: the libraries make half a million objects,
    and every collection would visit them.
    """
    if not sys.warnoptions:
        warnings.filterwarnings("ignore", module=r"(megatron|torch\.distributed)\.")
    gc.set_threshold(_WHILE_IMPORTING, *_THRESHOLDS[1:])


def keep_imports() -> None:
    """Collect garbage as often as before ``prepare_imports``, but never among the objects that
    exist now. A full collection that visits those of the libraries takes tenths of a second, on
    each rank at another moment of a step. ``gc.unfreeze`` undoes it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


def discover(environ: Mapping[str, str] | None = None) -> LaunchInfo:
    """Read rank, world size and rendezvous from the launcher of this process; InputError if its
    variables are incomplete, or MPI is needed and missing. Collective under MPI."""
    environ = os.environ if environ is None else environ
    return _READERS[launcher(environ)](environ)


def launcher(environ: Mapping[str, str]) -> Launcher:
    """Return the launcher of this process; InputError if ``MPPO_LAUNCHER`` names none. MPI is
    checked before Slurm, since ``mpirun`` in a Slurm job sets the variables of both. A Slurm batch
    script that starts ``python`` without ``srun`` has no step and is a world of one."""
    if name := environ.get("MPPO_LAUNCHER", ""):
        if name not in LAUNCHERS:
            raise InputError(f"MPPO_LAUNCHER={name}: choose one of {', '.join(LAUNCHERS)}")
        return name
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return "torchrun"
    if any(variable in environ for variable in MPI_VARIABLES):
        return "mpi"
    if "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ:
        return "slurm"
    return "python"


def launcher_patience_s(
    info: LaunchInfo, environ: Mapping[str, str], command: Sequence[str]
) -> float:
    """Seconds that the launcher waits between the signal to stop and SIGKILL. torchrun's value
    appears on its command line only (torch/distributed/run.py). Under Slurm, whose own ``KillWait``
    is 30 s by default, a longer value of torchrun has no effect."""
    if info.how != "torchrun" or "SLURM_JOB_ID" in environ:
        return PATIENCE_S
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    default = environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", PATIENCE_S)
    names = ("--shutdown-timeout", "--shutdown_timeout")
    parser.add_argument(*names, dest="seconds", type=float, default=default)
    try:
        return float(parser.parse_known_args(list(command))[0].seconds)
    except (argparse.ArgumentError, ValueError):  # torchrun rejects such a value
        return PATIENCE_S


def parents_command() -> Sequence[str]:
    """Command line of this process's parent; empty if it cannot be read."""
    try:
        return psutil.Process(PARENT).cmdline()
    except psutil.Error:
        return ()


def is_over_nodes(environ: Mapping[str, str]) -> bool:
    """Whether this rank's job runs under several torchruns that share a store."""
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    return int(environ["WORLD_SIZE"]) > int(environ["LOCAL_WORLD_SIZE"])


def tasks_on_node(tasks_per_node: str, node: int) -> int:
    """Number of tasks on one node from Slurm's compressed list: ``2(x3),1`` is 2, 2, 2, 1.
    InputError: the list is malformed or names fewer nodes."""
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise InputError(f"SLURM_STEP_TASKS_PER_NODE={tasks_per_node} cannot be read")
        counts += [int(match[1])] * int(match[2] or 1)
    if node >= len(counts):
        raise InputError(f"SLURM_STEP_TASKS_PER_NODE={tasks_per_node} has no node {node}")
    return counts[node]


def _integer(environ: Mapping[str, str], name: str, how: str) -> int:
    value = environ.get(name, "")
    if not value.isdigit():
        raise InputError(f"started by {how}, but {name}={value!r} is not a number: set it")
    return int(value)


def _from_torchrun(environ: Mapping[str, str]) -> LaunchInfo:
    if not environ.get("MASTER_ADDR"):
        raise InputError("RANK and WORLD_SIZE are set but MASTER_ADDR is not: start with torchrun")
    return LaunchInfo(
        rank=_integer(environ, "RANK", "torchrun"),
        world_size=_integer(environ, "WORLD_SIZE", "torchrun"),
        local_rank=_integer(environ, "LOCAL_RANK", "torchrun"),
        local_world_size=_integer(environ, "LOCAL_WORLD_SIZE", "torchrun"),
        master_addr=environ["MASTER_ADDR"],
        master_port=_integer(environ, "MASTER_PORT", "torchrun"),
        how="torchrun",
    )


def _from_python(environ: Mapping[str, str]) -> LaunchInfo:
    return LaunchInfo(0, 1, 0, 1, LOOPBACK, free_port(), "python")


def _from_slurm(environ: Mapping[str, str]) -> LaunchInfo:
    node = _integer(environ, "SLURM_NODEID", "srun")
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    port = environ.get("MASTER_PORT") or str(
        20000 + (_integer(environ, "SLURM_JOB_ID", "srun") + int(environ["SLURM_STEP_ID"])) % 10000
    )
    return LaunchInfo(
        rank=_integer(environ, "SLURM_PROCID", "srun"),
        world_size=_integer(environ, "SLURM_NTASKS", "srun"),
        local_rank=_integer(environ, "SLURM_LOCALID", "srun"),
        local_world_size=tasks_on_node(tasks, node),
        master_addr=environ.get("MASTER_ADDR") or _slurm_master(environ),
        master_port=_integer({"MASTER_PORT": port}, "MASTER_PORT", "srun"),
        how="slurm",
    )


def _slurm_master(environ: Mapping[str, str]) -> str:
    """Address of the step's first node, which runs rank 0; node names may be missing from DNS."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    if environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES")) == "1":
        return LOOPBACK
    try:
        names = subprocess.check_output(["scontrol", "show", "hostnames", nodes], text=True)
        first = names.split()[0]
        shown = subprocess.check_output(["scontrol", "show", "node", "-o", first], text=True)
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        raise InputError(
            f"cannot find the address of the first node of {nodes!r} with scontrol ({error}): "
            "set MASTER_ADDR in the job script"
        ) from error
    match = re.search(r"NodeAddr=(\S+)", shown)
    return match[1] if match else first


def _from_mpi(environ: Mapping[str, str]) -> LaunchInfo:
    try:
        import mpi4py

        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py finds no MPI library
        raise InputError(
            f'started by mpirun, but mpi4py cannot be imported ({error}): pip install "mppo[mpi]", '
            "or start with torchrun"
        ) from error
    world = MPI.COMM_WORLD
    on_node = world.Split_type(MPI.COMM_TYPE_SHARED)
    rank, size, local = world.Get_rank(), world.Get_size(), on_node.Get_rank()
    on_this_node = on_node.Get_size()
    tasks = environ.get("SLURM_NTASKS", "")
    if size == 1 and tasks.isdigit() and int(tasks) > 1 and "SLURM_STEP_ID" in environ:
        raise InputError(
            f"srun started {tasks} tasks but MPI sees one: use srun --mpi=pmi2 with an MPI that "
            "supports PMI-2, or set MPPO_LAUNCHER=slurm to start without MPI"
        )
    address = LOOPBACK if on_this_node == size else own_address()
    address, port = world.bcast((address, free_port()) if rank == 0 else None, root=0)
    on_node.Free()
    if size == 1:
        MPI.Finalize()  # a world of one has no other ranks to end on failure
    return LaunchInfo(rank, size, local, on_this_node, address, port, "mpi")


_READERS = {
    "torchrun": _from_torchrun,
    "mpi": _from_mpi,
    "slurm": _from_slurm,
    "python": _from_python,
}
