"""Procedural tasks: seeded questions without end, whose answers a rule can check.

Example ``i`` of a task depends on the task's parameters and ``i`` alone, so every machine generates
the same data. ``reasoning_gym:NAME`` is a task family of the optional package reasoning_gym.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import itertools
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal, Protocol

from mppo.recipe.errors import ConfigError, ConfigIssue, config_error, nearest

Split = Literal["train", "val"]
VAL_FRACTION = 0.1
_PATIENCE = 1000
"""Number of consecutive examples without a new prompt after which a task counts as exhausted."""
REASONING_GYM = "reasoning_gym:"


@dataclass(frozen=True)
class Example:
    """One question, the right answer in the form that the verifier compares, and further values for
    it."""

    prompt: str
    answer: str
    extra: dict[str, Any] = field(default_factory=dict)


class Task(Protocol):
    def example(self, index: int) -> Example: ...


@dataclass(frozen=True)
class Arithmetic:
    """``12+5=`` -> ``17``; operands are from 0 to ``max_operand``, and ``operations``, characters
    from ``+-*``, are drawn for each pair of them."""

    seed: int = 0
    max_operand: int = 9
    terms: int = 2
    operations: str = "+"
    ending: str = "="

    def __post_init__(self) -> None:
        _require(self, "max_operand", self.max_operand >= 0, "at least 0")
        _require(self, "terms", self.terms >= 2, "at least 2")
        are_valid = bool(self.operations) and set(self.operations) <= set("+-*")
        _require(self, "operations", are_valid, "one or more of + - *")

    def example(self, index: int) -> Example:
        random = _random(self, index)
        expression = str(random.randint(0, self.max_operand))
        for _ in range(self.terms - 1):
            expression += random.choice(self.operations)
            expression += str(random.randint(0, self.max_operand))
        return Example(expression + self.ending, str(_evaluate(expression)))


@dataclass(frozen=True)
class Reverse:
    """``reverse abc`` -> ``cba``."""

    seed: int = 0
    min_length: int = 2
    max_length: int = 4
    alphabet: str = string.ascii_lowercase

    def __post_init__(self) -> None:
        _require_lengths(self, self.min_length, self.max_length)
        _require(self, "alphabet", bool(self.alphabet), "at least one character")

    def example(self, index: int) -> Example:
        random = _random(self, index)
        word = _word(random, self.alphabet, self.min_length, self.max_length)
        return Example(f"reverse {word}", word[::-1])


@dataclass(frozen=True)
class SortDigits:
    """``sort 3142`` -> ``1234``."""

    seed: int = 0
    min_length: int = 2
    max_length: int = 4

    def __post_init__(self) -> None:
        _require_lengths(self, self.min_length, self.max_length)

    def example(self, index: int) -> Example:
        digits = _word(_random(self, index), string.digits, self.min_length, self.max_length)
        return Example(f"sort {digits}", "".join(sorted(digits)))


@dataclass(frozen=True)
class CountLetters:
    """``count a in banana`` -> ``3``."""

    seed: int = 0
    min_length: int = 3
    max_length: int = 8
    alphabet: str = "abc"

    def __post_init__(self) -> None:
        _require_lengths(self, self.min_length, self.max_length)
        _require(self, "alphabet", bool(self.alphabet), "at least one character")

    def example(self, index: int) -> Example:
        random = _random(self, index)
        word = _word(random, self.alphabet, self.min_length, self.max_length)
        letter = random.choice(self.alphabet)
        return Example(f"count {letter} in {word}", str(word.count(letter)))


class ReasoningGym:
    """A task family of the package reasoning_gym, such as ``chain_sum`` or ``gsm_symbolic``;
    ConfigError if the package is missing, or has no such family or parameter."""

    SIZE = 1_000_000  # some families draw this many numbers when they are created

    def __init__(self, name: str, seed: int = 0, **parameters: Any) -> None:
        self.name = name
        gym = import_reasoning_gym()
        known = importlib.import_module("reasoning_gym.factory").DATASETS
        if name not in known:
            raise _unknown_name(REASONING_GYM + name, [REASONING_GYM + each for each in known])
        try:
            self._dataset = gym.create_dataset(name, seed=seed, size=self.SIZE, **parameters)
        except (TypeError, AssertionError, ValueError) as error:
            raise config_error(
                "data.task_kwargs",
                parameters,
                f"reasoning_gym rejects them for {name}: {error}",
                f"correct them; reasoning_gym documents the configuration of {name}",
            ) from error

    def example(self, index: int) -> Example:
        entry = self._dataset[index % self.SIZE]
        extra = {"reasoning_gym": self.name, "entry": entry}
        return Example(entry["question"], str(entry["answer"]), extra)


TASKS: dict[str, Callable[..., Task]] = {
    "arithmetic": Arithmetic,
    "reverse": Reverse,
    "sort_digits": SortDigits,
    "count_letters": CountLetters,
}


def task(name: str, **kwargs: Any) -> Task:
    """Create a task by a key of ``TASKS``, or ``reasoning_gym:NAME``; ConfigError if the task or a
    parameter is unknown, or a parameter out of range."""
    if name.startswith(REASONING_GYM):
        return ReasoningGym(name.removeprefix(REASONING_GYM), **kwargs)
    if name not in TASKS:
        raise _unknown_name(name, [*TASKS, f"{REASONING_GYM}NAME"])
    known = {parameter.name: parameter for parameter in dataclasses.fields(TASKS[name])}  # type: ignore[arg-type]
    issues = []
    for key, value in kwargs.items():
        where = f"data.task_kwargs.{key}"
        if key not in known:
            guess = nearest(key, known)
            hint = f"did you mean {guess!r}? " if guess else ""
            fix = f"{hint}{name} takes {', '.join(known)}"
            issues.append(ConfigIssue(where, value, f"the task {name} has no such parameter", fix))
        elif type(value) is not type(known[key].default):
            kind = type(known[key].default).__name__
            why = f"of type {type(value).__name__}"
            issues.append(ConfigIssue(where, value, why, f"give a value of type {kind}"))
    if issues:
        raise ConfigError(issues)
    return TASKS[name](**kwargs)


def split_examples(source: Task, split: Split, count: int) -> Iterator[Example]:
    """Yield the first ``count`` examples of a split.

    A hash of the prompt decides the split, so the run never trains on a validation prompt, even if
    the task is so small that its prompts repeat. The validation split has each prompt once, and
    fewer than ``count`` prompts if the task has no more.

    Raises:
        ConfigError: no example falls into the split, because the task is too small.
    """
    found, seen, last = 0, set(), 0
    for index in itertools.count():
        if found == count or index > last + _PATIENCE:
            break
        example = source.example(index)
        if _split_of(example.prompt) != split or example.prompt in seen:
            continue
        if split == "val":
            seen.add(example.prompt)
        found, last = found + 1, index
        yield example
    if count and not found:
        raise config_error(
            "data.task",
            type(source).__name__,
            f"none of the first {_PATIENCE} examples falls into the {split} split",
            "make the task larger through data.task_kwargs, or set data.val_size=0",
        )


def import_reasoning_gym() -> Any:
    """Import reasoning_gym; a ConfigError says how to install it."""
    try:
        return importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        raise config_error(
            "data.task",
            REASONING_GYM + "...",
            f"the package {error.name} is not installed",
            'pip install "mppo[rewards]"',
        ) from error


def _split_of(prompt: str) -> Split:
    share = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4], "big") / 2**32
    return "val" if share < VAL_FRACTION else "train"


def _random(source: Any, index: int) -> Random:
    return Random(f"{type(source).__name__} {source.seed} {index}")


def _word(random: Random, alphabet: str, min_length: int, max_length: int) -> str:
    return "".join(random.choices(alphabet, k=random.randint(min_length, max_length)))


def _evaluate(expression: str) -> int:
    """Evaluate an expression of non-negative integers and ``+ - *``; products come first."""
    total = 0
    for sum_term in expression.replace("-", "+-").split("+"):
        product = -1 if sum_term.startswith("-") else 1
        for factor in sum_term.removeprefix("-").split("*"):
            product *= int(factor)
        total += product
    return total


def _require_lengths(source: Any, min_length: int, max_length: int) -> None:
    _require(source, "min_length", min_length >= 1, "at least 1")
    _require(source, "max_length", max_length >= min_length, "at least min_length")


def _require(source: Any, key: str, holds: bool, valid: str) -> None:
    if not holds:
        name = type(source).__name__
        value = getattr(source, key)
        raise config_error(
            f"data.task_kwargs.{key}", value, f"out of range for {name}", f"give {valid}"
        )


def _unknown_name(name: str, known: list[str]) -> ConfigError:
    guess = nearest(name, known)
    listing = ", ".join(known) if len(known) < 10 else f"{len(known)} names"
    fix = (f"did you mean {guess!r}? " if guess else "") + f"the tasks are {listing}"
    return config_error("data.task", name, "no such task", fix)
