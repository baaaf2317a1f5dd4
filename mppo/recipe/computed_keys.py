"""Keys from which others are computed: TRL's ``num_mini_batches``, ``total_episodes`` and
``num_sample_generations``, with or without a section, and two of earlier versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mppo.recipe.errors import ConfigIssue
from mppo.recipe.presets import apply_preset
from mppo.recipe.sections.data import DataConfig
from mppo.recipe.sections.rollout import RolloutConfig

TRL_KEYS: dict[str, str] = {
    "num_mini_batches": "Mini-batches per batch (TRL): actor.ppo_mini_batch_size is "
    "data.train_batch_size / num_mini_batches.",
    "total_episodes": "Responses of the run (TRL): trainer.total_training_steps is total_episodes "
    "/ (data.train_batch_size x rollout.n), rounded up.",
    "num_sample_generations": "trainer.num_sample_generations (TRL).",
}
"""TRL's keys with what they mean here."""

_SECTIONS = {"num_mini_batches": "actor", "total_episodes": "trainer"}
_EARLIER = {"partial_rollout": "rollout", "rollout_ahead": "trainer"}
"""Keys of earlier versions for ``rollout.max_staleness``, with their sections."""


def computed_keys(
    document: Mapping[str, Any], issues: list[ConfigIssue], remarks: list[str]
) -> dict[str, Any]:
    """A new document with the computed keys in place of those they are computed from; ``document``
    is without a preset's defaults.

    Args:
        issues: receives an issue per key whose value is not valid, or which contradicts another.
        remarks: receives a line for the log per key that is replaced.
    """
    replaced = {k: dict(v) if isinstance(v, Mapping) else v for k, v in document.items()}
    for name, key, value in list(_take(replaced)):
        target, computed, why = _computed(key, value, apply_preset(replaced))
        if why:
            fix = "give a whole number that divides it" if " multiple " in why else "correct it"
            issues.append(ConfigIssue(name, value, why, fix))
            continue
        section, _, last = target.partition(".")
        part = replaced.setdefault(section, {})
        if not isinstance(part, dict):
            continue  # not a section: validation reports it
        if part.get(last, computed) != computed:
            why = f"means {target} = {computed}, also given as {part[last]!r}"
            kept = f"{target} only" if key in _EARLIER else f"{name} or {target}"
            issues.append(ConfigIssue(name, value, why, f"keep {kept}"))
            continue
        part[last] = computed
        remarks.append(f"{name}={value} is taken as {target}={computed}")
    return replaced


def _take(document: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Remove the keys: each as it is written, without its section, and with its value."""
    for key in TRL_KEYS:
        if key in document:
            yield key, key, document.pop(key)
        section = _SECTIONS.get(key, "")
        part = document.get(section)
        if isinstance(part, dict) and key in part:
            yield f"{section}.{key}", key, part.pop(key)
    for key, section in _EARLIER.items():
        part = document.get(section)
        if isinstance(part, dict) and key in part and (value := part.pop(key)):
            yield f"{section}.{key}", key, value


def _computed(key: str, value: Any, filled: Mapping[str, Any]) -> tuple[str, Any, str]:
    """mppo's key, its value, and why there is none (empty where there is one); ``filled`` has the
    preset's defaults."""
    if key == "num_sample_generations":
        return "trainer.num_sample_generations", value, ""
    if key in _EARLIER:
        return "rollout.max_staleness", 1 if value is True else value, ""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    if not is_count:
        return "", None, "is not a whole number above 0"
    batch = _number(filled, "data", "train_batch_size", DataConfig().train_batch_size)
    if key == "num_mini_batches":
        if batch % value:
            return "", None, f"data.train_batch_size = {batch} is not a multiple of it"
        return "actor.ppo_mini_batch_size", batch // value, ""
    responses = batch * _number(filled, "rollout", "n", RolloutConfig().n)
    return "trainer.total_training_steps", -(-value // responses), ""


def _number(document: Mapping[str, Any], section: str, key: str, default: int) -> int:
    """A positive number of the document; the default where it has none (validation reports it)."""
    part = document.get(section)
    value = part.get(key) if isinstance(part, Mapping) else None
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        return default
    return value
