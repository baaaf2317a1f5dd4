"""Versions of the packages on whose internals mppo depends."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from mppo.safety.input_error import InputError


@dataclass(frozen=True)
class Package:
    """A package's versions: the one that the tests run with (empty: they do not run it), and those
    with which mppo starts; others lack modules or fields that it uses."""

    tested: str
    works: str


PACKAGES = {
    "torch": Package("2.13.0", ">=2.6"),
    "megatron-core": Package("0.16.1", ">=0.16.1,<0.17"),
    "transformers": Package("5.12.1", ">=5.0"),
    "sglang": Package("0.5.21", ">=0.5.21,<0.6"),
    "transformer-engine": Package("", ">=2.9,<2.12"),
}
"""By name on PyPI; pyproject.toml has the same versions."""


def installed_version(package: str) -> str:
    """Version of an installed package; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def check_versions(installed: dict[str, str] | None = None) -> str:
    """Check that mppo works with the installed packages (name and version; None: this
    environment's). Returns one line on packages of other versions than the tested ones, or an empty
    one. InputError: mppo does not work with a version."""
    if installed is None:
        installed = {name: installed_version(name) for name in PACKAGES}
    found = {name: text for name, text in installed.items() if text}
    unfit = [
        f"{name} {text} (needs {PACKAGES[name].works})"
        for name, text in found.items()
        if not _fits(PACKAGES[name].works, text)
    ]
    if unfit:
        raise InputError(
            f"mppo does not work with {', '.join(unfit)}: "
            'install the tested versions with pip install -e ".[gpu]", or ".[cpu]" without a GPU'
        )
    others = [
        f"{name} {text} (tested: {PACKAGES[name].tested})"
        for name, text in found.items()
        if PACKAGES[name].tested and not _fits(f"=={PACKAGES[name].tested}", text)
    ]
    return f"not the tested versions: {', '.join(others)}" if others else ""


def _fits(wanted: str, text: str) -> bool:
    try:
        return SpecifierSet(wanted).contains(text, prereleases=True)
    except InvalidVersion:  # a vendor's own numbering
        return True
