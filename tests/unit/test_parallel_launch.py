"""Rank discovery under every launcher."""

from __future__ import annotations

import contextlib
import gc
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from launched_run import mpirun, torchrun

from mppo.parallel import launch, process_group
from mppo.parallel.addresses import address_towards, free_port, interface_towards
from mppo.parallel.launch import (
    LaunchInfo,
    discover,
    keep_imports,
    launcher,
    prepare_imports,
    tasks_on_node,
)
from mppo.parallel.process_group import check_distinct

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "12345",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "MASTER_ADDR": "10.0.0.1",
}
PROBE = """
import os, sys, time, torch, torch.distributed as dist
from mppo.parallel.launch import discover, launcher_patience_s, parents_command
from mppo.parallel.process_group import process_group
info = discover()
waits = launcher_patience_s(info, os.environ, parents_command())
with process_group(info, 60):
    total = torch.tensor([float(info.rank + 1)])
    dist.all_reduce(total)
    line = f"sum {total.item()} of {info.world_size} by {info.how}, waits {waits:.0f} s\\n"
    os.write(1, line.encode())  # one write: lines of two ranks must not mix
    if "fail" in sys.argv and info.rank == 1:
        sys.exit(3)
    if "fail" in sys.argv:
        time.sleep(600)
"""


def test_torchrun_variables_are_taken_as_they_are():
    assert discover(TORCHRUN) == LaunchInfo(3, 8, 1, 2, "n1", 29500, "torchrun")


def test_srun_variables_give_rank_size_and_a_port_of_the_job():
    assert discover(SRUN) == LaunchInfo(3, 4, 1, 2, "10.0.0.1", 22345, "slurm")


def test_srun_on_one_node_needs_no_master():
    environ = {**SRUN, "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}
    del environ["MASTER_ADDR"]
    assert discover(environ).master_addr == "127.0.0.1"


def test_plain_python_is_a_world_of_one():
    info = discover({"PATH": "/bin"})
    assert (info.rank, info.world_size, info.how) == (0, 1, "python")


def test_python_in_a_batch_script_without_srun_is_a_world_of_one():
    batch = {k: v for k, v in SRUN.items() if k != "SLURM_STEP_ID"}
    assert launcher(batch) == "python"


def test_torchrun_inside_a_slurm_step_is_torchrun():
    assert launcher({**SRUN, **TORCHRUN}) == "torchrun"


def test_mpirun_inside_a_slurm_job_is_mpi():
    assert launcher({**SRUN, "OMPI_COMM_WORLD_RANK": "0"}) == "mpi"


def test_the_choice_can_be_overridden_but_not_misspelt():
    assert launcher({**TORCHRUN, "MPPO_LAUNCHER": "python"}) == "python"
    with pytest.raises(ValueError, match="choose one of torchrun, mpi, slurm, python"):
        launcher({"MPPO_LAUNCHER": "ray"})


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"])
def test_a_half_set_environment_names_the_missing_variable(missing):
    environ = {k: v for k, v in TORCHRUN.items() if k != missing}
    with pytest.raises(ValueError, match=missing):
        discover(environ)


def test_a_rank_outside_the_world_is_refused():
    with pytest.raises(ValueError, match="rank 8"):
        discover({**TORCHRUN, "RANK": "8"})


def test_slurm_task_lists_are_read():
    assert [tasks_on_node("2(x3),1", node) for node in range(4)] == [2, 2, 2, 1]
    with pytest.raises(ValueError, match="has no node 2"):
        tasks_on_node("4,4", 2)
    with pytest.raises(ValueError, match="cannot be read"):
        tasks_on_node("x", 0)


def test_a_free_port_can_be_listened_on_and_is_none_that_connections_take():
    outgoing = Path("/proc/sys/net/ipv4/ip_local_port_range")
    for port in {free_port() for _ in range(8)}:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
        if outgoing.exists():
            assert 1024 <= port < int(outgoing.read_text().split()[0])


def probe(tmp_path: Path, command: list[str], *arguments: str) -> subprocess.CompletedProcess:
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    return subprocess.run(
        [*command, str(script), *arguments], capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("way", [None, RuntimeError, SystemExit, KeyboardInterrupt])
def test_the_process_group_is_destroyed_on_every_way_out(way):
    expected, hook = pytest.raises(way) if way else contextlib.nullcontext(), sys.excepthook
    with expected, process_group.process_group(discover({}), timeout_s=60):
        assert dist.is_initialized()
        if way:
            raise way
    assert not dist.is_initialized()
    assert sys.excepthook is hook  # torch's would prefix later exceptions of a program by the rank


@pytest.mark.server
def test_mpirun_ranks_meet(tmp_path):
    result = probe(tmp_path, mpirun())
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("sum 3.0 of 2 by mpi") == 2


@pytest.mark.server
def test_mpirun_ends_all_ranks_when_one_fails(tmp_path):
    result = probe(tmp_path, mpirun(), "fail")
    assert result.returncode == 3, result.stderr


PATIENCE = [
    ([], {}, 30.0),
    (["--shutdown-timeout", "300"], {}, 300.0),
    (["--shutdown_timeout=45", "train.py"], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}, 45.0),
    ([], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "77"}, 77.0),
    (["--shutdown-timeout", "300"], {"SLURM_JOB_ID": "1"}, 30.0),
    (["--shutdown-timeout", "soon"], {}, 30.0),
    (["--shutdown-timeout"], {}, 30.0),
]


@pytest.mark.parametrize(("options", "environ", "seconds"), PATIENCE)
def test_how_long_torchrun_waits_before_it_kills_is_known(options, environ, seconds):
    info, command = discover(TORCHRUN), ["python", "torchrun", "--nproc_per_node=2", *options]
    assert launch.launcher_patience_s(info, environ, command) == seconds


@pytest.mark.server
def test_torchrun_ranks_meet(tmp_path):
    result = probe(tmp_path, [*torchrun(), "--shutdown-timeout=77"])
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("waits 77 s") == 2
    assert result.stdout.count("sum 3.0 of 2 by torchrun") == 2


def test_a_rank_whose_torchrun_was_killed_before_it_came_so_far_does_not_wait(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(process_group, "_STORE_ATTEMPTS", 1)
    orphan = LaunchInfo(1, 2, 1, 2, "127.0.0.1", free_port(), "torchrun")
    with pytest.raises(RuntimeError, match="torchrun has exited"):
        process_group.init_process_group(orphan, timeout_s=600)


def test_this_machine_is_seen_as_loopback_from_itself():
    assert address_towards("127.0.0.1") == "127.0.0.1"


def test_the_interface_towards_a_host_is_found():
    assert interface_towards("127.0.0.1") == "lo"


def test_ranks_with_one_gpu_are_named():
    check_distinct(["a", "b", "c"])
    with pytest.raises(ValueError, match=r"ranks 1 and 2 have the same GPU \(b\)"):
        check_distinct(["a", "b", "b"])


def test_collections_of_garbage_spare_what_was_imported():
    frozen = gc.get_freeze_count()
    try:
        prepare_imports()
        meanwhile = gc.get_threshold()[0]
        made = [[]]
        keep_imports()
        assert gc.get_threshold()[0] < meanwhile
        assert gc.get_freeze_count() > frozen
        assert not any(each is made for each in gc.get_objects())
    finally:
        gc.unfreeze()
        gc.freeze()  # as ``conftest.py`` leaves it
