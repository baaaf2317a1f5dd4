"""Procedural tasks."""

import pytest

from mppo.data.tasks import TASKS, split_examples, task
from mppo.recipe.errors import ConfigError


def right_answer(name: str, prompt: str) -> str:
    """The answer, worked out from the prompt alone by other means than the task's."""
    if name == "arithmetic":
        return str(eval(prompt.removesuffix("="), {"__builtins__": {}}))
    if name == "reverse":
        return "".join(reversed(prompt.split()[1]))
    if name == "sort_digits":
        return "".join(digit * prompt.count(digit) for digit in "0123456789")
    _, letter, _, word = prompt.split()
    return str(sum(each == letter for each in word))


@pytest.mark.parametrize("name", TASKS)
def test_answers_are_right(name):
    kwargs = {"terms": 4, "operations": "+-*", "max_operand": 30} if name == "arithmetic" else {}
    source = task(name, **kwargs)
    for index in range(200):
        example = source.example(index)
        assert example.answer == right_answer(name, example.prompt), example


@pytest.mark.parametrize("name", TASKS)
def test_an_example_depends_on_seed_and_index_alone(name):
    forward = [task(name, seed=3).example(index) for index in range(20)]
    backward = [task(name, seed=3).example(index) for index in reversed(range(20))]
    assert forward == backward[::-1]
    assert forward != [task(name, seed=4).example(index) for index in range(20)]


def test_known_examples_stay_as_they_are():
    assert task("arithmetic").example(0).prompt == "3+4="
    assert task("sort_digits", min_length=3, max_length=3).example(1).prompt == "sort 637"


def test_difficulty_is_settable():
    longest = max(len(task("reverse", max_length=9).example(i).answer) for i in range(200))
    assert longest == 9
    operands = [task("arithmetic", max_operand=1).example(i).answer for i in range(100)]
    assert set(operands) == {"0", "1", "2"}


@pytest.mark.parametrize("name", ["arithmetic", "sort_digits"])
def test_no_validation_prompt_is_trained_on(name):
    source = task(name)
    train = {example.prompt for example in split_examples(source, "train", 2000)}
    val = {example.prompt for example in split_examples(source, "val", 100)}
    assert train
    assert val
    assert not train & val


def test_validation_has_each_prompt_once():
    complete = [e.prompt for e in split_examples(task("arithmetic"), "val", 64)]
    assert 4 < len(complete) == len(set(complete)) < 64  # a tenth of the hundred sums of two digits
    source = task("sort_digits", min_length=3)
    assert len({e.prompt for e in split_examples(source, "val", 64)}) == 64


def test_a_task_too_small_to_split_says_so():
    with pytest.raises(ConfigError, match=r"(?s)val split.*data\.val_size=0"):
        list(split_examples(task("arithmetic", max_operand=0), "val", 4))


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("aritmetic", {}, "did you mean 'arithmetic'"),
        ("arithmetic", {"max_operands": 3}, "did you mean 'max_operand'"),
        ("arithmetic", {"max_operand": "9"}, "type int"),
        ("arithmetic", {"max_operand": -1}, "at least 0"),
        ("arithmetic", {"terms": 1}, "at least 2"),
        ("arithmetic", {"operations": "/"}, "one or more of"),
        ("reverse", {"min_length": 0}, "at least 1"),
        ("reverse", {"min_length": 5, "max_length": 4}, "at least min_length"),
        ("reverse", {"alphabet": ""}, "at least one character"),
    ],
)
def test_wrong_task_or_parameter_is_explained(name, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        task(name, **kwargs)


def test_reasoning_gym_families_are_seeded_and_random_access():
    pytest.importorskip("reasoning_gym", reason="the optional package reasoning_gym is missing")
    first = task("reasoning_gym:chain_sum", seed=1)
    again = task("reasoning_gym:chain_sum", seed=1)
    assert [first.example(i) for i in (5, 0)] == [again.example(i) for i in (0, 5)][::-1]
    assert first.example(0) != task("reasoning_gym:chain_sum", seed=2).example(0)


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("reasoning_gym:chain_sun", {}, "did you mean 'reasoning_gym:chain_sum'"),
        ("reasoning_gym:chain_sum", {"foo": 1}, "foo"),
        ("reasoning_gym:chain_sum", {"min_terms": 9, "max_terms": 2}, "rejects"),
    ],
)
def test_reasoning_gym_faults_are_explained(name, kwargs, message):
    pytest.importorskip("reasoning_gym", reason="the optional package reasoning_gym is missing")
    with pytest.raises(ConfigError, match=message):
        task(name, **kwargs)


def test_missing_reasoning_gym_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"mppo\[rewards\]"):
        task("reasoning_gym:chain_sum")
