"""Scores by rules: each prompt's data source picks a verifier."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mppo.batch import Prompt
from mppo.config.errors import ConfigError, ConfigIssue, nearest
from mppo.rewards import verifiers
from mppo.rewards.judgement import Unscored
from mppo.rewards.response import Response, describe
from mppo.rewards.workers.pool import Result, WorkerPool, cores
from mppo.rewards.workers.sandbox import CodeVerifier, Sandbox
from mppo.rewards.workers.server import SCORE
from mppo.rewards.workers.worker import ScoringTask
from mppo.supervision.phase import tick

MEMORY_MB = 4096
"""Address space of a process that runs a verifier."""
SERVES = {"math": 200, "reasoning_gym": 1}
"""Responses for which a process lives: sympy's caches grow, and a family of reasoning_gym that runs
an answer gives it the process."""


@dataclass(frozen=True)
class RuleReward:
    """Scores by the verifier that each prompt's data source gets, or by one for all.

    Args:
        verifier: name of a verifier, or None to go by data source.
        partial_credit: part of a point for part of an answer, where the verifier knows it.
        sandbox: limits for programs, the arguments of ``Sandbox``.
        timeout_s: seconds for a response, where the verifier cannot bound its time itself.
        memory_mb: address space for it then, None for ``MEMORY_MB``.
    """

    verifier: str | None = None
    partial_credit: bool = False
    sandbox: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 60.0
    memory_mb: int | None = None
    _pools: dict[str, WorkerPool] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.verifier is not None:
            self._find(self.verifier)

    def __call__(self, responses: Sequence[Response]) -> list[float | Unscored]:
        """Side by side, as many as this rank has cores: programs, and verifiers in processes of
        their own; everything else in turn."""
        by_name: dict[str, list[int]] = {}
        for index, response in enumerate(responses):
            by_name.setdefault(self._name(response.prompt), []).append(index)
        scores: list[float | Unscored] = [0.0] * len(responses)
        for name, indices in by_name.items():
            part = self._judge(name, [responses[index] for index in indices])
            for index, score in zip(indices, part):
                scores[index] = score
        return scores

    def _judge(self, name: str, responses: Sequence[Response]) -> list[float | Unscored]:
        if name in verifiers.PACKAGES:
            return [_bounded(result) for result in self._run(name, responses)]
        if name != verifiers.CODE:
            return [self._score(response) for response in responses]
        with ThreadPoolExecutor(cores()) as pool:
            return list(pool.map(self._score, responses))

    def _run(self, name: str, responses: Sequence[Response]) -> list[Result]:
        items = []
        for response in responses:
            prompt = response.prompt
            if name == "reasoning_gym":
                with _naming(prompt):
                    verifiers.gym_entry(prompt.extra)
            items.append((response.text, prompt.ground_truth, prompt.extra))
        return self._pool(name).run(items)

    def _pool(self, name: str) -> WorkerPool:
        if name == "math":
            verifiers.import_math_verify()
        if name not in self._pools:
            loader = f"{verifiers.__name__}:load_in_worker"
            memory = self.memory_mb or MEMORY_MB
            task = ScoringTask(
                loader, (name,), confined=True, memory_mb=memory, serves=SERVES[name]
            )
            self._pools[name] = WorkerPool(task, cores(), self.timeout_s)
        return self._pools[name]

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Find out before the first rollout that a data source has no verifier, or a ground truth
        that its verifier cannot read.

        Raises:
            ConfigError, ValueError: as above.
        """
        for prompt in prompts:
            name, response = self._name(prompt), Response(prompt, prompt.ground_truth)
            if name not in verifiers.PACKAGES:
                self._score(response)
                continue
            (result,) = self._run(name, [response])
            if result.happened != SCORE:
                why = f"{result.happened} {result.text}"
                raise ValueError(f"{describe(prompt)} cannot be verified: {why}")

    @cached_property
    def _code(self) -> CodeVerifier:
        """Made when first needed: it tries the sandbox out."""
        known = Sandbox.__dataclass_fields__
        for key in self.sandbox.keys() - known.keys():
            where = f"reward.kwargs.sandbox.{key}"
            fix = f"there are {', '.join(known)}"
            raise ConfigError([ConfigIssue(where, self.sandbox[key], "no such limit", fix)])
        sandbox = Sandbox(**self.sandbox)
        sandbox.check()
        return CodeVerifier(sandbox, self.partial_credit)

    def _name(self, prompt: Prompt) -> str:
        return self.verifier or verifiers.verifier_for(prompt.data_source)

    def _score(self, response: Response) -> float | Unscored:
        prompt = response.prompt
        verify = self._find(self._name(prompt))
        with _naming(prompt):
            score = verify(response.text, prompt.ground_truth, prompt.extra)
        tick()
        return score

    def _find(self, name: str) -> verifiers.Verifier | CodeVerifier:
        if name == verifiers.CODE:
            return self._code
        plain = verifiers.PARTIAL if self.partial_credit else verifiers.VERIFIERS
        if name in plain:
            return plain[name]
        known = [*plain, verifiers.CODE]
        if name in verifiers.VERIFIERS:
            why = f"the verifier {name} knows no partial credit"
            fix = f"drop it, or use reward.verifier out of {', '.join(known)}"
            raise ConfigError([ConfigIssue("reward.kwargs.partial_credit", True, why, fix)])
        guess = nearest(name, known)
        fix = (f"did you mean {guess!r}? " if guess else "") + f"there are {', '.join(known)}"
        raise ConfigError([ConfigIssue("reward.verifier", name, "no such verifier", fix)])


def _bounded(result: Result) -> float | Unscored:
    """A verifier's score, or none, whatever the reason: the response may be it."""
    if result.happened == SCORE and result.score in (0.0, 1.0):
        return result.score
    return result.unscored or Unscored("failures")


@contextmanager
def _naming(prompt: Prompt) -> Iterator[None]:
    """A ground truth that cannot be read is told with its prompt."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ValueError(f"{describe(prompt)} cannot be verified: {error}") from error
