"""The text report on a simulated rank."""

from __future__ import annotations

from collections import Counter

from mppo.planning.time.step_text import columns
from mppo.recipe.gpu_types import GIB
from mppo.recipe.schema import Recipe
from mppo_simulate.gpu.counters import Collective
from mppo_simulate.rank import PhaseResult, RankResult

_SHOWN = 5
"""Number of waits, and of kinds of collectives, that the report shows per phase."""
_LEAST = 0.005
"""Purposes with a smaller share of a phase's memory are shown as one sum, "other"."""


def describe_rank(result: RankResult, recipe: Recipe, world_size: int) -> str:
    """Describe one rank: memory by phase and purpose, operations, waits, communication."""
    places = ", ".join(
        f"{role.name} {role.megatron.layout(world_size).describe()} pp{at.pp} tp{at.tp} dp{at.dp}"
        for role in recipe.roles()
        if (at := result.coordinates[role.name])
    )
    parts = [
        f"# rank {result.rank} of {world_size}: {places}",
        "## memory, GiB\n" + _memory(result),
        "## one step: operations, waits of the host for the GPU, communication\n" + _work(result),
    ]
    if result.unknown:
        count = sum(result.unknown.values())
        parts.append(f"reads of numbers that only a GPU has: {count}, each read as 1.0 or 0.0")
    return "\n\n".join(parts)


def _memory(result: RankResult) -> str:
    rows = [("phase", "peak", "reached at", "contents")]
    for phase in result.phases:
        rows.append((phase.name, _gib(phase.peak), phase.line, _shares(phase.composition)))
    resident = result.resident.total()
    rows.append(("generation", _gib(resident), "", _shares(result.resident)))
    return columns(rows)


def _shares(composition: Counter[str]) -> str:
    total = composition.total()
    large = [(n, key) for key, n in composition.most_common() if n > _LEAST * total]
    rest = total - sum(n for n, _ in large)
    return ", ".join(
        [f"{key} {_gib(n)}" for n, key in large] + ([f"other {_gib(rest)}"] if rest else [])
    )


def _work(result: RankResult) -> str:
    rows = [("phase", "micro-batches", "operations", "each", "waits", "each", "GiB moved")]
    details = []
    for phase in result.phases:
        if not phase.operations and not phase.nbytes:
            continue
        count = phase.micro_batches
        waits = sum(phase.waits.values())
        rows.append(
            (
                phase.name,
                f"{count:,.0f}" if count else "-",
                f"{phase.operations:,.0f}",
                f"{phase.operations / count:,.0f}" if count else "-",
                f"{waits:,}",
                f"{waits / count:.1f}" if count else "-",
                _gib(sum(phase.nbytes.values())),
            )
        )
        details += _details(phase)
    return columns(rows) + "\n\n" + "\n".join(details)


def _details(phase: PhaseResult) -> list[str]:
    lines = [f"{phase.name}:"]
    for wait, count in phase.waits.most_common(_SHOWN):
        lines.append(f"  wait {count:>8,}  {wait.why} at {wait.line}")
    kinds: list[tuple[Collective, int]] = phase.nbytes.most_common(_SHOWN)
    for kind, nbytes in kinds:
        calls = phase.calls[kind]
        lines.append(
            f"  {kind.operation:<18} {_group_name(kind)} of {kind.size}: {calls:,} calls, "
            f"{_gib(nbytes)} GiB"
        )
    return lines if len(lines) > 1 else []


def _group_name(kind: Collective) -> str:
    return kind.group.lower().removesuffix("_group").replace("_", " ")


def _gib(count: float) -> str:
    return f"{count / GIB:.2f}"
