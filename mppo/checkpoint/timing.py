"""When to save: every n steps, every t minutes, before a known end, when asked to stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mppo.config.sections.trainer import TrainerConfig

_MARGIN_S = 30.0
_GRACE_S = 10.0
"""Of the time after a signal, what is needed besides the save."""
_BYTES_PER_S = 100e6
"""A slow disk's, counted on until a save has been measured."""


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
        checkpoint_bytes: of a checkpoint, about.
    """

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
        """A PPO step ended now; the time since the one before counts as its length."""
        now = self.now()
        self.longest_step_s = max(self.longest_step_s, now - self._last_step)
        self._last_step = now

    def saved(self) -> None:
        """A save began now."""
        self._last_save = self.now()

    @property
    def expected_save_s(self) -> float:
        """How long a save takes: the longest so far, before the first by its bytes."""
        return self.longest_save_s or self.checkpoint_bytes / _BYTES_PER_S

    def what_stopping_takes(self, done: int, patience_s: float) -> str:
        """For the user, at the moment the run is asked to stop.

        Args:
            done: the last PPO step that is done.
            patience_s: seconds until the launcher kills the processes.
        """
        if not self.trainer.save_on_signal:
            return "stopping without a checkpoint (trainer.save_on_signal=false)"
        if not done:
            return "stopping: unless the first step ends in time, there is nothing to save"
        seconds = math.ceil(self.expected_save_s)
        why = f"{self.checkpoint_bytes / 1e9:.1f} GB, none measured yet"
        if self.longest_save_s:
            why = "as long as the longest so far"
        line = f"stopping: saving a checkpoint may take {seconds} s ({why})"
        if self.expected_save_s + _GRACE_S < patience_s:
            return line
        return (
            f"{line}, and this job may be killed {patience_s:.0f} s after its signal; the newest "
            "complete checkpoint then stays. To give it time, start torchrun with "
            f"--shutdown-timeout {max(300, 3 * seconds)} (under Slurm, KillWait counts)"
        )

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
        needed = self.longest_step_s + 1.5 * self.expected_save_s + _MARGIN_S
        return self.now() - self._began + needed > parse_duration(limit)
