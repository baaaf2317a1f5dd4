"""The commands of the batch scripts, recorded by scripts in place of Slurm's programs."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHOWN = """#!/bin/bash
echo "$(basename "$0") $*" >> {log}
"""
SCONTROL = """#!/bin/bash
case "$*" in
  *hostnames*) echo n1 ;;
  *) echo NodeAddr=127.0.0.1 ;;
esac
"""
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_GPUS_ON_NODE": "2"}


def started(tmp_path: Path, script: str, **environ: str) -> tuple[str, list[str]]:
    """Output of lines of shell after ``mppo_setup``, and the programs they started."""
    log, programs = tmp_path / "log", tmp_path / "bin"
    programs.mkdir()
    log.touch()
    texts = {"srun": SHOWN, "apptainer": SHOWN, "python": SHOWN, "scontrol": SCONTROL}
    for name, text in texts.items():
        (programs / name).write_text(text.format(log=log))
        (programs / name).chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if "SLURM" not in name}
    result = subprocess.run(
        ["bash", "-uc", f"source slurm/common.sh; mppo_setup; {script}"],
        capture_output=True, text=True, timeout=300, cwd=ROOT,
        env={
            **clean, **JOB, "MPPO_ROOT": str(ROOT), "MPPO_PYTHON": str(programs / "python"),
            "PATH": f"{programs}:{os.environ['PATH']}", **environ,
        },
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr, log.read_text().splitlines()


@pytest.mark.parametrize(
    ("container", "inside"),
    [
        ("registry#mppo:1", "--container-image=registry#mppo:1 "),
        ("/images/mppo.sif", " /images/mppo.sif "),
    ],
)
def test_every_check_of_the_preflight_runs_in_the_container(container, inside, tmp_path):
    _, lines = started(tmp_path, "mppo_preflight x.yaml", MPPO_CONTAINER=container)
    checks = ("recipe", "collect", "judge", "allreduce")
    for check in checks:
        (line,) = [line for line in lines if re.search(rf"preflight {check}|{check}\.py", line)]
        assert inside in line, line
    assert not [line for line in lines if line.startswith("python ")], "nothing on the bare host"


def test_without_a_container_the_recipe_is_checked_before_the_nodes(tmp_path):
    _, lines = started(tmp_path, "mppo_preflight x.yaml")
    assert lines[0].startswith("python -m mppo.preflight recipe --world-size 2 --config x.yaml")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"SLURM_CPUS_ON_NODE": "16", "SLURM_MEM_PER_NODE": "64000"}, "2 GPUs, memory: 64000 MB"),
        ({"SLURM_CPUS_ON_NODE": "4", "SLURM_MEM_PER_CPU": "1000"}, "memory: 4000 MB"),
        ({"SLURM_CPUS_ON_NODE": "16"}, "memory: all or the partition's default"),
        ({"SLURM_CPUS_ON_NODE": "1"}, "add --cpus-per-task=16 to sbatch"),
    ],
)
def test_a_job_logs_the_resources_of_its_node(given, told, tmp_path):
    text, _ = started(tmp_path, "mppo_resources", **given)
    assert told in text
    assert ("will wait" in text) == (given["SLURM_CPUS_ON_NODE"] == "1")


def test_every_training_command_in_the_docs_requests_gpus():
    for page in (ROOT / "docs" / "slurm.md", ROOT / "slurm" / "ppo.sbatch"):
        text = re.sub(r"\\\n[# ]*", "", page.read_text())
        commands = re.findall(r"^[# ]+(sbatch .*slurm/(?:ppo|eval)\.sbatch.*)$", text, re.MULTILINE)
        assert commands, page
        for command in commands:
            assert "--gpus-per-node=" in command, command
            assert "--cpus-per-task=" in command, command
            assert "--mem=" in command, command
