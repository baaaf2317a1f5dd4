"""When to save: every n steps, every t minutes, before a deadline, on a stop request."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mppo.recipe.sections.trainer import TrainerConfig

_MARGIN_S = 30.0
_GRACE_S = 10.0
"""Seconds that stopping takes besides the save."""
_BYTES_PER_S = 100e6
"""Assumed rate of a slow disk, until a save has been measured."""


def parse_duration(text: str) -> float:
    """Seconds in ``[DD:]HH:MM:SS``."""
    parts = [int(part) for part in text.split(":")]
    days, hours, minutes, seconds = [0] * (4 - len(parts)) + parts
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds


@dataclass
class SaveTiming:
    """Durations of steps and saves, and the decisions that depend on them. Every rank has one; the
    first rank's decides. ``now`` returns seconds of a monotonic clock."""

    trainer: TrainerConfig
    now: Callable[[], float] = time.monotonic
    checkpoint_bytes: float = 0.0
    longest_step_s: float = 0.0
    longest_save_s: float = 0.0
    _began: float = field(init=False)
    _last_save: float = field(init=False)
    _last_step: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self._last_save = self._last_step = self.now()

    def step_done(self) -> None:
        now = self.now()
        self.longest_step_s = max(self.longest_step_s, now - self._last_step)
        self._last_step = now

    def saved(self) -> None:
        self._last_save = self.now()

    @property
    def expected_save_s(self) -> float:
        """Expected seconds of a save: the longest so far, or an estimate by its bytes."""
        return self.longest_save_s or self.checkpoint_bytes / _BYTES_PER_S

    def describe_stopping(self, done: int, patience_s: float) -> str:
        """The line that tells the user how long stopping takes, after ``done`` steps and
        ``patience_s`` seconds before the launcher kills the processes."""
        if not self.trainer.save_on_signal:
            return "stopping without a checkpoint (trainer.save_on_signal=false)"
        if not done:
            return "stopping: there is nothing to save unless the first step ends in time"
        seconds = math.ceil(self.expected_save_s)
        why = f"estimated for {self.checkpoint_bytes / 1e9:.1f} GB, no save measured yet"
        if self.longest_save_s:
            why = "the longest save so far"
        line = f"stopping: saving a checkpoint may take {seconds} s ({why})"
        if self.expected_save_s + _GRACE_S < patience_s:
            return line
        return (
            f"{line}, but this job may be killed {patience_s:.0f} s after its signal; the newest "
            "complete checkpoint then remains. To allow more time, start torchrun with "
            f"--shutdown-timeout {max(300, 3 * seconds)} (under Slurm, raise KillWait)"
        )

    def is_due_by_step(self, step: int, last: bool) -> bool:
        """Whether ``save_freq`` schedules a save after this step. The last step is saved if saves
        are scheduled by steps or by minutes."""
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
        needed = self.longest_step_s + 1.5 * self.expected_save_s + _MARGIN_S
        return self.now() - self._began + needed > parse_duration(limit)
