"""Server-sent events."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

DONE = "data: [DONE]\n\n"
"""The last event of OpenAI's streams."""


def data_events(contents: Iterable[Mapping[str, Any]]) -> str:
    """Events without a name."""
    return "".join(f"data: {json.dumps(content)}\n\n" for content in contents)


def named_events(contents: Iterable[Mapping[str, Any]]) -> str:
    """Events named by the ``type`` of their content."""
    return "".join(
        f"event: {content['type']}\ndata: {json.dumps(content)}\n\n" for content in contents
    )
