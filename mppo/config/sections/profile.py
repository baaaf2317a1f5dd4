"""The recipe's ``trainer.profile`` section: which steps are profiled, on which ranks."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveInt

from mppo.config.sections.section import Section


class ProfileConfig(Section):
    """Traces of torch's profiler in ``<run>/profile``, and snapshots of GPU memory."""

    steps: tuple[PositiveInt, ...] = ()
    """PPO steps that are profiled. A profiled step is slower."""
    ranks: tuple[NonNegativeInt, ...] = (0,)
    """Ranks that are profiled."""
