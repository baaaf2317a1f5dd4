"""The recipe's ``trainer.timeline`` section: which updates are recorded."""

from __future__ import annotations

from pydantic import PositiveInt

from mppo.config.sections.section import Section


class TimelineConfig(Section):
    """Recording of updates, action by action, in ``<run>/timeline``."""

    steps: tuple[PositiveInt, ...] = ()
    """PPO steps that are recorded. The device is synchronised after each action of these steps."""
