"""A real Slurm cluster on this machine: munge, one controller, several node daemons, loopback.

Needs root and Debian's slurm-wlm and munge. Nothing outside ``folder`` is written, and every daemon
is stopped by its own pid file.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
ENDED = {
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY",
}  # fmt: skip
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,sched_min_interval=0
ReturnToService=2
JobRequeue=1
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
{nodes}
PartitionName=low Nodes={names} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=300
PartitionName=high Nodes={names} PriorityTier=10 PreemptMode=OFF
"""
GPU_NODES = """
GresTypes=gpu
PrivateData=cloud
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=60
NodeName=g[1-8] CPUs=64 RealMemory=1000 Gres=gpu:8 State=CLOUD
"""
"""Nodes that are never started: a controller alone says whether it would accept a job."""


def missing() -> str | None:
    """The reason that no cluster can be started here, or None."""
    absent = [name for name in DAEMONS if shutil.which(name) is None]
    if absent:
        return f"Slurm is not installed ({', '.join(absent)}): apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "Slurm's daemons are started as root here"
    return None


class SlurmCluster:
    """Daemons, and the commands to talk to them.

    Args:
        folder: where everything is written; its path must be short (socket names).
        count: nodes; 0: a controller alone, with eight nodes of eight GPUs for
            ``sbatch --test-only``.
    """

    def __init__(self, folder: Path, count: int = 3) -> None:
        self.folder, self.count = folder, count
        self.environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        """Start the daemons and wait until every node is idle."""
        for name in ("log", "state", "run", "munge"):
            (self.folder / name).mkdir()
        key = self.folder / "munge" / "key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        ports = _free_ports(self.count + 1)
        nodes = "\n".join(
            f"NodeName=n{i} NodeHostname={_host()} NodeAddr=127.0.0.1 Port={ports[i]} CPUs=4 "
            "RealMemory=1000 State=UNKNOWN"
            for i in range(1, self.count + 1)
        )
        names = f"n[1-{self.count}]" if self.count else "g[1-8]"
        config = CONFIG.format(
            host=_host(), port=ports[0], folder=self.folder, nodes=nodes or GPU_NODES, names=names
        )
        (self.folder / "slurm.conf").write_text(config)
        munge = self.folder / "munge"
        self._run(
            "munged", "--force", f"--key-file={munge}/key", f"--socket={munge}/socket",
            f"--pid-file={self.folder}/run/munged.pid", f"--log-file={munge}/log",
            f"--seed-file={munge}/seed",
        )  # fmt: skip
        self._run("slurmctld", "-f", self.environ["SLURM_CONF"])
        for i in range(1, self.count + 1):
            (self.folder / f"spool-n{i}").mkdir()
            self._run("slurmd", "-f", self.environ["SLURM_CONF"], "-N", f"n{i}")
        self.wait_for(lambda: self._output("sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D")
                   == str(self.count or 8), 300, lambda: "the nodes are not idle")  # fmt: skip

    def stop(self) -> None:
        """Cancel every job (steps outlive a node daemon), then end the daemons."""
        for job in self._output("squeue", "-h", "-o", "%i").split():
            self._run("scancel", job, check=False)
        deadline = time.monotonic() + 20
        while self._output("squeue", "-h", "-o", "%i") and time.monotonic() < deadline:
            time.sleep(0.2)
        for name in ("slurmd-*", "slurmctld", "munged"):
            for pid_file in sorted((self.folder / "run").glob(f"{name}.pid")):
                _end(int(pid_file.read_text()))

    def submit(self, *arguments: str, environ: Mapping[str, str] | None = None, cwd: Path) -> int:
        """``sbatch --parsable``; the job's number."""
        result = subprocess.run(
            ["sbatch", "--parsable", *arguments],
            env=self.environ | dict(environ or {}), cwd=cwd, capture_output=True, text=True,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        return int(result.stdout)

    def command(self, *arguments: str) -> str:
        """Any Slurm command; its output."""
        return self._run(*arguments).stdout

    def field(self, job: int, name: str) -> str:
        """One field of ``scontrol show job``."""
        shown = self._output("scontrol", "show", "job", "-o", str(job))
        match = re.search(rf"\b{name}=(\S+)", shown)
        return match[1] if match else ""

    def wait_until_ended(self, job: int, seconds: float) -> str:
        """The job's final state. (``sbatch --wait`` polls too seldom.)"""
        self.wait_for(
            lambda: self.field(job, "JobState") in ENDED,
            seconds,
            lambda: f"job {job} has not ended",
        )
        return self.field(job, "JobState")

    def wait_for_text(self, path: Path, text: str, seconds: float) -> None:
        """Wait until a log contains a text; an error shows the log."""

        def content() -> str:
            return path.read_text(errors="replace") if path.exists() else ""

        self.wait_for(
            lambda: text in content(), seconds, lambda: f"{text!r} is not in the log:\n{content()}"
        )

    def wait_for(
        self, holds: Callable[[], bool], seconds: float, message: Callable[[], str]
    ) -> None:
        """Wait until a condition is true."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, f"after {seconds} s: {message()}"
            time.sleep(0.2)

    def _run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess:
        result = subprocess.run(
            arguments, env=self.environ, cwd=self.folder, capture_output=True, text=True, timeout=60
        )
        if check and result.returncode:
            raise AssertionError(f"{' '.join(arguments)}: {result.stderr}")
        return result

    def _output(self, *arguments: str) -> str:
        return self._run(*arguments, check=False).stdout.strip()


def _host() -> str:
    return socket.gethostname().split(".")[0]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _end(pid: int) -> None:
    """End a daemon and wait for it."""
    os.kill(pid, signal.SIGTERM)
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
