"""Programs and their tests in SandboxFusion (https://github.com/bytedance/SandboxFusion)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mppo.recipe.sections.remote import SandboxFusionOptions
from mppo.rewards.programs import extract_program, parse_tests
from mppo.rewards.response import Response
from mppo.rewards.scores import FailedScore
from mppo.safety.foreign_text import quoted
from mppo.safety.input_error import InputError


class SandboxFusionFormat:
    """The API ``/run_code``: a request runs a program with one test.

    A test passes if the program ends with exit code 0 and writes the expected output, apart from
    line breaks at the end (as in verl's ``sandbox_fusion``); or, for tests that are statements, if
    program and statement end with exit code 0.
    """

    def __init__(self, options: SandboxFusionOptions) -> None:
        self._options = options

    def items(self, responses: Sequence[Response]) -> list[list[Any]]:
        """(program, standard input, expected output or None) of each test."""
        return [self._tests(response) for response in responses]

    def _tests(self, response: Response) -> list[Any]:
        try:
            tests = parse_tests(response.prompt.ground_truth)
        except ValueError as error:
            return [FailedScore(str(error))]
        program = extract_program(response.text)
        if isinstance(tests[0], str):
            return [(f"{program}\n{test}\n", "", None) for test in tests]
        return [(program, str(test["input"]), str(test["output"])) for test in tests]

    def body(self, items: Sequence[Any], ids: Sequence[str]) -> Any:
        ((program, stdin, _),) = items
        options = self._options
        limit = options.memory_limit_mb
        return {
            "code": program,
            "stdin": stdin,
            "language": options.language,
            "compile_timeout": options.compile_timeout_s,
            "run_timeout": options.run_timeout_s,
            **({} if limit is None else {"memory_limit_MB": limit}),
            "files": {},
            "fetch_files": [],
        }

    def read(self, answer: Any, items: Sequence[Any], ids: Sequence[str]) -> list[Any]:
        status = answer.get("status") if isinstance(answer, dict) else None
        if status == "Failed":
            return [0.0]
        if status != "Success":
            message = answer.get("message") if isinstance(answer, dict) else None
            raise InputError(
                "it must answer with the status Success or Failed; it sent "
                f"{quoted(repr(status))} ({quoted(str(message))})"
            )
        run = answer.get("run_result")
        if not isinstance(run, dict) or run.get("status") != "Finished":
            raise InputError("the answer Success has no finished run_result")
        output, code = run.get("stdout") or "", run.get("return_code")
        ((_, _, expected),) = items
        right = expected is None or str(output).rstrip("\n") == expected.rstrip("\n")
        return [float(right and code in (0, None))]

    def combine(self, results: Sequence[Any]) -> Any:
        share = sum(results) / len(results)
        return share if self._options.partial_credit else float(share == 1.0)
