"""Fixtures of several end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sglang_case import Case, synced_case


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory) -> Iterator[Case]:
    """An SGLang server of a small Qwen2 model with synchronised weights."""
    yield from synced_case(tmp_path_factory.mktemp("qwen2"))
