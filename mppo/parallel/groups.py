"""The process groups of a layout, and switching between the layouts of several roles.

Megatron keeps its groups in module-level globals of ``parallel_state``. ``LayoutGroups`` creates
the groups of one layout, keeps a snapshot of those globals, and restores it while a role is active.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import cast

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from torch import Tensor

from mppo.parallel.layout import Coordinates, Layout
from mppo.parallel.shared_groups import PIPELINE_BACK, PIPELINE_WRAP, PIPELINE_WRAP_BACK


def _snapshot() -> dict[str, object]:
    return {
        name: value
        for name, value in vars(parallel_state).items()
        if name.startswith("_") and name.isupper()
    }


def _rng_tracker() -> CudaRNGStatesTracker:
    tracker = tensor_parallel.get_cuda_rng_tracker()
    assert tracker is not None
    return tracker


_UNSET = _snapshot()


def _restore(state: dict[str, object]) -> None:
    parallel_state.__dict__.update(state)


def _own_group(group: object) -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, group)  # of other ranks' groups torch returns an int or None


class LayoutGroups:
    """Process groups of one layout, over the ranks of the default group. Creating them is
    collective: all ranks construct the same layouts in the same order. ``seed`` is that of
    Megatron's random state tracker for this layout."""

    def __init__(self, layout: Layout, seed: int = 0) -> None:
        self.layout = layout
        before = _snapshot()
        _restore(_UNSET)
        parallel_state.initialize_model_parallel(
            **layout.megatron_sizes(), create_gloo_process_groups=True
        )
        tensor_parallel.random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False
        tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
        self._rng_states = _rng_tracker().get_states()
        self._state = _snapshot()
        self.rank = dist.get_rank()
        self.coordinates: Coordinates = layout.coordinates(self.rank)
        self.tp = _own_group(parallel_state.get_tensor_model_parallel_group())
        self.pp = _own_group(parallel_state.get_pipeline_model_parallel_group())
        self.cp = _own_group(parallel_state.get_context_parallel_group())
        self.ep = _own_group(parallel_state.get_expert_model_parallel_group())
        self.etp = _own_group(parallel_state.get_expert_tensor_parallel_group())
        # NCCL pairs the messages of two ranks in a group by their order alone, so each direction
        # has a group; with interleaving the last and the first stage are neighbours as well, and
        # with two stages they are the same pair of ranks
        self.pp_back = _pipeline_group(layout, PIPELINE_BACK) if layout.pp > 1 else None
        self.pp_wrap = _pipeline_group(layout, PIPELINE_WRAP) if layout.vpp > 1 else None
        self.pp_wrap_back = _pipeline_group(layout, PIPELINE_WRAP_BACK) if layout.vpp > 1 else None
        self._check_coordinates()
        _restore(before)

    def _check_coordinates(self) -> None:
        here = self.coordinates
        assert here.tp == parallel_state.get_tensor_model_parallel_rank()
        assert here.pp == parallel_state.get_pipeline_model_parallel_rank()
        assert here.cp == parallel_state.get_context_parallel_rank()
        assert here.dp == parallel_state.get_data_parallel_rank(with_context_parallel=False)
        assert here.ep == parallel_state.get_expert_model_parallel_rank()
        assert here.etp == parallel_state.get_expert_tensor_parallel_rank()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this the layout that Megatron uses; restore the earlier one on leaving."""
        before = _snapshot()
        tracker = _rng_tracker()
        rng_before = tracker.get_states()
        _restore(self._state)
        tracker.set_states(self._rng_states)
        try:
            yield
        finally:
            self._rng_states = tracker.get_states()
            tracker.set_states(rng_before)
            _restore(before)

    def random_states(self) -> dict[str, Tensor]:
        return dict(self._rng_states)

    def set_random_states(self, states: Mapping[str, Tensor]) -> None:
        self._rng_states = dict(states)

    @property
    def is_last_stage(self) -> bool:
        return self.coordinates.pp == self.layout.pp - 1

    @property
    def is_reporting_rank(self) -> bool:
        """Whether this rank reports the results of its data-parallel replica."""
        return self.is_last_stage and self.coordinates.tp == 0 and self.coordinates.cp == 0


def _pipeline_group(layout: Layout, description: str) -> dist.ProcessGroup:
    """A group of the ranks of this rank's pipeline besides Megatron's own, one for each
    description. Collective."""
    apart = layout.world // layout.pp
    groups = [
        parallel_state.create_group(
            list(range(first, layout.world, apart)),
            timeout=timedelta(minutes=30),
            group_desc=description,
        )
        for first in range(apart)
    ]
    return _own_group(groups[dist.get_rank() % apart])


class GroupRegistry:
    """One ``LayoutGroups`` per distinct layout, so that roles with equal layouts share it."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._by_layout: dict[Layout, LayoutGroups] = {}

    def of(self, layout: Layout) -> LayoutGroups:
        """Return the groups of ``layout``; the first call for a layout is collective."""
        if layout not in self._by_layout:
            self._by_layout[layout] = LayoutGroups(layout, self._seed)
        return self._by_layout[layout]
