"""Apply the table of verl's keys to a document: convert, ignore or refuse each key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any

from mppo.recipe.errors import ConfigIssue
from mppo_migrate.verl_keys.engine_rows import ENGINE_ROWS
from mppo_migrate.verl_keys.role_rows import ROLE_ROWS
from mppo_migrate.verl_keys.run_rows import RUN_ROWS
from mppo_migrate.verl_keys.verl_row import Converted, Ignored, Refused, VerlRow

VERL_ROWS = (*ROLE_ROWS, *RUN_ROWS, *ENGINE_ROWS)
OVER_ALL_RANKS = {
    "actor.ppo_micro_batch_size": "actor.ppo_micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size": "critic.ppo_micro_batch_size_per_gpu",
    "rollout.log_prob_micro_batch_size": "actor.log_prob_micro_batch_size_per_gpu",
    "ref.log_prob_micro_batch_size": "ref.log_prob_micro_batch_size_per_gpu",
    "critic.forward_micro_batch_size": "critic.log_prob_micro_batch_size_per_gpu",
}
"""verl's micro-batch sizes over all ranks, and mppo's keys of the size on one rank."""


class VerlTranslation:
    """A document with verl's remaining keys converted, removed or refused; the names in ``RENAMED``
    are already replaced."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document: dict[str, Any] = _copied(document)
        self.issues: list[ConfigIssue] = []
        """One per key given twice with different values."""
        self.origins: dict[str, str] = {}
        """verl's key of every key of mppo's that took its place."""
        self.removed: dict[Ignored | Refused, list[tuple[str, Any]]] = {}
        """Keys and their values that are ignored or refused, by reason."""
        self._join_reward_function()
        self._divide_micro_batches()
        self._split_thresholds()
        for parts, value in list(_leaves(self.document)):
            row = row_of(parts, value)
            if row is None:
                continue
            key = ".".join(parts)
            _pop(self.document, parts)
            if isinstance(row.action, Converted):
                target, converted = row.action.target(parts), row.action.convert(value)
                self._set(target, converted, key, value)
            else:
                self.removed.setdefault(row.action, []).append((key, value))

    def _set(self, key: str, converted: Any, name: str, value: Any) -> None:
        """Set a key of mppo's in place of verl's; an issue if it already has a different value."""
        *sections, last = key.split(".")
        section = self.document
        for part in sections:
            if not isinstance(section.setdefault(part, {}), dict):
                return  # not a section: validation reports it
            section = section[part]
        if last in section and section[last] != converted:
            why = f"means {key} = {converted!r}, also given as {section[last]!r}"
            self.issues.append(ConfigIssue(name, value, why, f"keep {key} only"))
            return
        section[last] = converted
        self.origins[key] = name

    def _join_reward_function(self) -> None:
        """Convert verl's file and name of a reward function to ``reward.function: file:name``."""
        given = self.document.get("custom_reward_function")
        if not isinstance(given, dict) or not given.get("path"):
            return
        del self.document["custom_reward_function"]
        name, path = "custom_reward_function.path", given["path"]
        function = f"{path}:{given.get('name') or 'compute_score'}"
        self._set("reward.name", "function", name, path)
        self._set("reward.function", function, name, path)

    def _split_thresholds(self) -> None:
        """Convert thresholds of the rollout correction that are texts: ``"0.5_2.0"`` is a lower and
        an upper bound, and commas divide those of several rejections."""
        algorithm = self.document.get("algorithm")
        section = algorithm.get("rollout_correction") if isinstance(algorithm, dict) else None
        if not isinstance(section, dict):
            return
        for name, lower_name in (
            ("rollout_is_threshold", "rollout_is_lower"),
            ("rollout_rs_threshold", "rollout_rs_threshold_lower"),
        ):
            key, value = f"algorithm.rollout_correction.{name}", section.get(name)
            bounds = _bounds(value)
            if bounds is None:
                continue
            lowers, uppers = ([bound[i] for bound in bounds] for i in (0, 1))
            several = len(bounds) > 1
            del section[name]
            self._set(key, uppers if several else uppers[0], key, value)
            if any(lower is not None for lower in lowers):
                lower_key = f"algorithm.rollout_correction.{lower_name}"
                self._set(lower_key, lowers if several else lowers[0], key, value)
                if name == "rollout_is_threshold":
                    mode = "algorithm.rollout_correction.rollout_is_mode"
                    self._set(mode, "mask", key, value)  # verl: IcePop

    def _divide_micro_batches(self) -> None:
        """Convert micro-batch sizes over all ranks, where the document says how many ranks."""
        trainer = self.document.get("trainer")
        trainer = trainer if isinstance(trainer, dict) else {}
        nodes, gpus = trainer.get("nnodes") or 1, trainer.get("n_gpus_per_node")
        if gpus is None or not _is_count(nodes) or not _is_count(gpus):
            return
        ranks = nodes * gpus
        for name, target in OVER_ALL_RANKS.items():
            section, last = name.split(".")
            part = self.document.get(section)
            value = part.get(last) if isinstance(part, dict) else None
            if _is_count(value):
                _pop(self.document, (section, last))
                self._set(target, max(1, value // ranks), name, value)


def _bounds(value: Any) -> list[tuple[float | None, float]] | None:
    """Lower and upper bound of each part of a threshold; None if it is not a string of numbers."""
    if not isinstance(value, str):
        return None
    try:
        parts = [[float(n) for n in part.split("_")] for part in value.split(",") if part.strip()]
    except ValueError:
        return None
    if not parts or any(len(part) > 2 for part in parts):
        return None
    return [(part[0] if len(part) == 2 else None, part[-1]) for part in parts]


def row_of(parts: Sequence[str], value: Any) -> VerlRow | None:
    """The first row that matches a key and its value, or None."""
    for pattern, row in _patterns():
        if len(pattern) > len(parts) or (row.values is not None and value not in row.values):
            continue
        if all(name in ("*", part) for name, part in zip(pattern, parts)):
            return row
    return None


@cache
def _patterns() -> tuple[tuple[tuple[str, ...], VerlRow], ...]:
    return tuple((tuple(name.split(".")), row) for row in VERL_ROWS for name in expanded(row.names))


def expanded(pattern: str) -> Iterator[str]:
    """Expand alternatives: ``{a,b}.c`` gives ``a.c`` and ``b.c``."""
    pieces = re.split(r"\{(.*?)\}", pattern)
    options = [piece.split(",") if index % 2 else [piece] for index, piece in enumerate(pieces)]
    for choice in product(*options):
        yield "".join(choice)


def _leaves(document: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple]:
    """Path and value of every entry that is not a mapping, and of every empty mapping."""
    for name, value in document.items():
        if not isinstance(name, str):
            continue
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*above, name))
        else:
            yield (*above, name), value


def _copied(document: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with separate sections: through YAML's aliases two keys can share one object."""
    return {k: _copied(v) if isinstance(v, Mapping) else v for k, v in document.items()}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _pop(document: dict[str, Any], parts: Sequence[str]) -> None:
    """Remove a key, and sections that become empty."""
    head, *rest = parts
    if rest:
        _pop(document[head], rest)
        if not document[head]:
            del document[head]
    else:
        del document[head]
