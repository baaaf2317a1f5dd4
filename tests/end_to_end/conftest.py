"""Fixtures of the end-to-end tests."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_server import ADDRESS, start_importing
from sglang_case import Case, synced_case

SERVED = {
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "qwen2_moe", "qwen3_moe",
    "deepseek_v2", "glm4", "glm4_moe", "llama_reward", "opt",
}  # fmt: skip
"""Modules of ``sglang.srt.models`` with the models that tests serve."""


@pytest.fixture(scope="module", autouse=True)
def _fewer_models_in_servers() -> Iterator[None]:
    """SGLang servers import the models of these tests only; each process would import 250."""
    spec = importlib.util.find_spec("sglang")
    modules = [] if spec is None else Path(spec.origin).parent.glob("srt/models/*.py")
    others = {module.stem for module in modules} - SERVED
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_DISABLED_MODEL_ARCHS", ",".join(sorted(others)))
        yield


@pytest.fixture(scope="module")
def forks_servers() -> Iterator[None]:
    """``forked_server`` starts servers in the tests that use this fixture."""
    workers = "PYTEST_XDIST_WORKER" in os.environ  # processes of one test run with one parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ADDRESS, start_importing(os.getppid() if workers else os.getpid()))
        yield


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory) -> Iterator[Case]:
    """An SGLang server of a small Qwen2 model with synchronised weights."""
    yield from synced_case(tmp_path_factory.mktemp("qwen2"))
