"""How many prompts have all their samples, counted over all ranks without a collective call."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from mppo.rollout.engine import GenerationRequest

_NUMBERS = count(1)
"""Each count has a key of its own in the store, the same on every rank."""


class AnsweredPrompts:
    """Counts the prompts of a request that may be in its result; all methods from any thread.

    With ``num_prompts_needed`` None nothing is counted. The constructor is collective: all ranks
    make the same counts in the same order.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self._needed, self._n = request.num_prompts_needed, request.sampling.n
        self._places, self._name = request.choice * self._n, f"mppo/answered/{next(_NUMBERS)}"
        self._counted: set[int] = set()
        self._samples: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._complete_here = 0
        self._store: Any = None
        if self._needed is not None and dist.is_initialized() and dist.get_world_size() > 1:
            self._store = distributed_c10d._get_default_store()

    def add(self, places: Sequence[int]) -> None:
        """Count finished responses, given as ``prompt * n + sample``, each once."""
        if self._needed is None:
            return
        with self._lock:
            new = {place for place in places if place < self._places} - self._counted
            self._counted |= new
            prompts = [place // self._n for place in new]
            self._samples.update(prompts)
            complete = sum(self._samples[prompt] == self._n for prompt in set(prompts))
            self._complete_here += complete
        if self._store is not None:
            # the store's atomic counter needs no collective call: ranks finish at different times
            self._store.add(self._name, complete)

    def give_up(self) -> None:
        """Let no rank wait any longer for prompts of this one."""
        if self._store is not None and self._needed is not None:
            self._store.add(self._name, self._needed)

    @property
    def are_enough(self) -> bool:
        """Whether the result is complete, on all ranks together."""
        if self._needed is None:
            return False
        here = self._complete_here
        total = here if self._store is None else self._store.add(self._name, 0)
        return total >= self._needed

    def close(self) -> None:
        """Remove the count from the store, after the last rank has read it."""
        if self._store is not None and dist.get_rank() == 0:
            self._store.delete_key(self._name)
