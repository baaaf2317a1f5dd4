"""Ranks on two hosts whose names resolve to loopback, as Debian and Ubuntu set them up.

The hosts are two namespaces of network, host name and mounts, connected by a pair of interfaces.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOSTS = {"mppo-a": "10.9.0.1", "mppo-b": "10.9.0.2"}
RANK = """
import sys
import torch
import torch.distributed as dist
from mppo.parallel.launch import LaunchInfo
from mppo.parallel.process_group import process_group

rank = int(sys.argv[1])
with process_group(LaunchInfo(rank, 2, 0, 1, sys.argv[2], 29555, "slurm"), 60.0):
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 2.0
"""


def _ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True)


@pytest.fixture
def hosts(tmp_path):
    """The two hosts' names files; skipped where namespaces cannot be made."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("unshare")):
        pytest.skip("two hosts need root, iproute2 and util-linux")
    ends = dict(zip(HOSTS, ("mppo-va", "mppo-vb")))
    for host in HOSTS:
        if _ip("netns", "add", host).returncode:
            pytest.skip("this machine allows no network namespaces")
    try:
        _ip("link", "add", ends["mppo-a"], "type", "veth", "peer", "name", ends["mppo-b"])
        files = {}
        for host, address in HOSTS.items():
            _ip("link", "set", ends[host], "netns", host)
            _ip("-n", host, "addr", "add", f"{address}/24", "dev", ends[host])
            for interface in ("lo", ends[host]):
                _ip("-n", host, "link", "set", interface, "up")
            files[host] = tmp_path / host
            files[host].write_text(f"127.0.0.1 localhost\n127.0.1.1 {host}\n")
        yield files
    finally:
        for host in HOSTS:
            _ip("netns", "del", host)


@pytest.mark.distributed
def test_ranks_of_two_hosts_meet(hosts, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    ranks = []
    for rank, (host, file) in enumerate(hosts.items()):
        setup = f"hostname {host}; mount --bind {file} /etc/hosts; exec ip netns exec {host} "
        command = f'"{sys.executable}" "{script}" {rank} {HOSTS["mppo-a"]}'
        ranks.append(
            subprocess.Popen(
                ["unshare", "--uts", "--mount", "bash", "-c", setup + command],
                env={**os.environ, "MPPO_DEVICE": "cpu", "PYTHONPATH": str(ROOT)},
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    errors = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
