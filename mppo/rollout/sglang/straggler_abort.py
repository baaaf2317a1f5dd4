"""Abort the slowest requests once enough prompts are answered."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from mppo.rollout.sglang.api import SGLangApi
from mppo.rollout.sglang.http_client import ServerLost

_POLL_S = 0.05


class StragglerAbort:
    """Counts answered prompts over all ranks, and aborts running requests once there are enough.

    Args:
        num_prompts_needed: enough prompts with all their samples; None: nothing is aborted early.
        n: samples per prompt.
        name: of this count in the store, the same on every rank and used only once.

    Attributes:
        reached: set once running requests should be aborted.
    """

    def __init__(self, num_prompts_needed: int | None, n: int, name: str) -> None:
        self._needed, self._n, self._name = num_prompts_needed, n, f"mppo/answered/{name}"
        self._samples: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._store: Any = None
        if num_prompts_needed is not None and dist.is_initialized() and dist.get_world_size() > 1:
            self._store = distributed_c10d._get_default_store()
        self._complete_here = 0
        self.reached = threading.Event()

    def answered(self, indices: Sequence[int]) -> None:
        """Count finished responses, given as ``prompt * n + sample``; safe in any thread."""
        if self._needed is None:
            return
        with self._lock:
            self._samples.update(index // self._n for index in indices)
            prompts = {index // self._n for index in indices}
            complete = [prompt for prompt in prompts if self._samples[prompt] == self._n]
            self._complete_here += len(complete)
        self._add(len(complete))

    def abort(self) -> None:
        """Abort this rank's running requests; safe in any thread."""
        self.reached.set()

    def _add(self, complete: int) -> None:
        """Add complete prompts to the count of all ranks, and compare it with the need."""
        if self._needed is None:
            return
        # the store's atomic counter needs no collective call: ranks finish at different times
        here = self._complete_here
        total = here if self._store is None else self._store.add(self._name, complete)
        if total >= self._needed:
            self.reached.set()

    @contextmanager
    def watching(self, apis: Callable[[], Mapping[int, SGLangApi]]) -> Iterator[None]:
        """Abort running requests of this rank's servers as soon as ``reached`` is set.

        Args:
            apis: returns clients to the servers that are not lost.
        """
        over = threading.Event()

        def watch() -> None:
            # repeatedly: a request may reach a server just after the server aborted all others
            while not over.wait(_POLL_S):
                self._add(0)  # other ranks may have completed prompts
                for api in apis().values() if self.reached.is_set() else ():
                    try:
                        api.abort_all()
                    except ServerLost:
                        continue  # the request to that server fails too, and is handled there

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()

    def close(self) -> None:
        """Remove the count from the store, after the last rank has read it."""
        if self._store is not None and dist.get_rank() == 0:
            self._store.delete_key(self._name)
