"""Checks before a cluster job: the recipe, and that all nodes are alike and able.

    python -m mppo.preflight recipe --config x.yaml --world-size 16 [section.key=value ...]
    srun ... python -m mppo.preflight collect --ranks 8 --port 29500 |
        python -m mppo.preflight judge --nodes 2

``collect`` prints one line of JSON per node, ``judge`` reads them and prints a table of what is
wrong. Exit code 0, or 2 with every issue named.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import mppo
from mppo.config.errors import ConfigError, ConfigIssue
from mppo.parallel import device
from mppo.safety.redact import redacted_output

MARK = "mppo-preflight "
PACKAGES = ("torch", "megatron-core", "transformers", "sglang", "transformer-engine")
FREE_DISK_GB = 5.0
CLOCK_SKEW_S = 30.0


@dataclass(frozen=True)
class NodeReport:
    """What one node says of itself.

    Args:
        host: its name.
        python: version of the interpreter.
        packages: version by package, "absent" where not installed.
        mppo: version of this package and where it was loaded from.
        device: name of the device ranks will use.
        devices: GPUs seen, 0 on a node without.
        ranks: ranks to be started on it.
        free_disk_gb: space in the working folder.
        writable: whether a file can be written there.
        port_free: whether the rendezvous port is free.
        clock_s: seconds since the epoch.
    """

    host: str
    python: str
    packages: dict[str, str]
    mppo: str
    device: str
    devices: int
    ranks: int
    free_disk_gb: float
    writable: bool
    port_free: bool
    clock_s: float


def collect_facts(ranks: int, port: int, folder: Path) -> NodeReport:
    """Look at this node."""
    return NodeReport(
        host=socket.gethostname() + _node_suffix(),
        python=platform.python_version(),
        packages={name: _version(name) for name in PACKAGES},
        mppo=f"{mppo.__version__} in {Path(mppo.__file__).parent}",
        device=device.name(),
        devices=torch.accelerator.device_count() if torch.accelerator.is_available() else 0,
        ranks=ranks,
        free_disk_gb=shutil.disk_usage(folder).free / 1e9,
        writable=os.access(folder, os.W_OK),
        port_free=_port_is_free(port),
        clock_s=time.time(),
    )


def judge(reports: Sequence[NodeReport], nodes: int, now_s: float) -> list[ConfigIssue]:
    """What is wrong with a set of nodes.

    Args:
        reports: one per node that answered.
        nodes: how many should have.
        now_s: the judge's clock.

    Returns:
        Issues, none where all is well; the key is the node.
    """
    issues = []
    if len(reports) < nodes:
        names = ", ".join(report.host for report in reports) or "none"
        why = f"only {len(reports)} of {nodes} nodes answered: {names}"
        issues.append(ConfigIssue("nodes", nodes, why, "look at the others' errors above"))
    for report in reports:
        issues += _judge_node(report, now_s)
    for name in ("python", "mppo", "packages", "device"):
        answers: dict[str, list[str]] = {}
        for report in reports:
            answers.setdefault(str(getattr(report, name)), []).append(report.host)
        if len(answers) > 1:
            told = "; ".join(f"{', '.join(hosts)}: {value}" for value, hosts in answers.items())
            fix = "use one environment on a shared disk, or one container, for all nodes"
            issues.append(ConfigIssue(name, "differs", told, fix))
    return issues


def facts_table(reports: Sequence[NodeReport]) -> str:
    """The nodes side by side."""
    head = ("node", "device", "GPUs", "ranks", "python", "torch", "free disk")
    rows = [head] + [
        (
            report.host,
            report.device,
            str(report.devices),
            str(report.ranks),
            report.python,
            report.packages["torch"],
            f"{report.free_disk_gb:.0f} GB",
        )
        for report in sorted(reports, key=lambda report: report.host)
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows)


@redacted_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 where all is well, 2 with the issues on stderr."""
    arguments = _parse(argv)
    try:
        if arguments.action == "recipe":
            _check_recipe(arguments.config, arguments.overrides, arguments.world_size)
        elif arguments.action == "collect":
            report = collect_facts(arguments.ranks, arguments.port, Path.cwd())
            print(MARK + json.dumps(asdict(report)), flush=True)
        else:
            reports = _read_reports(sys.stdin.read())
            print(facts_table(reports), flush=True)
            issues = judge(reports, arguments.nodes, time.time())
            if issues:
                raise ConfigError(issues, source="preflight")
    except ConfigError as error:
        print(f"mppo: {error}", file=sys.stderr)
        return 2
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mppo.preflight")
    actions = parser.add_subparsers(dest="action", required=True)
    recipe = actions.add_parser("recipe", help="judge a recipe and its files")
    recipe.add_argument("--config", type=Path, required=True)
    recipe.add_argument("--world-size", type=int, required=True)
    recipe.add_argument("overrides", nargs="*")
    node = actions.add_parser("collect", help="print what this node has")
    node.add_argument("--ranks", type=int, required=True)
    node.add_argument("--port", type=int, required=True)
    judging = actions.add_parser("judge", help="compare the nodes' reports on stdin")
    judging.add_argument("--nodes", type=int, required=True)
    return parser.parse_args(argv)


