"""What a wheel and a source archive contain, extras, constraints and Dockerfiles."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]  # a build changes the arguments
build_meta.build_wheel(folder)
build_meta.build_sdist(folder)
"""
DATA = ("recipes/", "slurm/", "CHANGELOG.md", "constraints.txt", "docs/recipe.schema.json")
"""Files of the repository, and folders, that a wheel brings under share/mppo."""
PROJECT = (ROOT / "pyproject.toml").read_text()


def repository_files() -> list[str]:
    """The files of the repository that git does not ignore; without git, those of the folders."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        pytest.skip("needs a clone: git says which files belong to the repository")
    return [name for name in found.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with a wheel and a source archive, built without network from a copy."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("built")
    for name in repository_files():
        if not name.startswith(("tests/", "benchmarks/", "extras/")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    command = [sys.executable, "-c", BUILD, str(out)]
    result = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return out


def test_a_wheel_has_every_module_recipe_and_script(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    files = repository_files()
    modules = {name for name in files if name.startswith(("mppo/", "checkpoints_convert/"))}
    assert modules - names == set()
    (data,) = {name.partition("/")[0] for name in names if ".data/" in name}
    shared = {name.partition("/data/share/mppo/")[2] for name in names if "/data/share/" in name}
    expected = {name for name in files if name.startswith(DATA)}
    assert shared == {name.removeprefix("docs/") for name in expected}
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if ".dist-info" not in top} == {"mppo", "checkpoints_convert", data}


def test_a_source_archive_makes_the_same_wheel(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as content:
        names = {name.partition("/")[2] for name in content.getnames()}
    wanted = [name for name in repository_files() if name.startswith((*DATA, "mppo/"))]
    assert set(wanted) - names == set()
    assert {"pyproject.toml", "README.md", "LICENSE"} <= names


def extras() -> dict[str, list[str]]:
    """The extras of pyproject.toml with their requirements, where they stand on one line."""
    found = re.findall(r"^([\w-]+) = \[(.*)\]$", PROJECT, re.MULTILINE)
    return {name: re.findall(r'"([^"]+)"', text) for name, text in found}


def test_the_extras_of_a_user_exist():
    assert {"cpu", "gpu", "plan", "agents", "rewards", "trackers"} <= extras().keys()
    (trackers,) = extras()["trackers"]
    assert Requirement(trackers).extras == {"tensorboard", "wandb", "mlflow", "swanlab"}
    assert "openai" in {Requirement(each).name for each in extras()["agents"]}


def constraints() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {r.name: r for r in (Requirement(line) for line in lines if line[0] != "#")}


def assert_pinned(requirement: Requirement) -> None:
    """The constraints have a version that the requirement allows."""
    (version,) = constraints()[canonicalize_name(requirement.name)].specifier
    assert requirement.specifier.contains(version.version), requirement


def test_the_constraints_agree_with_the_pins():
    pinned = constraints()
    assert list(pinned) == sorted(pinned), "each package once, in order"
    for name in ("cpu", "agents", "rewards", "parquet", "plan", "tensorboard", "wandb"):
        for requirement in map(Requirement, extras()[name]):
            assert_pinned(requirement)


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.gpu"])
def test_a_dockerfile_names_what_exists(name):
    text = (ROOT / name).read_text()
    assert re.search(r"^FROM [\w./:-]+@sha256:[0-9a-f]{64}$", text, re.MULTILINE)
    for path in re.findall(r"/opt/mppo/([\w./]+)", text):
        assert (ROOT / path).exists(), path
    for listed in re.findall(r"/opt/mppo\[([\w,-]+)\]", text):
        assert set(listed.split(",")) <= extras().keys()
    for recipe in re.findall(r"/srv/(recipes/\S+\.yaml)", text):
        assert (ROOT / recipe).is_file(), recipe
    for version in re.findall(r"torch==([\d.]+)", text):
        assert f"torch=={version}" in extras()["cpu"]


def requirements_of(listed: set[str]) -> list[Requirement]:
    """What mppo with some extras asks for, extras of extras included."""
    dependencies = re.findall(r"^dependencies = \[\n(.*?)^\]", PROJECT, re.MULTILINE | re.DOTALL)[0]
    found = list(map(Requirement, re.findall(r'"([^"]+)"', dependencies)))
    for each in (Requirement(text) for name in listed for text in extras()[name]):
        found += requirements_of(each.extras) if each.name == "mppo" else [each]
    return found


def pip_lines(text: str) -> list[list[str]]:
    """The words of each ``pip install`` of a Dockerfile."""
    lines = re.findall(r"\bpip install (.*?)(?:&&|$)", text.replace("\\\n", " "), re.MULTILINE)
    return list(map(shlex.split, lines))


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.gpu"])
def test_what_a_dockerfile_copies_and_installs_resolves(name):
    text = (ROOT / name).read_text()
    (source,) = re.findall(r"^COPY (\S+) /opt/mppo$", text, re.MULTILINE)
    assert (ROOT / source / "pyproject.toml").is_file()
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    paths = {Path(path).parts[0] for path in re.findall(r"/opt/mppo/([\w./]+)", text)}
    assert not paths & set(ignored)
    installs = pip_lines(text)
    assert installs
    for words in installs:
        for word in words:
            if "==" in word:
                assert_pinned(Requirement(word))
            if word.startswith("/opt/mppo/") and word != "/opt/mppo/constraints.txt":
                assert (ROOT / word.removeprefix("/opt/mppo/") / "pyproject.toml").is_file()
            if "-c" in words and (found := re.fullmatch(r"/opt/mppo\[(.*)\]", word)):
                for requirement in requirements_of(set(found[1].split(","))):
                    assert_pinned(requirement)
    assert any("/opt/mppo[" in word for words in installs for word in words)
    python = re.search(r"python:?(3\.\d+)", text)
    supported = re.findall(r'requires-python = "(.*)"', PROJECT)[0]
    assert python
    assert SpecifierSet(supported).contains(f"{python[1]}.0")
