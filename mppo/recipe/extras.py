"""Functions of the packages in ``extras/``, which a user installs if a recipe needs them.

mppo imports none of these packages. Each names its function in an entry point.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from mppo.recipe.errors import ConfigError, ConfigIssue


@dataclass(frozen=True)
class ExtraFunction:
    """A function of a package in ``extras/<folder>``, by group and name of its entry point."""

    group: str
    name: str
    folder: str

    def issue(self, key: str, value: Any) -> ConfigIssue | None:
        """What to tell the user whose key or option needs the package; None if it is installed."""
        return self._missing(key, value) if self._entry() is None else None

    def load(self, key: str, value: Any, source: str = "recipe") -> Any:
        """Import the function that a key with this value needs; ConfigError if its package is
        missing."""
        entry = self._entry()
        if entry is None:
            raise ConfigError([self._missing(key, value)], source)
        return entry.load()

    def _missing(self, key: str, value: Any) -> ConfigIssue:
        why = f"it needs the package extras/{self.folder} of mppo, which is not installed"
        return ConfigIssue(key, value, why, f"pip install ./extras/{self.folder}")

    def _entry(self) -> EntryPoint | None:
        return next(iter(entry_points(group=self.group, name=self.name)), None)


CODE_VERIFIER = ExtraFunction("mppo.verifiers", "code", "sandbox")
"""From the limits of ``reward.kwargs.sandbox`` and whether there is partial credit to the verifier
``code``."""

PROGRAM_ROUTES = ExtraFunction("mppo.reward_routes", "sandbox", "sandbox")
"""To the routes, by path, with which ``mppo-serve-reward`` runs programs."""

SIMULATION = ExtraFunction("mppo.simulations", "stages", "simulate")
"""From recipe, overrides, number of ranks and GPU to the exit code of their simulation."""
