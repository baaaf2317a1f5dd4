"""Rules of the code: import directions, one device seam, short files, scripts that parse."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

import mppo
from mppo.recipe import extras
from mppo.recipe.schema import Recipe

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mppo"
PROJECTS = [ROOT / "pyproject.toml", *sorted(ROOT.glob("extras/*/pyproject.toml"))]
EXTRAS = sorted(path.parent for path in ROOT.glob("extras/*/mppo_*/__init__.py"))
"""Packages beside ``mppo``, which a user installs if a recipe needs them."""
FILE_LINES, FUNCTION_LINES, ROOM_FILES = 600, 70, 17

PURE = frozenset(
    {
        "mppo.parallel.layout", "mppo.parallel.partition",
        "mppo.pipeline.actions", "mppo.pipeline.simulation", "mppo.pipeline.streams",
        "mppo.pipeline.schedule",
        "mppo.pipeline.schedule_checks", "mppo.pipeline.deadlock", "mppo.pipeline.routes",
        "mppo.pipeline.stage_events",
        "mppo.weights.blocks", "mppo.weights.names", "mppo.weights.table_rows",
        "mppo.weights.table",
        "mppo.weights.model_folder", "mppo.weights.hf.config_file",
        "mppo.weights.torch_dist.contents",
        "mppo.weights.torch_dist.pickles", "mppo.weights.hf.safetensors_file",
        "mppo.batch.prompt", "mppo.batch.episode", "mppo.batch.batch", "mppo.batch.outputs",
        "mppo.batch.packing", "mppo.batch.microbatches", "mppo.batch.mini_batch",
        "mppo.batch.head_outputs",
    }
)  # fmt: skip
"""Modules in other rooms that know neither process group, device nor engine, as all of ``algos``
and ``recipe`` do."""

LAYERS = (
    {"safety", "cpu"},
    {"register"},
    {"algos", "parallel"},
    {"recipe"},
    {"batch"},
    {"weights"},
    {"dumps"},
    {"supervision"},
    {"pipeline", "hub"},
    {"data", "models", "report"},
    {"planning", "rewards", "rollout", "checkpoint"},
    {"agents"},
    {"trainer"},
    {"evaluate", "plan", "preflight", "replay", "serve"},
    {"api", "train"},
    {"mppo_migrate", "mppo_reward_server", "mppo_sandbox", "mppo_simulate"},
)
"""Rooms, modules directly under ``mppo``, and the packages of ``extras/``: each imports itself and
those of layers above it."""

FORBIDDEN_IN_PURE = ("torch.distributed", "torch.cuda", "megatron", "transformers", "sglang")
DEVICE_WORDS = re.compile(r"['\"](cuda|nccl|gloo)\b|\btorch\.cuda\.|\.cuda\(")


WAITING_ROOMS = {
    "checkpoint", "data", "recipe", "report", "rewards", "supervision", "trainer", "mppo_migrate",
    "mppo_reward_server", "mppo_sandbox",
}  # fmt: skip
"""Rooms whose exchanges between ranks are control flags and objects."""

TENSOR_COLLECTIVE = re.compile(r"\bdist\.(all_reduce|all_gather|broadcast|reduce|scatter)\(")


@cache
def modules() -> dict[str, Path]:
    """Every module of the packages by dotted name."""
    found = {}
    for package in (PACKAGE, *EXTRAS):
        for path in sorted(package.rglob("*.py")):
            parts = path.relative_to(package.parent).with_suffix("").parts
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
    folders = ("mppo", "checkpoints_convert", "extras", "tests", "benchmarks")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def room_of(module: str) -> str:
    """Of a module of ``mppo``; the package of another module."""
    package, *rest = module.split(".")
    return package if package != "mppo" else rest[0] if rest else ""


def layer_of(room: str) -> int:
    return next(i for i, rooms in enumerate(LAYERS) if room in rooms)


def ours(path: Path) -> set[str]:
    """Modules of the packages that a file imports."""
    return {target for target in imports(path) if target in modules() and target != "mppo"}


def is_package(module: str) -> bool:
    return modules()[module].name == "__init__.py"


@pytest.mark.parametrize("room", sorted(set.union(*LAYERS)))
def test_nothing_imports_upwards(room):
    wrong = [
        f"{module} imports {target}"
        for module, path in modules().items()
        if room_of(module) == room
        for target in sorted(ours(path))
        if not is_package(target)
        and room_of(target) != room
        and layer_of(room_of(target)) >= layer_of(room)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_room_and_module_has_its_layer():
    assert modules().keys() >= PURE
    found = {path.stem for path in PACKAGE.iterdir() if not path.name.startswith(("_", "py."))}
    found |= {path.name for path in EXTRAS}
    assert found == set.union(*LAYERS)


def test_no_two_files_have_one_name():
    names = Counter((module.split(".")[0], path.name) for module, path in modules().items())
    assert {name for (_, name), count in names.items() if count > 1} == {"__init__.py"}


def test_parallel_imports_no_formula_and_no_recipe():
    rooms = {
        room_of(target)
        for module, path in modules().items()
        if room_of(module) == "parallel"
        for target in ours(path)
    }
    assert rooms <= {"parallel", "cpu", "safety"}


def test_the_recipe_imports_no_files_of_runs_and_no_ranks():
    """Of ``parallel`` only the sizes of a layout, which ``megatron`` of a role describes."""
    found = {
        target
        for module, path in modules().items()
        if room_of(module) == "recipe"
        for target in ours(path)
        if room_of(target) not in ("recipe", "safety", "register") and not is_package(target)
    }
    assert found == {"mppo.parallel.layout"}


def test_files_do_not_import_each_other_in_a_circle():
    """Depth-first: a file that is met again on the way from itself closes a circle."""
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " imports ".join((*way[way.index(module) :], module))
        if module in done or is_package(module):
            return
        for target in sorted(ours(modules()[module])):
            visit(target, (*way, module))
        done.add(module)

    for module in modules():
        visit(module, ())


def test_rooms_are_small():
    large = {
        str(folder.relative_to(ROOT)): count
        for package in (PACKAGE, *EXTRAS)
        for folder in (path.parent for path in package.rglob("__init__.py"))
        if (count := len(list(folder.glob("*.py"))) - 1) > ROOM_FILES
    }
    assert not large


def test_nothing_imports_the_entry_point():
    wrong = [m for m, path in modules().items() if "mppo.train" in imports(path)]
    assert not wrong


def test_pure_modules_import_no_process_group_device_or_engine():
    wrong = [
        f"{module} imports {target}"
        for module, path in modules().items()
        if module in PURE or room_of(module) in ("algos", "recipe", "mppo_migrate")
        for target in imports(path)
        if any(target == f or target.startswith(f"{f}.") for f in FORBIDDEN_IN_PURE)
    ]
    assert not wrong, "\n".join(wrong)


def test_devices_are_named_in_one_room():
    wrong = []
    for module, path in modules().items():
        if room_of(module) in ("parallel", "cpu", "mppo_simulate"):
            continue
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if DEVICE_WORDS.search(line):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not wrong, "use mppo.parallel.device:\n" + "\n".join(wrong)


def test_object_collectives_are_called_in_one_module():
    """``mppo.cpu`` lies below that module."""
    calls = re.compile(r"\w+_object(_list|s)?$")
    wrong = [
        f"{module} calls {node.attr}"
        for module, path in modules().items()
        if module != "mppo.parallel.collectives" and room_of(module) != "cpu"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and calls.fullmatch(node.attr)
        and ast.unparse(node.value) in ("dist", "torch.distributed")
    ]
    assert not wrong, "use mppo.parallel.collectives:\n" + "\n".join(wrong)


def test_no_module_hides_an_installed_or_standard_package():
    """``torchrun mppo/train.py`` puts mppo/ itself first on sys.path, until mppo is imported."""
    names = {path.stem for path in PACKAGE.iterdir() if not path.name.startswith(("_", "py."))}
    assert not names & set(sys.stdlib_module_names)
    program = (
        f"import sys; sys.path.insert(0, {str(PACKAGE)!r}); import mppo\n"
        "from importlib.util import find_spec; print(find_spec('agents'))"
    )
    found = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert found.returncode == 0
    assert str(PACKAGE) not in found.stdout


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


def test_no_exception_is_silently_ignored():
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


def test_messages_about_bad_input_are_input_errors():
    """A bare ``ValueError`` in a log is a bug of ours; these modules raise it for a model, an
    isolated child or an SGLang server to read."""
    others = {"agents/tools.py", "agents/hermes.py", "data/chat_template_child.py",
              "rollout/transport/checked_load.py"}  # fmt: skip
    raising = {
        str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("*.py"))
        if "raise ValueError" in path.read_text()
    }
    assert raising == others


def test_tests_use_no_mocks():
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
    expected = (ROOT / "extras" / "sglang_cpu" / "requirements.txt").read_text().split()
    assert re.findall(r'"(.*?)"', extra[1]) == expected


def test_pypi_apex_is_never_a_dependency():
    """The PyPI package of that name is another project, not NVIDIA Apex."""
    text = "".join(path.read_text() for path in (*PROJECTS, ROOT / "Makefile"))
    assert not re.search(r"[\"' ]apex[\"'=<>~ ]", text)


def test_console_scripts_lead_to_functions():
    text = "".join(path.read_text() for path in PROJECTS)
    scripts = re.findall(r'^mppo-[\w-]+ = "([\w.]+):(\w+)"$', text, re.MULTILINE)
    assert len(scripts) >= 3
    for module, function in scripts:
        assert has_function(module, function), f"{module}:{function}"


def has_function(module: str, function: str) -> bool:
    path = modules().get(module, ROOT / f"{module.replace('.', '/')}.py")
    tree = ast.parse(path.read_text())
    return function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_functions_of_extras_are_found_by_the_names_that_mppo_knows():
    known = {
        (found.group, found.name, found.folder)
        for found in vars(extras).values()
        if isinstance(found, extras.ExtraFunction)
    }
    head = re.compile(r'^\[project\.entry-points\."(mppo\.\w+)"\]$', re.MULTILINE)
    named = set()
    for path in PROJECTS[1:]:
        _, *parts = head.split(path.read_text())
        for group, text in zip(parts[::2], parts[1::2]):
            text = text.partition("\n[")[0]
            for name, module, function in re.findall(r'^(\w+) = "([\w.]+):(\w+)"$', text, re.M):
                assert has_function(module, function), f"{module}:{function}"
                named.add((group, name, path.parent.name))
    assert named == known


@pytest.mark.parametrize("package", EXTRAS, ids=lambda path: path.name)
def test_extras_have_the_version_of_mppo(package):
    text = (package.parent / "pyproject.toml").read_text()
    assert f'version = "{mppo.__version__}"\n' in text
    assert f'dependencies = ["mppo=={mppo.__version__}"]\n' in text
    assert f'include = ["{package.name}*"]\n' in text


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
    sections = {name for name in modules() if name.startswith("mppo.recipe.sections.")}
    declared = {"mppo.recipe.schema", "mppo.recipe.other_systems", *sections}
    code = "\n".join(path.read_text() for name, path in modules().items() if name not in declared)
    words = set(re.findall(r"[.\"{](\w+)", code))
    assert [key for key in keys_of(Recipe) if key.rsplit(".", 1)[-1] not in words] == []


SAME_ON_PURPOSE = {"main", "install", "load", "load_in_worker", "train", "EntryClass"}
"""Programs, replacements of Megatron's parts, names that SGLang and the workers look up, and the
API's ``train`` beside the stage of that name."""


def test_one_public_name_means_one_thing():
    places: dict[str, list[str]] = {}
    for module, path in modules().items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module)
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert twice.keys() <= SAME_ON_PURPOSE, twice


def test_contributing_shows_the_layers():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    table = page.partition("| packages | contents |\n|---|---|\n")[2].partition("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines()]
    shown = [set(re.findall(r"`(?:mppo/)?(\w+)(?:\.py)?`", cell)) for cell in cells]
    assert shown == list(LAYERS)


def test_control_exchanges_go_through_the_module_that_keeps_them_off_the_gpu():
    """``mppo.parallel.collectives`` keeps them on the CPU; on CUDA they wait in a kernel."""
    wrong = [
        f"{module}: {match[0]}"
        for module, path in modules().items()
        if room_of(module) in WAITING_ROOMS or module.startswith("mppo.rollout.sglang.")
        for match in TENSOR_COLLECTIVE.finditer(path.read_text())
    ]
    assert not wrong, "\n".join(wrong)
