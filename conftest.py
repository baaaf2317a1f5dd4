"""Settings of all tests: one thread per process, no network, a separate cache."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from pathlib import Path

import pytest
import transformers  # noqa: F401  (its log takes the stderr of its first import, which a test may replace)

from mppo.supervision import phase

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

with suppress(ModuleNotFoundError):  # the checks on a GPU do not need it
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("unhurried")


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


@pytest.fixture(autouse=True)
def _no_earlier_failure():
    """A test starts in no phase: the process remembers the one in which an earlier test failed."""
    phase.begin()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collections of garbage visit neither the modules and tests that are imported here, all of
    which stay, nor, while they are imported, those before."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


LONGEST = (
    "test_simulation_recipes", "test_slurm", "test_schedules", "test_faults", "test_benchmarks",
    "test_sglang_actor", "test_pages", "test_endpoint_trees", "test_sglang_families",
    "test_attacks", "test_simulation_together",
)  # fmt: skip
"""Files that take minutes, in the order in which they begin, before all others: a long file at the
end would run alone, while the other processes of ``pytest -n`` have nothing left to do. Those that
compute alternate with those that wait for servers, launchers and time limits."""


def pytest_collection_modifyitems(items):
    """The longest files come first; tests below tests/distributed carry the marker of that name."""
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))  # a stable sort
    for item in items:
        if "distributed" in Path(item.path).parts:
            item.add_marker(pytest.mark.distributed)
