"""Programs in responses, and the tests in their ground truths."""

from __future__ import annotations

import json
import re
from typing import Any

from mppo.safety.input_error import InputError

FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


def extract_program(response: str) -> str:
    """Return the last fenced Python block of a response, or all of it if it has none."""
    blocks = FENCED.findall(response)
    return blocks[-1] if blocks else response


def parse_tests(ground_truth: str) -> list[Any]:
    """The tests of a ground truth, all of one form; InputError for another form or no tests."""
    try:
        tests = json.loads(ground_truth)
    except ValueError:
        tests = None
    if isinstance(tests, dict) and tests.keys() == {"inputs", "outputs"}:
        pairs = zip(tests["inputs"], tests["outputs"], strict=True)
        tests = [{"input": given, "output": expected} for given, expected in pairs]
    keys = {"input", "output"}
    if isinstance(tests, list) and tests:
        if all(isinstance(test, str) for test in tests):
            return tests
        if all(isinstance(test, dict) and keys <= test.keys() for test in tests):
            return tests
    raise InputError(
        "the ground truth of a program must be a JSON list of test statements, or of objects "
        "with 'input' and 'output', or an object of lists 'inputs' and 'outputs'; it is "
        f"{ground_truth[:80]!r}"
    )
