"""Configs of a recipe's models, whose weights need not be on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mppo.config.errors import ConfigError


class ModelConfigs:
    """Reads the config of a model by its path in the recipe.

    If the path is not on this machine, the folder of the same name in ``configs/`` beside the
    recipe is read.

    Args:
        recipe: file of the recipe; None: the recipe consists of command-line keys only.

    Attributes:
        remarks: messages to the user about configs that were read from ``configs/``.
    """

    def __init__(self, recipe: Path | None) -> None:
        self._beside = (recipe or Path("recipe")).parent / "configs"
        self._read: dict[str, Any] = {}
        self.remarks: list[str] = []

    def read(self, path: str) -> Any:
        """Read the Hugging Face config of a model.

        Raises:
            ConfigError: neither folder has a config.
        """
        from mppo.hub.builtin import load_config, read_model_config

        if path not in self._read:
            shipped = self._beside / Path(path).name
            try:
                self._read[path] = load_config(path)
            except ConfigError:
                if not (shipped / "config.json").is_file():
                    raise
                self._read[path] = read_model_config(shipped)
                self.remarks.append(f"{path} is not on this machine: taking {shipped}")
        return self._read[path]
