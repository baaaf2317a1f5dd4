"""Scores from rules: the prompt's data source selects the verifier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mppo import register
from mppo.batch.prompt import Prompt
from mppo.recipe.errors import ConfigError, ConfigIssue
from mppo.recipe.extras import CODE_VERIFIER
from mppo.rewards import verifiers
from mppo.rewards.programs import parse_tests
from mppo.rewards.response import Response, RewardFunction, describe
from mppo.rewards.scores import FailedScore, Unscored
from mppo.rewards.verifiers import extract_answer
from mppo.rewards.workers.pool import Result, WorkerPool, cores
from mppo.rewards.workers.worker import ScoringTask
from mppo.rewards.workers.worker_server import SCORE
from mppo.safety.input_error import InputError
from mppo.supervision.phase import tick

MEMORY_MB = 4096
"""Default limit of the address space of a process that runs a verifier, in MiB."""
ITEMS_PER_PROCESS = {"math_flexible": 200, "reasoning_gym": 1}
"""Responses after which a process is replaced: the caches of sympy grow, and some families of
reasoning_gym execute the response, which can then change the process."""

RuleScore = float | Unscored | FailedScore

ProgramVerifier = Callable[[str, str, Mapping[str, Any]], float | Unscored]
"""As ``verifiers.Verifier``; a program that forges its result has no score."""


@dataclass(frozen=True)
class RuleReward:
    """Scores with the verifier of each prompt's data source, or with one verifier for all prompts.

    Verifiers in worker processes have ``timeout_s`` seconds per response and ``memory_mb`` MiB of
    address space (None: ``MEMORY_MB``). ``programs`` scores the responses of the verifier ``code``;
    None: the sandbox of this machine, with these arguments of ``mppo_sandbox.sandbox.Sandbox``.
    """

    verifier: str | None = None
    partial_credit: bool = False
    sandbox: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 60.0
    memory_mb: int | None = None
    programs: RewardFunction | None = None
    _pools: dict[str, WorkerPool] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.verifier is not None and not self._runs_elsewhere(self.verifier):
            self._find(self.verifier)

    def __call__(self, responses: Sequence[Response]) -> list[Any]:
        """Score responses: programs and worker verifiers in parallel on the cores of this rank, all
        other verifiers one after the other."""
        by_name: dict[str, list[int]] = {}
        for index, response in enumerate(responses):
            by_name.setdefault(self._name(response.prompt), []).append(index)
        scores: list[Any] = [0.0] * len(responses)
        for name, indices in by_name.items():
            part = self._score_with(name, [responses[index] for index in indices])
            for index, score in zip(indices, part):
                scores[index] = score
        return scores

    def answer(self, response: Response) -> str | None:
        """Return the answer that the verifier reads in a response (``extract_answer``)."""
        return extract_answer(self._name(response.prompt), response.text)

    def _score_with(self, name: str, responses: Sequence[Response]) -> list[Any]:
        if name in verifiers.PACKAGES:
            return self._score_in_workers(name, responses)
        if self._runs_elsewhere(name):
            assert self.programs is not None
            return list(self.programs(responses))
        if name != verifiers.CODE:
            return [self._try(response) for response in responses]
        with ThreadPoolExecutor(cores()) as pool:
            return list(pool.map(self._try, responses))

    def _score_in_workers(self, name: str, responses: Sequence[Response]) -> list[RuleScore]:
        scores: list[RuleScore | None] = [None] * len(responses)
        for index, response in enumerate(responses):
            try:
                _check_row(name, response.prompt)
            except ValueError as error:
                scores[index] = FailedScore(str(error))
        left = [each for each, score in zip(responses, scores) if score is None]
        found = iter(self._run(name, left))
        return [_worker_score(next(found)) if score is None else score for score in scores]

    def _try(self, response: Response) -> RuleScore:
        """Score a response; a verifier that cannot read its ground truth gives no score."""
        try:
            return self._score(response)
        except ConfigError:
            raise
        except ValueError as error:
            return FailedScore(str(error))

    def _run(self, name: str, responses: Sequence[Response]) -> list[Result]:
        items = [(each.text, each.prompt.ground_truth, each.prompt.extra) for each in responses]
        return self._pool(name).run(items)

    def _pool(self, name: str) -> WorkerPool:
        if name == "math_flexible":
            verifiers.import_math_verify()
        if name not in self._pools:
            loader = f"{verifiers.__name__}:load_in_worker"
            memory = self.memory_mb or MEMORY_MB
            task = ScoringTask(
                loader, (name,), confined=True, memory_mb=memory, max_items=ITEMS_PER_PROCESS[name]
            )
            self._pools[name] = WorkerPool(task, cores(), self.timeout_s)
        return self._pools[name]

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Score each prompt's ground truth, to find unusable prompts before the first rollout;
        ConfigError without a verifier or its package, InputError if it cannot read its ground
        truth."""
        for prompt in prompts:
            name, response = self._name(prompt), Response(prompt, prompt.ground_truth)
            if self._runs_elsewhere(name):
                with _naming(prompt):
                    parse_tests(prompt.ground_truth)
                continue
            if name not in verifiers.PACKAGES:
                self._score(response)
                continue
            _check_row(name, prompt)
            (result,) = self._run(name, [response])
            if result.outcome != SCORE:
                why = f"{result.outcome} {result.text}"
                raise InputError(f"{describe(prompt)} cannot be verified: {why}")

    def has_verifier(self, prompt: Prompt) -> bool:
        own = prompt.verifier or self.verifier
        return own is not None or verifiers.known_verifier(prompt.data_source) is not None

    @cached_property
    def _code(self) -> ProgramVerifier:
        """The verifier of programs, created at first use because this tests the sandbox."""
        return CODE_VERIFIER.load("reward.verifier", verifiers.CODE)(
            self.sandbox, self.partial_credit
        )

    def _runs_elsewhere(self, name: str) -> bool:
        return name == verifiers.CODE and self.programs is not None

    def _name(self, prompt: Prompt) -> str:
        return prompt.verifier or self.verifier or verifiers.verifier_for(prompt.data_source)

    def _score(self, response: Response) -> float | Unscored:
        prompt = response.prompt
        key = "data.sources.*.verifier" if prompt.verifier else "reward.verifier"
        verify = self._find(self._name(prompt), key)
        with _naming(prompt):
            score = verify(response.text, prompt.ground_truth, prompt.extra)
        tick()
        return score

    def _find(self, name: str, key: str = "reward.verifier") -> ProgramVerifier:
        if name == verifiers.CODE:
            return self._code
        plain = verifiers.PARTIAL if self.partial_credit else register.verifier
        if name in plain:
            return plain[name]
        known = [*plain, verifiers.CODE]
        if name in register.verifier:
            why = f"the verifier {name} gives no partial credit"
            fix = f"remove it, or set {key} to one of {', '.join(known)}"
            raise ConfigError([ConfigIssue("reward.kwargs.partial_credit", True, why, fix)])
        raise ConfigError([verifiers.unknown(key, name, known)])


def _check_row(name: str, prompt: Prompt) -> None:
    if name == "reasoning_gym":
        with _naming(prompt):
            verifiers.gym_entry(prompt.extra)


def _worker_score(result: Result) -> float | Unscored:
    """Read the score of a worker verifier; a failure is ``Unscored``: the response may cause it."""
    if result.outcome == SCORE and result.score in (0.0, 1.0):
        return result.score
    return result.unscored or Unscored("failures")


@contextmanager
def _naming(prompt: Prompt) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise InputError(f"{describe(prompt)} cannot be verified: {error}") from error
