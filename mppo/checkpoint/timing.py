"""When to save: every n steps, every t minutes, before a known end, when asked to stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mppo.config.schema import TrainerConfig

_MARGIN_S = 30.0


def parse_duration(text: str) -> float:
    """Seconds in ``[DD:]HH:MM:SS``."""
    parts = [int(part) for part in text.split(":")]
    days, hours, minutes, seconds = [0] * (4 - len(parts)) + parts
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds


@dataclass
class SaveTiming:
    """The clock of one rank's run; the first rank's counts.

    Args:
        trainer: the recipe's section.
        now: seconds, monotonic.
    """

    trainer: TrainerConfig
    now: Callable[[], float] = time.monotonic
    longest_step_s: float = 0.0
    longest_save_s: float = 0.0
    _began: float = field(init=False)
    _last_save: float = field(init=False)
    _last_step: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self._last_save = self._last_step = self.now()

    def step_done(self) -> None:
        """A PPO step ended now; the time since the one before counts as its length."""
        now = self.now()
        self.longest_step_s = max(self.longest_step_s, now - self._last_step)
        self._last_step = now

    def saved(self) -> None:
        """A save began now."""
        self._last_save = self.now()

    def is_due_by_step(self, step: int, last: bool) -> bool:
        """Whether the schedule of steps asks for a save; the last step is saved wherever steps or
        minutes are scheduled."""
        every = self.trainer.save_freq
        scheduled = every > 0 or self.trainer.save_every_minutes is not None
        return (every > 0 and step % every == 0) or (last and scheduled)

    def is_due_by_clock(self) -> bool:
        """Whether ``save_every_minutes`` have passed since the last save."""
        minutes = self.trainer.save_every_minutes
        return minutes is not None and self.now() - self._last_save >= 60 * minutes

    def must_stop(self) -> bool:
        """Whether another step and a save might end after ``checkpoint_must_save_by``."""
        limit = self.trainer.checkpoint_must_save_by
        if limit is None:
            return False
        needed = self.longest_step_s + 1.5 * self.longest_save_s + _MARGIN_S
        return self.now() - self._began + needed > parse_duration(limit)
