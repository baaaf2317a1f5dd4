"""Who am I among how many: rank and rendezvous under every launcher.

``torchrun`` says it in its environment, ``srun`` in Slurm's, ``mpirun`` through MPI (one broadcast
of rank 0's address and a free port). Plain ``python`` is a world of one. ``MPPO_LAUNCHER``
overrides the choice.

MPI is finalised only on a clean way out of ``process_group``: a rank that fails leaves without, and
that is what makes ``mpirun`` end the others at once.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil

if TYPE_CHECKING:
    import torch.distributed as dist

Launcher = Literal["torchrun", "mpi", "slurm", "python"]
LAUNCHERS: tuple[Launcher, ...] = ("torchrun", "mpi", "slurm", "python")
MPI_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MPI_LOCALRANKID")
PATIENCE_S = 30.0
"""Seconds that torchrun waits by default between the signal to stop and SIGKILL."""
LOOPBACK = "127.0.0.1"
PARENT = os.getppid()
"""The launcher, unless it had gone before this process came so far."""
_STORE_ATTEMPTS = 5
_LOOK_S = 0.05
_OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 10_000


@dataclass(frozen=True)
class LaunchInfo:
    """Where one process stands in the job.

    Args:
        rank: index in the job, from 0.
        world_size: processes in the job.
        local_rank: index on this node.
        local_world_size: processes on this node.
        master_addr: address of rank 0.
        master_port: TCP port of the rendezvous there.
        how: the launcher it was learned from.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    how: Launcher

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.world_size and self.local_rank >= 0):
            raise ValueError(
                f"{self.how} gave rank {self.rank} (local {self.local_rank}) of "
                f"{self.world_size}: start every process through one launcher"
            )


def discover(environ: Mapping[str, str] | None = None) -> LaunchInfo:
    """Learn rank, size and rendezvous from whatever started this process.

    Args:
        environ: the environment; this process's own where None.

    Returns:
        This process's place. Collective under MPI.

    Raises:
        ValueError: the launcher's variables are incomplete, or MPI is needed and missing.
    """
    environ = os.environ if environ is None else environ
    return _READERS[launcher(environ)](environ)


def launcher(environ: Mapping[str, str]) -> Launcher:
    """Which launcher started this process.

    MPI comes before Slurm, for ``mpirun`` in a Slurm job sets both; a Slurm batch script that
    starts ``python`` without ``srun`` has no step and is a world of one.
    """
    asked = environ.get("MPPO_LAUNCHER", "")
    if asked:
        if asked not in LAUNCHERS:
            raise ValueError(f"MPPO_LAUNCHER={asked}: choose one of {', '.join(LAUNCHERS)}")
        return asked
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
    """Seconds that the launcher waits between the signal to stop and SIGKILL.

    torchrun says it to nobody but on its own command line (torch/distributed/run.py). Under Slurm,
    whose own patience (``KillWait``) is 30 s by default, more is not counted on.

    Args:
        info: this process's place.
        environ: its environment.
        command: command line of its parent.
    """
    if info.how != "torchrun" or "SLURM_JOB_ID" in environ:
        return PATIENCE_S
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    default = environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", PATIENCE_S)
    names = ("--shutdown-timeout", "--shutdown_timeout")
    parser.add_argument(*names, dest="seconds", type=float, default=default)
    try:
        return float(parser.parse_known_args(list(command))[0].seconds)
    except (argparse.ArgumentError, ValueError):  # torchrun itself refuses such a value
        return PATIENCE_S


def parents_command() -> Sequence[str]:
    """Command line of the process that started this one; empty where it cannot be read."""
    try:
        return psutil.Process(PARENT).cmdline()
    except psutil.Error:
        return ()


@contextmanager
def process_group(info: LaunchInfo, timeout_s: float) -> Iterator[None]:
    """The default process group, destroyed on every way out.

    Args:
        info: this process's place.
        timeout_s: seconds after which a collective that misses a rank fails.
    """
    import torch.distributed as dist  # where a rank stands is known without torch

    init_process_group(info, timeout_s)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if info.how == "mpi":
        from mpi4py import MPI

        if not MPI.Is_finalized():
            MPI.Finalize()


def init_process_group(info: LaunchInfo, timeout_s: float) -> None:
    """Take this rank's device and join the default process group. Collective.

    Raises:
        ValueError: the port of the rendezvous is in use, or the device asked for is not there.
    """
    import torch.distributed as dist

    from mppo.parallel import device

    device.select(info.local_rank, info.local_world_size)
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
        raise ValueError(
            f"the port {info.master_port} of the rendezvous is in use on this machine: set "
            f"MASTER_PORT to a free one, or end the program that has it"
        ) from error


def _store_of_this_start(info: LaunchInfo, timeout_s: float) -> dist.Store:
    """The store that torchrun hosts, under a prefix of its own for every start of the ranks.

    The store outlives them: ranks that torchrun starts again find the addresses of those before in
    it. (How often a rank was started is no prefix: the agents of several nodes count differently.)
    Every rank shows a word that it has just drawn, and the first rank answers to it with the
    prefix; to a rank of this start no other rank answers. Collective.

    Raises:
        RuntimeError: some rank did not come within ``timeout_s``.
    """
    import torch.distributed as dist

    patience = timedelta(seconds=timeout_s)
    store = dist.TCPStore(
        info.master_addr, info.master_port, timeout=patience, wait_for_workers=False
    )
    word = secrets.token_hex(16)
    if info.rank:
        store.set(f"mppo/word/{info.rank}", word)
        prefix = store.get(f"mppo/answer/{word}").decode()
        store.add(f"{prefix}/here", 1)
        return dist.PrefixStore(prefix, store)
    deadline = time.monotonic() + timeout_s
    while (here := 1 + store.add(f"{word}/here", 0)) < info.world_size:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{here} of {info.world_size} ranks came within {timeout_s:.0f} s")
        for key in [f"mppo/word/{rank}" for rank in range(1, info.world_size)]:
            if store.check([key]):
                store.set(f"mppo/answer/{store.get(key).decode()}", word)
        time.sleep(_LOOK_S)
    return dist.PrefixStore(word, store)


