"""Which ranks stand for all: one for each position of a pipeline, and one more along every axis."""

from __future__ import annotations

from collections.abc import Iterable

from mppo.parallel.layout import Layout
from mppo.recipe.schema import Recipe


def representative_ranks(recipe: Recipe, world_size: int) -> list[int]:
    """Choose ranks that do everything that any rank does.

    For every role these are the pipeline of rank 0, and on the first and last stage the next rank
    along each other axis: ranks may differ by their position there, for example the first one
    reports.
    """
    found: set[int] = set()
    for role in recipe.roles():
        found.update(_of_layout(role.megatron.layout(world_size)))
    return sorted(found)


def _of_layout(layout: Layout) -> Iterable[int]:
    stride = layout.world // layout.pp
    beside = {1, layout.tp, layout.tp * layout.cp, layout.etp, layout.etp * layout.ep}
    yield from range(0, layout.world, stride)
    for first in {0, layout.world - stride}:
        yield from (first + step for step in beside if step < stride)
