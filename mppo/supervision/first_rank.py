"""Running an action on the first rank alone, with its result on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

from mppo.parallel.collectives import broadcast_object
from mppo.recipe.errors import ConfigError, ConfigIssue

T = TypeVar("T")


def on_first_rank(action: Callable[[], T]) -> T:
    """The result of ``action`` on the first rank, or its ConfigError, on every rank. Collective."""
    result: T | None = None
    issues: tuple[ConfigIssue, ...] = ()
    source = ""
    if dist.get_rank() == 0:
        try:
            result = action()
        except ConfigError as error:
            issues, source = error.issues, error.source
    result, issues, source = broadcast_object((result, issues, source))
    if issues:
        raise ConfigError(issues, source)
    return cast(T, result)