def _check_agent(info: LaunchInfo) -> None:
    """The store that torchrun hosts must answer: if torchrun was killed while its ranks were
    starting, they would wait for it until the collective timeout.

    Raises:
        RuntimeError: it does not.
    """
    for attempt in range(1, _STORE_ATTEMPTS + 1):
        try:
            socket.create_connection((info.master_addr, info.master_port), timeout=10).close()
            return
        except OSError as error:
            if attempt == _STORE_ATTEMPTS:
                raise RuntimeError(
                    f"torchrun's store at {info.master_addr}:{info.master_port} does not answer "
                    f"({error}): torchrun has gone, start the job again"
                ) from error
            time.sleep(1.0)


def free_port() -> int:
    """A TCP port that is free on this host now.

    It is below those that Linux gives to outgoing connections, where there are such ports: a server
    that listens only seconds later is likely to find it free still.
    """
    end = int(_OUTGOING_PORTS.read_text().split()[0]) if _OUTGOING_PORTS.exists() else 0
    count = max(0, end - _FIRST_PORT)
    drawn = [_FIRST_PORT + secrets.randbelow(count) for _ in range(32 if count else 0)]
    for port in (*drawn, 0):
        with socket.socket() as listener, suppress(OSError):  # taken: try the next
            listener.bind(("", port))
            return listener.getsockname()[1]
    raise OSError("no TCP port is free on this host")


def own_address() -> str:
    """An address by which other hosts reach this one (loopback where it has no other)."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
        addresses = [str(entry[4][0]) for entry in found]
    except socket.gaierror:  # a host's own name need not be known to it
        addresses = []
    routable = [address for address in addresses if not address.startswith("127.")]
    if routable:
        return routable[0]
    return address_towards("10.255.255.255")


def address_towards(host: str) -> str:
    """The address that ``host`` sees connections from this machine come from."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # a datagram socket: chooses a route, sends nothing
        except OSError:  # no route to there: this machine is on its own
            return LOOPBACK
        return probe.getsockname()[0]


def tasks_on_node(tasks_per_node: str, node: int) -> int:
    """Tasks on one node from Slurm's compressed list: ``2(x3),1`` is 2, 2, 2, 1.

    Raises:
        ValueError: the list is malformed or names fewer nodes.
    """
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={tasks_per_node} cannot be read")
        counts += [int(match[1])] * int(match[2] or 1)
    if node >= len(counts):
        raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={tasks_per_node} has no node {node}")
    return counts[node]


def _integer(environ: Mapping[str, str], name: str, how: str) -> int:
    value = environ.get(name, "")
    if not value.isdigit():
        raise ValueError(f"started by {how}, but {name}={value!r} is no number: set it")
    return int(value)


def _from_torchrun(environ: Mapping[str, str]) -> LaunchInfo:
    if not environ.get("MASTER_ADDR"):
        raise ValueError("RANK and WORLD_SIZE are set but MASTER_ADDR is not: start with torchrun")
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
    """Address of the step's first node, which runs rank 0. Node names need not be in DNS."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    if environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES")) == "1":
        return LOOPBACK
    try:
        names = subprocess.check_output(["scontrol", "show", "hostnames", nodes], text=True)
        first = names.split()[0]
        shown = subprocess.check_output(["scontrol", "show", "node", "-o", first], text=True)
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        raise ValueError(
            f"cannot find the first of the nodes {nodes!r} with scontrol ({error}): "
            "set MASTER_ADDR in the job script"
        ) from error
    match = re.search(r"NodeAddr=(\S+)", shown)
    return match[1] if match else first


def _from_mpi(environ: Mapping[str, str]) -> LaunchInfo:
    try:
        import mpi4py

        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: no MPI library to load
        raise ValueError(
            f'started by mpirun, but mpi4py does not load ({error}): pip install "mppo[mpi]", '
            "or start with torchrun"
        ) from error
    world = MPI.COMM_WORLD
    on_node = world.Split_type(MPI.COMM_TYPE_SHARED)
    rank, size, local = world.Get_rank(), world.Get_size(), on_node.Get_rank()
    on_this_node = on_node.Get_size()
    tasks = environ.get("SLURM_NTASKS", "")
    if size == 1 and tasks.isdigit() and int(tasks) > 1 and "SLURM_STEP_ID" in environ:
        raise ValueError(
            f"srun started {tasks} tasks but MPI sees one: use srun --mpi=pmi2 with an MPI that "
            "speaks it, or set MPPO_LAUNCHER=slurm to do without MPI"
        )
    address = LOOPBACK if on_this_node == size else own_address()
    address, port = world.bcast((address, free_port()) if rank == 0 else None, root=0)
    on_node.Free()
    if size == 1:
        MPI.Finalize()  # alone there is nobody to take down
    return LaunchInfo(rank, size, local, on_this_node, address, port, "mpi")


_READERS = {
    "torchrun": _from_torchrun,
    "mpi": _from_mpi,
    "slurm": _from_slurm,
    "python": _from_python,
}
