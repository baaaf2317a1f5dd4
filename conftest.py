"""Settings of all tests: one thread per process, no network, a separate cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import transformers  # noqa: F401  (its log takes the stderr of its first import, which a test may replace)

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Embedded models are written to a folder of this test run, in child processes too."""
    before = os.environ.get("MPPO_CACHE")
    os.environ["MPPO_CACHE"] = str(tmp_path_factory.mktemp("mppo_cache"))
    yield
    if before is None:
        del os.environ["MPPO_CACHE"]
    else:
        os.environ["MPPO_CACHE"] = before


@pytest.fixture(scope="module", autouse=True)
def _environment_is_restored():
    """A test file gets the variables of the tests' start: Megatron and our programs set some."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


LONGEST = ("test_simulation_recipes", "test_schedules", "test_sglang_actor", "test_sglang_families")
"""Files that take minutes. They run first: a long file at the end would run alone, while the other
processes of ``pytest -n`` have nothing left to do."""


def pytest_collection_modifyitems(items):
    """The longest files come first; tests below tests/distributed carry the marker of that name."""
    items.sort(key=lambda item: item.path.stem not in LONGEST)  # a stable sort
    for item in items:
        if "distributed" in Path(item.path).parts:
            item.add_marker(pytest.mark.distributed)
