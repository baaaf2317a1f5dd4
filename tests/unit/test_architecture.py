"""The rules of the house: who may import whom, one device seam, short files, scripts that parse."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from mppo.config.schema import Recipe

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mppo"
FILE_LINES, FUNCTION_LINES = 450, 70

PURE = frozenset(
    {
        "mppo.parallel.layout", "mppo.parallel.balance", "mppo.parallel.schedule",
        "mppo.weights.blocks", "mppo.weights.shape", "mppo.weights.table",
        "mppo.weights.model_folder", "mppo.weights.config_file", "mppo.weights.contents",
        "mppo.weights.pickles", "mppo.weights.safetensors_file", "mppo.batch",
    }
)  # fmt: skip
"""Modules in other rooms that know neither process group, device nor engine, as all of ``algos``
and ``config`` do."""

MAY_IMPORT: dict[str, set[str]] = {
    "batch": set(),
    "disk": {"config.input_files"},
    "algos": {"batch"},
    "safety": set(),
    "config": {
        "safety", "parallel.layout", "parallel.balance", "weights.shape", "weights.table",
        "weights.blocks", "weights.model_folder", "weights.contents",
    },
    "data": {"safety", "config", "batch", "weights.model_folder", "weights.config_file"},
    "rewards": {"safety", "config", "batch", "data", "parallel", "models", "weights", "algos"},
    "report": {"safety", "config", "batch", "disk", "parallel.device", "parallel.phase"},
    "parallel": {"safety", "algos", "batch", "config.schema", "config.errors"},
    "weights": {"parallel", "config", "algos", "batch", "disk"},
    "models": {"parallel", "weights", "config", "algos", "batch"},
    "rollout": {"safety", "models", "parallel", "weights", "config", "algos", "batch"},
    "checkpoint": {"models", "parallel", "weights", "config", "algos", "batch", "data", "disk"},
}  # fmt: skip
"""Room to the rooms (or single modules) it may import besides itself; every other module directly
under ``mppo`` is part of the loop's wiring and may import any room."""

