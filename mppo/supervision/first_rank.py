"""What the first rank looks at or does for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from mppo.config.errors import ConfigError
from mppo.parallel.collectives import broadcast_object


def on_first_rank(action: Callable[[], Any]) -> Any:
    """What ``action`` returns on the first rank, on every rank. Collective.

    Raises:
        ConfigError: on every rank, where the first raises it.
    """
    result, issues, source = None, (), ""
    if dist.get_rank() == 0:
        try:
            result = action()
        except ConfigError as error:
            issues, source = error.issues, error.source
    result, issues, source = broadcast_object((result, issues, source))
    if issues:
        raise ConfigError(issues, source)
    return result
