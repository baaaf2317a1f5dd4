"""The versions of packages with which mppo starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mppo.parallel.node import PACKAGES, check_versions, installed_version

ROOT = Path(__file__).parents[2]


def test_the_tested_versions_pass_in_silence():
    assert check_versions({name: package.tested for name, package in PACKAGES.items()}) == ""


def test_this_environment_has_the_tested_versions():
    """Otherwise the tests would not show what the table says."""
    for name, package in PACKAGES.items():
        found = installed_version(name).partition("+")[0]
        assert found in (package.tested, ""), name


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({"megatron-core": "0.19.2"}, r"megatron-core 0\.19\.2 \(needs >=0\.16\.1,<0\.17\)"),
        ({"torch": "2.5.1+cu124"}, r"torch 2\.5\.1\+cu124 \(needs >=2\.6\)"),
        ({"transformer-engine": "2.14.0"}, r"transformer-engine 2\.14\.0"),
    ],
)
def test_versions_that_do_not_work_are_named(installed, message):
    with pytest.raises(ValueError, match=message):
        check_versions(installed)


def test_other_versions_are_told():
    remark = check_versions({"torch": "2.12.0+cu130", "transformers": "5.12.1", "sglang": ""})
    assert remark == "not the tested versions: torch 2.12.0+cu130 (tested: 2.13.0)"
    assert check_versions({"torch": "2.13.0+cu130"}) == ""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is new in Python 3.11")
def test_the_extras_install_the_tested_versions():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tested = {name: package.tested for name, package in PACKAGES.items()}
    for extra, names in (
        ("gpu", ("torch", "megatron-core", "transformers", "sglang")),
        ("cpu", ("torch", "megatron-core", "transformers")),
    ):
        assert project["optional-dependencies"][extra] == [f"{n}=={tested[n]}" for n in names]
    (te,) = project["optional-dependencies"]["te"]
    assert te == f"transformer-engine[pytorch]{PACKAGES['transformer-engine'].works}"
    bounds = dict(
        (text.split(">=")[0], text[len(text.split(">=")[0]) :])
        for text in project["dependencies"]
        if ">=" in text
    )
    for name in ("torch", "megatron-core", "transformers"):
        assert bounds[name] == PACKAGES[name].works
