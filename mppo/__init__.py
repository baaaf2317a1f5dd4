"""mppo: PPO for large language models on Megatron-Core, with SGLang rollout."""

import importlib
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mppo import register as register
    from mppo.api import ConfigError as ConfigError
    from mppo.api import InputError as InputError
    from mppo.api import Recipe as Recipe
    from mppo.api import load as load
    from mppo.api import plan as plan
    from mppo.api import read_run as read_run
    from mppo.api import train as train

__version__ = "0.2.0"
# a program that is started by its path has this folder on sys.path: its ``agents`` would be found
# in place of another package's
_HERE = os.path.realpath(os.path.dirname(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != _HERE]
_API = ("ConfigError", "InputError", "Recipe", "load", "plan", "read_run", "train")


def __getattr__(name: str) -> Any:
    """Find a name of the API when it is first used, so that ``import mppo`` imports nothing."""
    if name == "register":
        return importlib.import_module("mppo.register")
    if name not in _API:
        raise AttributeError(f"module 'mppo' has no attribute {name!r}")
    found = getattr(importlib.import_module("mppo.api"), name)
    setattr(sys.modules[__name__], name, found)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_API, "register"})


class _Package(ModuleType):
    """This package: importing the programs ``mppo.train`` and ``mppo.plan`` leaves the functions
    of these names in place."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _API and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
