"""Scores of programs by their tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mppo.recipe.errors import ConfigError, ConfigIssue
from mppo.rewards.programs import extract_program, parse_tests
from mppo.rewards.scores import Unscored
from mppo_sandbox.sandbox import ProgramResult, Sandbox


def code_verifier(limits: Mapping[str, Any], partial_credit: bool) -> CodeVerifier:
    """The verifier ``code`` of a recipe, which finds it by its entry point.

    Args:
        limits: of ``reward.kwargs.sandbox``, as arguments of ``Sandbox``.
        partial_credit: as ``CodeVerifier``'s.

    Raises:
        ConfigError: no such limit, or this machine cannot isolate programs.
    """
    known = Sandbox.__dataclass_fields__
    for key in limits.keys() - known.keys():
        where = f"reward.kwargs.sandbox.{key}"
        fix = f"the limits are {', '.join(known)}"
        raise ConfigError([ConfigIssue(where, limits[key], "no such limit", fix)])
    sandbox = Sandbox(**limits)
    sandbox.check()
    return CodeVerifier(sandbox, partial_credit)


@dataclass(frozen=True)
class CodeVerifier:
    """Share of tests that a response's program passes.

    Args:
        sandbox: the limits under which the program runs.
        partial_credit: return the share; otherwise 1 if all tests pass, else 0.
    """

    sandbox: Sandbox
    partial_credit: bool = False

    def __call__(
        self, response: str, ground_truth: str, extra: Mapping[str, Any]
    ) -> float | Unscored:
        """Score a response.

        Args:
            response: its last fenced Python block is the program; without a block, all of it.
            ground_truth: JSON list of Python statements that raise if the program is wrong, or
                of ``{"input": text, "output": text}``; or Eurus's object of the lists ``inputs``
                and ``outputs``.
            extra: not used.

        Raises:
            ValueError: the ground truth has neither form.
        """
        tests = parse_tests(ground_truth)
        program = extract_program(response)
        if isinstance(tests[0], str):
            outcomes = [self.sandbox.run(program, tests)]
            passed = sum(outcomes[0].passed)
        else:
            outcomes = [self.sandbox.run(program, stdin=test["input"]) for test in tests]
            passed = sum(map(_passes, outcomes, tests))
        if any(outcome.forged for outcome in outcomes):
            return Unscored("bad_verdicts")
        share = passed / len(tests)
        return share if self.partial_credit else float(share == 1.0)


def _passes(outcome: ProgramResult, test: Mapping[str, str]) -> bool:
    right = outcome.output.split() == test["output"].split()
    return outcome.finished and outcome.error is None and right
