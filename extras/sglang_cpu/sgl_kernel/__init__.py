"""Names of SGLang's compiled kernels: they can be imported, and raise an error when called."""

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs SGLang's compiled kernels")

    return missing
