"""Diagnosing a job from the heartbeats of its ranks: a silent rank, a lost one, a hang.

Times are those of a clock that does not count the time during which its process is stopped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_LARGEST_GAP = 3
"""Ticks; after a longer gap between two ticks this process was stopped in between."""


class AwakeClock:
    """A clock that pauses while this process is stopped (SIGSTOP); else ``now`` is called every
    ``tick_s``. A continued process would mistake its own pause for the others' silence."""

    def __init__(self, tick_s: float) -> None:
        self._gap_s = _LARGEST_GAP * tick_s
        self._lock = threading.Lock()
        self._seconds, self._last = 0.0, time.monotonic()

    def now(self) -> float:
        with self._lock:
            now = time.monotonic()
            self._seconds += min(now - self._last, self._gap_s)
            self._last = now
            return self._seconds


@dataclass(frozen=True)
class Beat:
    """One heartbeat of a rank: its number, ``phase.progress``, and the last completed PPO step."""

    number: int
    progress: int
    phase: str
    last_step: int
    host: str
    pid: int


@dataclass
class HealthMonitor:
    """Diagnoses the job from the newest heartbeat of each rank: one without a new heartbeat for
    ``silence_s`` is dead; without progress of any rank for ``hang_s`` the job hangs."""

    world_size: int
    silence_s: float
    hang_s: float
    _newest: dict[int, Beat] = field(default_factory=dict)
    _received_at: dict[int, float] = field(default_factory=dict)
    _progress_at: float | None = None

    def update(self, beats: Mapping[int, Beat], now: float) -> None:
        """Store the newest heartbeat of each rank; one that has not started yet is absent."""
        for rank, beat in beats.items():
            before = self._newest.get(rank)
            if before is None or before.number != beat.number:
                self._received_at[rank] = now
            if before is None or before.progress != beat.progress or self._progress_at is None:
                self._progress_at = now
            self._newest[rank] = beat

    def diagnose(self, now: float) -> str | None:
        """Return why the job must end at ``now`` seconds; None if it is healthy."""
        for rank in sorted(self._received_at):
            silence = now - self._received_at[rank]
            if silence > self.silence_s:
                return self.silent(rank, silence)
        if self._progress_at is not None and now - self._progress_at > self.hang_s:
            return self._hang(now - self._progress_at)
        return None

    def silent(self, rank: int, seconds: float) -> str:
        return f"no heartbeat for {seconds:.0f} s from {self._describe(rank)}"

    def lost(self, rank: int) -> str:
        return f"lost the connection to {self._describe(rank)}"

    def _describe(self, rank: int) -> str:
        if rank not in self._newest:
            return f"rank {rank} of {self.world_size}"
        beat = self._newest[rank]
        # steps may be shorter than the interval between beats: take the latest of all ranks
        last_step = max(other.last_step for other in self._newest.values())
        return (
            f"rank {rank} of {self.world_size} (pid {beat.pid} on {beat.host}), which was in: "
            f"{beat.phase}; last completed step: {last_step}"
        )

    def _hang(self, seconds: float) -> str:
        ranks_by_state: dict[str, list[int]] = {}
        for rank, beat in sorted(self._newest.items()):
            state = f"{beat.phase}; last completed step: {beat.last_step}"
            ranks_by_state.setdefault(state, []).append(rank)
        lines = "\n".join(f"  rank {_ranges(r)}: {state}" for state, r in ranks_by_state.items())
        return f"no rank has made progress for {seconds:.0f} s:\n{lines}"


def _ranges(ranks: Sequence[int]) -> str:
    """Format ascending ranks: ``0-3,7`` for 0, 1, 2, 3, 7."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else f"{p[0]}" for p in parts)
