"""Module attributes that exist but cannot be called."""

from collections.abc import Callable
from typing import NoReturn


def attributes_of(module: str) -> Callable[[str], Callable[..., NoReturn]]:
    """A module-level ``__getattr__`` whose every name is a function that raises."""

    def getattribute(name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: object, **kwargs: object) -> NoReturn:
            raise NotImplementedError(f"{module}.{name}: torchvision is not installed")

        return missing

    return getattribute
