"""Registries: the functions that a recipe names, mppo's own and those of plugins.

A plugin is a Python file that ``trainer.plugins`` names. Its decorators add functions:

    @mppo.register.estimator("name")      algorithm.adv_estimator
    @mppo.register.policy_loss("name")    actor.policy_loss.loss_mode
    @mppo.register.verifier("name")       reward.verifier, data.sources.*.verifier
    @mppo.register.metric("name")         a metric of every step
    @mppo.register.family("name")         a model family, by config.json's model_type
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

from mppo.safety.input_error import InputError
from mppo.safety.python_file import describe_error

Function = TypeVar("Function", bound=Callable[..., Any])


class RegistrationError(InputError):
    """A function cannot be registered."""

    def __init__(self, why: str, fix: str) -> None:
        self.why, self.fix = why, fix
        super().__init__(f"{why}; {fix}")


class Registry(Mapping[str, Any]):
    """Functions of one kind by name; as a function, the decorator that adds one.

    Args:
        noun: what they are, for messages.
        own: names of mppo's own, known before the modules that fill them in are imported.
        parameters: what each function is called with.
    """

    def __init__(self, noun: str, own: tuple[str, ...], parameters: tuple[str, ...]) -> None:
        self.noun, self.own, self.parameters = noun, own, parameters
        self._functions: dict[str, Any] = {}
        self._origins: dict[str, tuple[str, str]] = {}
        """Module and name of each added function."""

    def __call__(self, name: str) -> Callable[[Function], Function]:
        """Make the decorator that adds a function; one of the same module and name is replaced: a
        cell of a notebook may be executed again.

        Raises:
            RegistrationError: no name is given, it is taken, or what is registered is no
                function, a coroutine function, or has other parameters.
        """
        if not isinstance(name, str) or not name:
            why = f"{name!r} is no name of a {self.noun}"
            raise RegistrationError(why, 'write ("name") behind the decorator')

        def add(function: Function) -> Function:
            if not callable(function) or inspect.iscoroutinefunction(function):
                why = f"the {self.noun} {name!r} is {function!r}"
                raise RegistrationError(why, "register a function, without async")
            origin = (function.__module__, getattr(function, "__qualname__", ""))
            self._check(name, function, origin)
            self._functions[name] = self._blaming(name, function)
            self._origins[name] = origin
            return function

        return add

    def fill(self, functions: Mapping[str, Any]) -> None:
        assert functions.keys() <= set(self.own)
        self._functions = {**functions, **self._functions}

    def drop(self, module: str) -> None:
        """Remove what a module has added."""
        for name in [name for name, origin in self._origins.items() if origin[0] == module]:
            del self._functions[name], self._origins[name]

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that a recipe may have."""
        return (*self.own, *self._origins)

    def __getitem__(self, name: str) -> Any:
        return self._functions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)

    def _check(self, name: str, function: Callable[..., Any], origin: tuple[str, str]) -> None:
        taken = "mppo has one" if name in self.own else None
        if self._origins.get(name, origin) != origin:
            module, function_name = self._origins[name]
            taken = f"{module} has one, {function_name}"
        if taken:
            why = f"a second {self.noun} of the name {name!r}: {taken}"
            raise RegistrationError(why, "give it another name")
        try:
            inspect.signature(function).bind(*self.parameters)
        except (TypeError, ValueError) as error:  # some builtins have no signature
            why = f"the parameters of the {self.noun} {name!r} do not fit: {error}"
            raise RegistrationError(why, f"accept ({', '.join(self.parameters)})") from error

    def _blaming(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with its exceptions as the user's faults; memory may lack for any reason."""

        @wraps(function)
        def call(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            except InputError:
                raise  # it says itself what to do
            except Exception as error:
                if type(error).__name__ in ("OutOfMemoryError", "MemoryError"):
                    raise
                what = f"the {self.noun} {name!r} failed: {describe_error(error)}"
                raise InputError(f"{what}; correct it") from error

        return call


@dataclass(frozen=True)
class FamilyTraits:
    """What a plugin's family has beside its architecture.

    Args:
        like: the family of mppo whose keys of config.json, sizes and tensor names it has.
        names: its tensors' names (``mppo.weights.names.HFNames``); None: those of ``like``.
        sizes: from its config to the fields of ``mppo.recipe.model_shape.ModelShape`` that differ.
        served: what SGLang supports (``mppo.rollout.sglang.model_support.Served``); None: nothing
            is known, and only the local engine generates.
    """

    like: str
    names: Any = None
    sizes: Callable[[Any], Mapping[str, Any]] = lambda hf_config: {}
    served: Any = None


class Families(Registry):
    """Model families by ``model_type``: from config and sizes to ``FamilyConfig``."""

    def __init__(self, own: tuple[str, ...]) -> None:
        super().__init__("model family", own, ("hf_config", "shape"))
        self._traits: dict[str, FamilyTraits] = {}

    def __call__(
        self, name: str, like: str = "llama", **traits: Any
    ) -> Callable[[Function], Function]:
        """Make the decorator that adds a family for config.json's ``model_type`` ``name``; see
        ``FamilyTraits``.

        Raises:
            RegistrationError: as of a registry; or mppo has no family ``like``, or no such trait.
        """
        if like not in self.own:
            why = f"the model family {name!r} is like {like!r}, which mppo does not have"
            raise RegistrationError(why, f"name one of {', '.join(self.own)}")
        try:
            found = FamilyTraits(like, **traits)
        except TypeError as error:
            why = f"the model family {name!r}: {error}"
            raise RegistrationError(why, "give like, names, sizes or served") from error
        add = super().__call__(name)

        def add_with_traits(function: Function) -> Function:
            add(function)
            self._traits[name] = found
            return function

        return add_with_traits

    def traits(self, name: str) -> FamilyTraits:
        """Those of a plugin's family; one of mppo's own is like itself."""
        return self._traits[name] if name in self._origins else FamilyTraits(name)


estimator = Registry(
    "advantage estimator",
    ("gae", "grpo", "grpo_passk", "dr_grpo", "rloo", "rloo_vectorized", "reinforce_plus_plus",
     "reinforce_plus_plus_baseline", "remax", "opo", "gpg", "gdpo", "optimal_token_baseline",
     "tir_optimal_token_baseline"),
    ("scores_B", "group_B", "length_B", "options"),
)  # fmt: skip
"""See ``mppo.algos.group_baselines.OutcomeEstimator``; six of mppo's own are no such functions,
because they need more than scores."""
policy_loss = Registry(
    "policy loss",
    ("vanilla", "gspo", "gmpo", "cispo", "dis", "sapo", "clip_cov", "kl_cov", "gpg",
     "reinforce", "dppo_tv", "dppo_kl", "dro", "plain"),
    ("inputs",),
)  # fmt: skip
"""See ``mppo.algos.policy_loss.PolicyLoss``."""
verifier = Registry(
    "verifier",
    ("exact", "final_answer", "gsm8k", "gsm8k_flexible", "choice", "math", "math_flexible",
     "reasoning_gym", "code"),
    ("response", "ground_truth", "extra"),
)  # fmt: skip
"""See ``mppo.rewards.verifiers.Verifier``."""
metric = Registry(
    "metric", ("experience", "calibration", "explained_by_age", "scores", "mismatch"), ("data",)
)
"""See ``mppo.trainer.metrics.Metric``."""
family = Families(
    ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "mixtral", "qwen2_moe", "qwen3_moe",
     "gpt_neox", "opt", "glm4", "glm4_moe", "seed_oss", "smollm3", "deepseek_v2", "deepseek_v3",
     "glm4_moe_lite")
)  # fmt: skip
"""See ``mppo.models.families.architectures.Builder``."""

REGISTRIES: tuple[Registry, ...] = (estimator, policy_loss, verifier, metric, family)