def _judge_node(report: NodeReport, now_s: float) -> list[ConfigIssue]:
    issues = []
    if report.devices and report.devices < report.ranks:
        why = f"{report.ranks} ranks, but {report.devices} GPUs"
        issues.append(
            ConfigIssue(report.host, report.devices, why, "ask for more with --gpus-per-node")
        )
    if report.free_disk_gb < FREE_DISK_GB:
        why = f"{report.free_disk_gb:.1f} GB left on the working disk"
        issues.append(ConfigIssue(report.host, "disk", why, f"free at least {FREE_DISK_GB:.0f} GB"))
    if not report.writable:
        why, fix = "the working folder cannot be written", "submit from a folder you own"
        issues.append(ConfigIssue(report.host, "disk", why, fix))
    if not report.port_free:
        fix = "submit anew: the port follows from the job's number"
        issues.append(ConfigIssue(report.host, "port", "the rendezvous port is taken", fix))
    if abs(report.clock_s - now_s) > CLOCK_SKEW_S:
        why = f"its clock is {report.clock_s - now_s:+.0f} s off"
        issues.append(ConfigIssue(report.host, "clock", why, "synchronise the node's clock"))
    return issues


def _read_reports(text: str) -> list[NodeReport]:
    """Reports among whatever else the nodes printed."""
    known = {field.name for field in fields(NodeReport)}
    reports = []
    for line in text.splitlines():
        _, mark, rest = line.partition(MARK)
        if mark:
            values = json.loads(rest)
            reports.append(NodeReport(**{name: values[name] for name in known}))
        elif line.strip():
            print(line, file=sys.stderr)
    return reports


def _check_recipe(config: Path, overrides: Sequence[str], world_size: int) -> None:
    # imported here, for `collect` runs on every node and has no use for them
    from mppo.config.checks import load_checked
    from mppo.hub.builtin import read_model_config, resolve_model
    from mppo.hub.check_weights import check_weights
    from mppo.hub.download import fetch_model
    from mppo.models.overrides import override_issues
    from mppo.rollout.sglang.model_support import engine_issues

    def read(path: str):
        return read_model_config(resolve_model(path))

    load_checked(
        config,
        overrides,
        world_size,
        read,
        role_checks=(override_issues, check_weights),
        engine_check=partial(engine_issues, on_cpu=False),  # maybe not on a node of the job
        fetch_model=fetch_model,
    )
    print(f"preflight: recipe {config} fits {world_size} ranks", flush=True)


def _node_suffix() -> str:
    """Slurm's name of the node, where it differs from the host's."""
    name = os.environ.get("SLURMD_NODENAME", "")
    return f" ({name})" if name and name != socket.gethostname() else ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _port_is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError:
            return False
    return True


if __name__ == "__main__":
    sys.exit(main())
