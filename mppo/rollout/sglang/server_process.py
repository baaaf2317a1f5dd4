"""A server process that this rank starts, monitors, stops and restarts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from mppo.parallel import node
from mppo.parallel.addresses import free_port
from mppo.safety.temporary import SHARED_MEMORY, note
from mppo.supervision.phase import tick

_POLL_S = 0.1
_TAIL_LINES = 25
_STARTS = 3
"""Most starts of a server that is killed while it starts."""

_EXITED = re.compile(r"mppo: .* ended with code \d+")
"""Last line in the log of a server that ended by itself; written by its guard."""
_BAD_OPTION = re.compile(r"\S.*?: error: (.*)")
"""The line that argparse prints for options it does not accept."""


class ServerError(RuntimeError):
    """A server did not start, or has ended."""


def _descendants(pid: int) -> list[int]:
    with suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


def _mapped(pid: int) -> set[Path]:
    """Files in shared memory that a process has mapped; empty if this user may not see them."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        paths = {Path(line.split(maxsplit=5)[5]) for line in lines if f" {SHARED_MEMORY}/" in line}
        return {path for path in paths if path.exists()}
    return set()


class ServerProcess:
    """One server under a guard, in its own process group; the guard kills the group when this
    process ends for any reason. ``command`` and ``is_up`` take the server's port."""

    def __init__(
        self,
        name: str,
        command: Callable[[int], Sequence[str]],
        environment: Mapping[str, str],
        log: Path,
        is_up: Callable[[int], bool],
        start_timeout_s: float,
    ) -> None:
        self.name, self.log = name, log
        self.port = 0
        self.command, self.environment, self._is_up = command, environment, is_up
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen | None = None

    @property
    def pid(self) -> int:
        """Process id of the guard, whose child is the server."""
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self) -> None:
        assert self._process is None, "already started"
        self.port = free_port()
        guard = [sys.executable, "-m", "mppo.supervision.server_guard", str(os.getpid())]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output, node.unbound_cores():
            self._process = subprocess.Popen(
                [*guard, *self.command(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(self.environment),
                start_new_session=True,
            )

    def write_log(self, line: str) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as log:
            log.write(f"mppo: {line}\n")

    def wait_until_up(self) -> None:
        """Wait until the server answers; restart it if it is killed meanwhile. ServerError with its
        last output if it ended, or did not answer within ``start_timeout_s``."""
        starts, deadline = 1, time.monotonic() + self._start_timeout_s
        print(f"mppo: waiting for {self.name} (its output: {self.log})", flush=True)
        while not self._is_up(self.port):
            # one look at ``alive`` per round: the process may end between two looks
            if self.alive:
                if time.monotonic() > deadline:
                    self.stop()
                    raise ServerError(
                        f"{self.name} did not answer within {self._start_timeout_s:.0f} s "
                        f"(rollout.start_timeout_s){self.last_output()}"
                    )
            elif starts < _STARTS and self._was_killed():
                print(f"mppo: {self.name} was killed while starting; restarting it", flush=True)
                self.stop()
                self.start()
                starts, deadline = starts + 1, time.monotonic() + self._start_timeout_s
            else:
                refused = self._refused_options()
                why = f"{refused} (rollout.server_args)" if refused else self.last_output()
                raise ServerError(f"{self.name} ended while starting{why}")
            tick()  # the wait has its own limit
            time.sleep(_POLL_S)
        assert self._process is not None
        # a killed server leaves its shared memory behind
        for process in (self._process.pid, *_descendants(self._process.pid)):
            for path in _mapped(process):
                note(path)

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _logged(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines() if self.log.exists() else []

    def _was_killed(self) -> bool:
        """Whether a signal ended the server or its guard, so that a restart may succeed."""
        lines = self._logged()
        return not (lines and _EXITED.fullmatch(lines[-1]))

    def _refused_options(self) -> str:
        """The server's message about options it does not accept, without the list of options."""
        said = [match[1] for line in self._logged() if (match := _BAD_OPTION.match(line))]
        return f": {said[-1]}" if said else ""

    def last_output(self) -> str:
        """The end of the log, for error messages."""
        tail = "\n  ".join(self._logged()[-_TAIL_LINES:])
        return f"; the end of {self.log}:\n  {tail}" if tail else f"; {self.log} is empty"

    def stop(self) -> None:
        """Kill the process group and reap the guard. Idempotent."""
        if self._process is None:
            return
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
