"""Scores by rules: each prompt's data source picks a verifier."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mppo.batch import Prompt
from mppo.config.errors import ConfigError, Fault, nearest
from mppo.rewards import verifiers
from mppo.rewards.response import Response, describe
from mppo.rewards.sandbox import CodeVerifier, Sandbox


@dataclass(frozen=True)
class RuleJudge:
    """Scores by the verifier that each prompt's data source gets, or by one for all.

    Args:
        verifier: name of a verifier, or None to go by data source.
        partial_credit: part of a point for part of an answer, where the verifier knows it.
        sandbox: limits for programs, the arguments of ``Sandbox``.
    """

    verifier: str | None = None
    partial_credit: bool = False
    sandbox: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.verifier is not None:
            self._find(self.verifier)

    def __call__(self, responses: Sequence[Response]) -> list[float]:
        """Programs run side by side, one per core of this rank; everything else in turn."""
        names = [self._name(response.prompt) for response in responses]
        if verifiers.CODE not in names:
            return [self._score(response) for response in responses]
        cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        with ThreadPoolExecutor(max(cores, 1)) as pool:
            return list(pool.map(self._score, responses))

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Find out before the first rollout that a data source has no verifier, or a ground truth
        that its verifier cannot read."""
        for prompt in prompts:
            self._score(Response(prompt, ""))

    @cached_property
    def _code(self) -> verifiers.Verifier:
        """Made when first needed: it tries the sandbox out."""
        known = Sandbox.__dataclass_fields__
        for key in self.sandbox.keys() - known.keys():
            where = f"reward.kwargs.sandbox.{key}"
            cure = f"there are {', '.join(known)}"
            raise ConfigError([Fault(where, self.sandbox[key], "no such limit", cure)])
        sandbox = Sandbox(**self.sandbox)
        sandbox.check()
        return CodeVerifier(sandbox, self.partial_credit)

    def _name(self, prompt: Prompt) -> str:
        return self.verifier or verifiers.verifier_for(prompt.data_source)

    def _score(self, response: Response) -> float:
        prompt = response.prompt
        verify = self._find(self._name(prompt))
        try:
            return verify(response.text, prompt.ground_truth, prompt.extra)
        except ConfigError:
            raise
        except ValueError as error:
            raise ValueError(f"{describe(prompt)} cannot be verified: {error}") from error

    def _find(self, name: str) -> verifiers.Verifier:
        if name == verifiers.CODE:
            return self._code
        plain = verifiers.PARTIAL if self.partial_credit else verifiers.VERIFIERS
        if name in plain:
            return plain[name]
        known = [*plain, verifiers.CODE]
        if name in verifiers.VERIFIERS:
            why = f"the verifier {name} knows no partial credit"
            cure = f"drop it, or use reward.verifier out of {', '.join(known)}"
            raise ConfigError([Fault("reward.kwargs.partial_credit", True, why, cure)])
        guess = nearest(name, known)
        cure = (f"did you mean {guess!r}? " if guess else "") + f"there are {', '.join(known)}"
        raise ConfigError([Fault("reward.verifier", name, "no such verifier", cure)])
