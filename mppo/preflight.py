"""Checks before a cluster job: the recipe, and that the nodes work and are equal.

    python -m mppo.preflight recipe --config x.yaml --world-size 16 [section.key=value ...]
    srun ... python -m mppo.preflight collect --ranks 8 --port 29500 |
        python -m mppo.preflight judge --nodes 2

``collect`` prints one line of JSON per node. ``judge`` reads these lines and prints a table of the
nodes. Exit code 0, or 2 with all issues.
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
from pathlib import Path

import mppo
from mppo.parallel.node import PACKAGES, installed_version
from mppo.recipe.errors import ConfigError, ConfigIssue
from mppo.safety.redact import redacted_output

MARK = "mppo-preflight "
FREE_DISK_GB = 5.0
CLOCK_SKEW_S = 30.0


@dataclass(frozen=True)
class NodeReport:
    """One node's software (versions by package, "absent" if it is not installed), devices, disk and
    clock.

    Args:
        mppo: version and location of mppo.
        devices, gpus: GPUs that torch sees, and those of the node (``gpus_of_node``).
        driver: version of the NVIDIA driver; empty without one.
        torch_cuda: version of CUDA for which torch is built; empty: for the CPU.
        clock_s: seconds since the epoch.
    """

    host: str
    python: str
    packages: dict[str, str]
    mppo: str
    device: str
    devices: int
    gpus: int
    driver: str
    torch_cuda: str
    ranks: int
    free_disk_gb: float
    writable: bool
    port_free: bool
    clock_s: float


def report_node(ranks: int, port: int, folder: Path) -> NodeReport:
    import torch  # here: --help and judging do not need it

    from mppo.parallel import device
    from mppo.parallel.node import driver_version, gpus_of_node

    return NodeReport(
        host=socket.gethostname() + _node_suffix(),
        python=platform.python_version(),
        packages={name: installed_version(name) or "absent" for name in PACKAGES},
        mppo=f"{mppo.__version__} in {Path(mppo.__file__).parent}",
        device=device.name(),
        devices=torch.accelerator.device_count() if torch.accelerator.is_available() else 0,
        gpus=gpus_of_node(),
        driver=driver_version(),
        torch_cuda=torch.version.cuda or "",
        ranks=ranks,
        free_disk_gb=shutil.disk_usage(folder).free / 1e9,
        writable=os.access(folder, os.W_OK),
        port_free=_port_is_free(port),
        clock_s=time.time(),
    )


def compare_nodes(reports: Sequence[NodeReport], nodes: int, now_s: float) -> list[ConfigIssue]:
    """Issues of a job's nodes by node, or by the property in which they differ.

    Args:
        reports: one per node that answered.
        now_s: this node's clock, seconds since the epoch.
    """
    issues: list[ConfigIssue] = []
    if len(reports) < nodes:
        names = ", ".join(report.host for report in reports) or "none"
        why = f"only {len(reports)} of {nodes} nodes answered: {names}"
        issues.append(ConfigIssue("nodes", nodes, why, "look at the errors of the others above"))
    for report in reports:
        issues += _check_node(report, now_s)
    for name in ("python", "mppo", "packages", "device", "torch_cuda"):
        hosts_by_value: dict[str, list[str]] = {}
        for report in reports:
            hosts_by_value.setdefault(str(getattr(report, name)), []).append(report.host)
        if len(hosts_by_value) > 1:
            values = "; ".join(
                f"{', '.join(hosts)}: {value}" for value, hosts in hosts_by_value.items()
            )
            fix = "use one environment on a shared disk, or one container, for all nodes"
            issues.append(ConfigIssue(name, "differs", values, fix))
    return issues


def node_table(reports: Sequence[NodeReport]) -> str:
    head = ("node", "device", "GPUs", "driver", "ranks", "python", "torch", "CUDA", "free disk")
    rows = [head] + [
        (
            node.host, node.device, str(node.devices), node.driver or "-", str(node.ranks),
            node.python, node.packages["torch"], node.torch_cuda or "-",
            f"{node.free_disk_gb:.0f} GB",
        )
        for node in sorted(reports, key=lambda report: report.host)
    ]  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows)


@redacted_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Check; exit code 0, or 2 with the issues on stderr."""
    arguments = _parse(argv)
    try:
        if arguments.action == "recipe":
            _check_recipe(arguments.config, arguments.overrides, arguments.world_size)
        elif arguments.action == "collect":
            report = report_node(arguments.ranks, arguments.port, Path.cwd())
            print(MARK + json.dumps(asdict(report)), flush=True)
        else:
            reports = _read_reports(sys.stdin.read())
            print(node_table(reports), flush=True)
            issues = compare_nodes(reports, arguments.nodes, time.time())
            if issues:
                raise ConfigError(issues, source="preflight")
    except ConfigError as error:
        print(f"mppo: {error}", file=sys.stderr)
        return 2
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mppo.preflight")
    actions = parser.add_subparsers(dest="action", required=True)
    recipe = actions.add_parser("recipe", help="check a recipe and its files")
    recipe.add_argument("--config", type=Path, required=True)
    recipe.add_argument("--world-size", type=int, required=True)
    recipe.add_argument("overrides", nargs="*")
    node = actions.add_parser("collect", help="print the report of this node")
    node.add_argument("--ranks", type=int, required=True)
    node.add_argument("--port", type=int, required=True)
    judging = actions.add_parser("judge", help="compare the reports of all nodes, from stdin")
    judging.add_argument("--nodes", type=int, required=True)
    return parser.parse_args(argv)


