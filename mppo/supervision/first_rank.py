"""What the first rank looks at or does for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from mppo.config.errors import ConfigError


def on_first_rank(action: Callable[[], Any]) -> Any:
    """What ``action`` returns on the first rank, on every rank. Collective.

    Raises:
        ConfigError: on every rank, where the first raises it.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except ConfigError as error:
            outcome[1] = (error.issues, error.source)
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise ConfigError(*outcome[1])
    return outcome[0]
