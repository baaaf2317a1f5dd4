"""Configs of a recipe's models, which need not be on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mppo.recipe.errors import ConfigError
from mppo.recipe.sections.model import Hub


class ModelConfigs:
    """Reads the config of a model by its path in the recipe.

    If the path is not on this machine, the folder of the same name in ``configs/`` beside the
    recipe's file is read, and ``remarks`` tells the user so.
    """

    def __init__(self, recipe: Path | None) -> None:
        self._beside = (recipe or Path("recipe")).parent / "configs"
        self._read: dict[str, Any] = {}
        self.remarks: list[str] = []

    def read(self, path: str | Path, trust_remote_code: bool = False) -> Any:
        """Read the Hugging Face config of a model; ConfigError if neither folder has one."""
        from mppo.hub.builtin import load_config, read_model_config

        name = str(path)
        if name not in self._read:
            try:
                self._read[name] = load_config(name, trust_remote_code)
            except ConfigError as missing:
                self._read[name] = read_model_config(self._stand_in(name, missing))
        return self._read[name]

    def folder(self, name: str) -> Path:
        """The folder of a model, or the one in ``configs/`` for it; ConfigError if there is
        neither."""
        from mppo.hub.builtin import resolve_model

        try:
            return resolve_model(name)
        except ConfigError as missing:
            return self._stand_in(name, missing)

    def fetch(self, name: str, hub: Hub, weights: bool, trust_remote_code: bool) -> Path:
        """Download a model's config from its hub (``fetch_model``); ConfigError if that fails, and
        ``configs/`` has no such model."""
        from mppo.hub.download import fetch_model

        try:
            return fetch_model(name, hub, weights, trust_remote_code)
        except ConfigError:
            shipped = self._shipped(name)
            if shipped is None:
                raise
            return shipped

    def _stand_in(self, name: str, missing: ConfigError) -> Path:
        shipped = None if Path(name).expanduser().exists() else self._shipped(name)
        if shipped is None:
            raise missing
        return shipped

    def _shipped(self, name: str) -> Path | None:
        shipped = self._beside / Path(name).name
        if not (shipped / "config.json").is_file():
            return None
        self.remarks.append(f"{name} is not on this machine: taking {shipped}")
        return shipped