def _check_node(report: NodeReport, now_s: float) -> list[ConfigIssue]:
    from mppo.parallel.node import unusable_gpus

    issues = []
    unusable = unusable_gpus(report.gpus, report.devices, report.driver, report.torch_cuda or None)
    if unusable is not None:
        issues.append(ConfigIssue(report.host, f"{report.gpus} GPUs", *unusable))
    if report.devices and report.devices < report.ranks:
        why = f"the node has {report.devices} GPUs for {report.ranks} ranks"
        issues.append(
            ConfigIssue(report.host, report.devices, why, "request more with --gpus-per-node")
        )
    if report.free_disk_gb < FREE_DISK_GB:
        why = f"{report.free_disk_gb:.1f} GB left on the working disk"
        issues.append(ConfigIssue(report.host, "disk", why, f"free at least {FREE_DISK_GB:.0f} GB"))
    if not report.writable:
        why, fix = "the working folder is not writable", "submit from a folder you own"
        issues.append(ConfigIssue(report.host, "disk", why, fix))
    if not report.port_free:
        fix = "submit the job again: the port follows from the job id"
        issues.append(ConfigIssue(report.host, "port", "the rendezvous port is in use", fix))
    if abs(report.clock_s - now_s) > CLOCK_SKEW_S:
        why = f"its clock is {report.clock_s - now_s:+.0f} s off"
        issues.append(ConfigIssue(report.host, "clock", why, "synchronise the node's clock"))
    return issues


def _read_reports(text: str) -> list[NodeReport]:
    """The reports in the nodes' output; other lines go to stderr."""
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
    # imported here: `collect` runs on every node and does not need them
    from mppo.hub.data_sets import fetch_data_set
    from mppo.hub.download import fetch_model
    from mppo.supervision import exit_report
    from mppo.trainer.start.checked_recipe import check_engine, check_role, read_config
    from mppo.trainer.start.loading import load_checked
    from mppo.trainer.start.user_code import input_issues

    remarks: list[str] = []
    recipe = load_checked(
        config,
        overrides,
        world_size,
        read_config,
        role_checks=(check_role,),
        engine_check=partial(check_engine, on_cpu=False),  # this node may not be one of the job's
        fetch_model=fetch_model,
        fetch_data_set=fetch_data_set,
        check_inputs=partial(input_issues, remarks=remarks),
    )
    from mppo.planning.checkpoint_space import disk_warning, free_bytes
    from mppo.planning.run_plan import plan_roles

    found = {role.name: read_config(role.path) for role in recipe.roles()}
    plans = plan_roles(recipe, world_size, found)
    steps, free = recipe.trainer.total_training_steps, free_bytes(recipe.trainer.run_dir)
    if warning := disk_warning(recipe, plans, steps, free):
        remarks.append(f"warning: {warning}")
    for remark in remarks:
        exit_report.say(remark)
    print(f"preflight: recipe {config} fits {world_size} ranks", flush=True)


def _node_suffix() -> str:
    """Slurm's name of the node in parentheses, if it differs from the host name."""
    name = os.environ.get("SLURMD_NODENAME", "")
    return f" ({name})" if name and name != socket.gethostname() else ""


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
