"""Keys whose value is a name in ``mppo.register``, and ``trainer.plugins``, the files that add
such names before a recipe is checked."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from mppo.recipe.errors import ConfigError, ConfigIssue
from mppo.register import REGISTRIES, RegistrationError, Registry
from mppo.safety.python_file import describe_error, import_file

KEY = "trainer.plugins"


def check_of(registry: Registry) -> BeforeValidator:
    """The check that a name is registered, with the error of a ``Literal``."""

    def check(value: Any) -> Any:
        if value not in registry.names:
            expected = ", ".join(f"'{name}'" for name in registry.names)
            raise PydanticCustomError("literal_error", "no such name", {"expected": expected})
        return value

    return BeforeValidator(check)


def schema_of(registry: Registry) -> WithJsonSchema:
    """mppo's own names for completion in editors, and any other one, which a plugin may add."""
    return WithJsonSchema({"anyOf": [{"enum": list(registry.own)}, {"type": "string"}]})


def load_plugins(document: Mapping[str, Any]) -> list[ConfigIssue]:
    """Execute a recipe's plugins; what an earlier execution of a file has added is replaced."""
    trainer = document.get("trainer")
    names = trainer.get("plugins") if isinstance(trainer, Mapping) else None
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list):
        return []  # validation reports it
    found = [_load(name) for name in names if isinstance(name, str)]
    return [issue for issue in found if issue is not None]


def load_plugin_files(names: Sequence[str]) -> None:
    """Execute plugins that a program without a recipe is given.

    Raises:
        ConfigError: one of them cannot be used.
    """
    if issues := load_plugins({"trainer": {"plugins": list(names)}}):
        raise ConfigError(issues, source="--plugin")


def _load(name: str) -> ConfigIssue | None:
    path = os.path.realpath(os.path.expanduser(os.path.expandvars(name)))
    for registry in REGISTRIES:
        registry.drop(path)
    before = _count()
    try:
        import_file(path, path)
    except FileNotFoundError as error:
        return ConfigIssue(KEY, name, str(error), "correct the path")
    except RegistrationError as error:
        return ConfigIssue(KEY, name, error.why, error.fix)
    except (Exception, SystemExit) as error:
        why = f"executing it failed: {describe_error(error)}"
        return ConfigIssue(KEY, name, why, "correct the file")
    if _count() > before:
        return None
    kinds = "estimator, policy_loss, verifier, metric or family"
    fix = f"decorate its functions with @mppo.register.{kinds}"
    return ConfigIssue(KEY, name, "it registers nothing", f"{fix}, as docs/python_api.md shows")


def _count() -> int:
    return sum(len(registry.names) for registry in REGISTRIES)
