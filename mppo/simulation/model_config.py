"""The models of a recipe whose weights need not be on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mppo.config.errors import ConfigError


class ModelConfigs:
    """Reads the config of a model by the path a recipe gives.

    Where the path is not on this machine, ``configs/`` beside the recipe is searched for a folder
    of the same name.

    Args:
        recipe: the recipe's file; None: keys of the command line only.

    Attributes:
        remarks: which configs were taken from there, for the user.
    """

    def __init__(self, recipe: Path | None) -> None:
        self._beside = (recipe or Path("recipe")).parent / "configs"
        self._read: dict[str, Any] = {}
        self.remarks: list[str] = []

    def read(self, path: str) -> Any:
        """The Hugging Face config of a model.

        Raises:
            ConfigError: neither place has it.
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