FORBIDDEN_IN_PURE = ("torch.distributed", "torch.cuda", "megatron", "transformers", "sglang")
DEVICE_WORDS = re.compile(r"['\"](cuda|nccl|gloo)\b|\btorch\.cuda\.|\.cuda\(")


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(path: Path) -> frozenset[str]:
    """Modules a file imports anywhere, ``from a import b`` as ``a`` and ``a.b``."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write absolute imports"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def python_files() -> list[Path]:
    folders = ("mppo", "checkpoints_convert", "tests", "benchmarks")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def is_allowed(room: str, target: str) -> bool:
    inside = target.removeprefix("mppo.")
    allowed = MAY_IMPORT[room] | {room}
    return any(inside == name or inside.startswith(f"{name}.") for name in allowed)


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_arrows_never_point_back(room):
    wrong = [
        f"{module} imports {target}"
        for module, path in modules().items()
        if room_of(module) == room
        for target in sorted(imports(path) & modules().keys())
        if target.startswith("mppo.") and not is_allowed(room, target)
        and not (target.count(".") == 1 and (PACKAGE / room_of(target)).is_dir())
    ]  # fmt: skip
    assert not wrong, "\n".join(wrong)


def test_every_room_is_in_the_table():
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert rooms <= MAY_IMPORT.keys(), f"say what it may import: {rooms - MAY_IMPORT.keys()}"


def test_nothing_imports_the_entry_point():
    wrong = [m for m, path in modules().items() if "mppo.train" in imports(path)]
    assert not wrong


def test_pure_modules_know_no_process_group_device_or_engine():
    wrong = [
        f"{module} imports {target}"
        for module, path in modules().items()
        if module in PURE or room_of(module) in ("algos", "config")
        for target in imports(path)
        if any(target == f or target.startswith(f"{f}.") for f in FORBIDDEN_IN_PURE)
    ]
    assert not wrong, "\n".join(wrong)


def test_devices_are_named_in_one_room():
    wrong = []
    for module, path in modules().items():
        if room_of(module) == "parallel":
            continue
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if DEVICE_WORDS.search(line):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not wrong, "use mppo.parallel.device:\n" + "\n".join(wrong)


def test_no_module_hides_an_installed_or_standard_package():
    """``torchrun mppo/train.py`` puts mppo/ itself first on sys.path."""
    taken = set(sys.stdlib_module_names) | set(packages_distributions())
    taken |= {"megatron", "sglang", "apex", "transformer_engine", "tensorboard", "wandb", "mpi4py"}
    names = {path.stem for path in PACKAGE.iterdir() if not path.name.startswith("_")}
    assert not names & taken


def test_files_are_short():
    long = [
        f"{path.relative_to(ROOT)}: {lines} lines"
        for path in python_files()
        if (lines := len(path.read_text().splitlines())) > FILE_LINES
    ]
    assert not long, "\n".join(long)


def test_functions_fit_a_screen():
    long = []
    for path in python_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > FUNCTION_LINES:
                    long.append(f"{path.relative_to(ROOT)}: {node.name} has {lines} lines")
    assert not long, "\n".join(long)


def test_no_exception_is_swallowed_unseen():
    """A bare ``except:``, or a handler of everything that only passes."""
    wrong = []
    for path in python_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ExceptHandler):
                continue
            broad = isinstance(node.type, ast.Name) and node.type.id in (
                "Exception", "BaseException",
            )  # fmt: skip
            passes = all(isinstance(statement, ast.Pass) for statement in node.body)
            if node.type is None or (broad and passes):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong, "\n".join(wrong)


def test_tests_fake_nothing():
    wrong = [
        str(path.relative_to(ROOT))
        for path in python_files()
        if any(name.startswith("unittest.mock") or name == "mock" for name in imports(path))
    ]
    assert not wrong


def shell_scripts() -> list[Path]:
    return sorted([*ROOT.glob("slurm/*.sbatch"), *ROOT.glob("slurm/*.sh"), ROOT / ".ci" / "run"])


@pytest.mark.parametrize("path", shell_scripts(), ids=lambda path: path.name)
def test_shell_scripts_parse(path):
    result = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_sglang_cpu_extra_is_the_requirements_file():
    text = (ROOT / "pyproject.toml").read_text()
    extra = re.search(r"^sglang-cpu = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    wanted = (ROOT / "extras" / "sglang_cpu" / "requirements.txt").read_text().split()
    assert re.findall(r'"(.*?)"', extra[1]) == wanted


def test_pypi_apex_is_never_a_dependency():
    """The PyPI package of that name is another project, not NVIDIA Apex."""
    text = (ROOT / "pyproject.toml").read_text() + (ROOT / "Makefile").read_text()
    assert not re.search(r"[\"' ]apex[\"'=<>~ ]", text)


def test_console_scripts_lead_to_functions():
    text = (ROOT / "pyproject.toml").read_text()
    scripts = re.findall(r'^mppo-\w+ = "([\w.]+):(\w+)"$', text, re.MULTILINE)
    assert len(scripts) >= 3
    for module, function in scripts:
        tree = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def keys_of(section: type[BaseModel], path: str = "") -> Iterator[str]:
    """Dotted names of a section's keys, those of its sections included."""
    for name, field in section.model_fields.items():
        kinds = [field.annotation, *get_args(field.annotation)]
        inner = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        if inner:
            yield from keys_of(inner[0], f"{path}{name}.")
        else:
            yield path + name


def test_every_recipe_key_is_read_somewhere():
    declared = {"mppo.config.schema", "mppo.config.algorithm", "mppo.config.verl_names"}
    code = "\n".join(path.read_text() for name, path in modules().items() if name not in declared)
    words = set(re.findall(r"[.\"{](\w+)", code))
    assert [key for key in keys_of(Recipe) if key.rsplit(".", 1)[-1] not in words] == []
