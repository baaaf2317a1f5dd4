"""A rank is bound to the cores of its GPU's NUMA node, as a generated sysfs describes it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mppo.parallel.node import cores_near

GPUS = {"0000:1b:00.0": 0, "0000:43:00.0": 0, "0001:9d:00.0": 1, "0001:c4:00.0": -1}
NODES = {0: "0-3,8-11\n", 1: "4-7,12-15\n", 2: "\n"}
ALL = frozenset(range(16))


def sysfs_of(root: Path, gpus: dict[str, int], nodes: dict[int, str]) -> Path:
    for gpu, node in gpus.items():
        folder = root / "bus/pci/devices" / gpu
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    for node, cores in nodes.items():
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores)
    return root


@pytest.mark.parametrize(
    ("gpu", "allowed", "near"),
    [
        ("0000:1b:00.0", ALL, {0, 1, 2, 3, 8, 9, 10, 11}),
        ("0001:9D:00.0", ALL, {4, 5, 6, 7, 12, 13, 14, 15}),
        ("0001:9d:00.0", frozenset({1, 2, 5, 6}), {5, 6}),
        ("0001:9d:00.0", frozenset({1, 2}), {1, 2}),
        ("0001:c4:00.0", ALL, ALL),
        ("0000:ff:00.0", ALL, ALL),
        ("", ALL, ALL),
    ],
    ids=(
        "first node",
        "capitals",
        "few cores",
        "none of its cores",
        "node unknown",
        "no such GPU",
        "no address",
    ),
)
def test_the_cores_of_the_gpus_node_that_the_process_may_use(tmp_path, gpu, allowed, near):
    assert cores_near(gpu, allowed, sysfs_of(tmp_path, GPUS, NODES)) == near


def test_a_node_without_cores_or_a_strange_list_changes_nothing(tmp_path):
    sysfs = sysfs_of(tmp_path, {"0000:01:00.0": 2, "0000:02:00.0": 3}, {2: "\n", 3: "0-x\n"})
    assert cores_near("0000:01:00.0", ALL, sysfs) == ALL
    assert cores_near("0000:02:00.0", ALL, sysfs) == ALL


BOUND = """
import os, subprocess, sys
from pathlib import Path
from mppo.parallel import node

def child():
    command = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

node.bind_cores("0000:1b:00.0", Path(sys.argv[1]))
print(sorted(os.sched_getaffinity(0)))
print(child())
with node.unbound_cores():
    print(child())
print(sorted(os.sched_getaffinity(0)))
"""


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="binding shows on Linux with two cores or more",
)
def test_a_process_is_bound_and_servers_are_not(tmp_path):
    mine = sorted(os.sched_getaffinity(0))
    sysfs = sysfs_of(tmp_path, {"0000:1b:00.0": 0}, {0: f"{mine[0]}\n"})
    command = [sys.executable, "-c", BOUND, str(sysfs)]
    root = Path(__file__).parents[2]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    near = [mine[0]]
    assert found.stdout.splitlines() == [str(x) for x in (near, near, mine, near)]
