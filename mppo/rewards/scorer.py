"""Trajectories to outcome rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from mppo.batch import Prompt, Trajectory
from mppo.config.errors import ConfigError, ConfigIssue, nearest
from mppo.config.sections.reward import RewardConfig
from mppo.rewards.division import score_divided
from mppo.rewards.function import load_function
from mppo.rewards.judgement import Judgement, read_judgements
from mppo.rewards.remote import RemoteReward
from mppo.rewards.response import Response, RewardFunction
from mppo.rewards.rules import RuleReward
from mppo.rewards.shaping import clip_score, overlong_penalty


@dataclass(frozen=True)
class Scorer:
    """Decodes responses, has them judged, and shapes the scores.

    Args:
        judge: raw scores of responses.
        tokenizer: decodes response tokens, special tokens left out.
        reward: clip, penalties, and what becomes of a response that cannot be judged.
        max_response_length: in tokens; where the overlong penalty ends.
    """

    judge: RewardFunction
    tokenizer: PreTrainedTokenizerBase
    reward: RewardConfig
    max_response_length: int | None = None

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Try the first prompt of each data source on the rule verifiers.

        Raises:
            ConfigError, ValueError: they could not be scored.
        """
        if isinstance(self.judge, RuleReward):
            first = {prompt.data_source: prompt for prompt in reversed(prompts)}
            self.judge.check(first.values())

    def score(self, trajectories: Sequence[Trajectory]) -> list[Judgement]:
        """Every trajectory's judgement, its score clipped, then less the penalties.

        Collective: the ranks share the judging, and all get all judgements.

        Args:
            trajectories: the same on every rank.

        Raises:
            ScoringError: on every rank: a response could not be judged; the message names the
                prompt.
        """
        return self.shaped(self.judged_by_all(trajectories), trajectories)

    def judged(self, trajectories: Sequence[Trajectory]) -> list[Judgement]:
        """Judgements with raw scores, of this rank alone.

        Raises:
            ValueError: a response could not be judged.
        """
        responses = self._responses(trajectories)
        return self._judge(responses) if responses else []

    def judged_by_all(self, trajectories: Sequence[Trajectory]) -> list[Judgement]:
        """The same, the judging shared by the ranks; collective. As ``score`` otherwise."""
        responses = self._responses(trajectories)
        return score_divided(self._judge, responses) if responses else []

    def shaped(
        self, judgements: Sequence[Judgement], trajectories: Sequence[Trajectory]
    ) -> list[Judgement]:
        """The same with scores clipped or replaced, then less the penalties."""
        return [
            replace(judgement, score=self._shape(judgement.score, each))
            for judgement, each in zip(judgements, trajectories)
        ]

    def _judge(self, responses: Sequence[Response]) -> list[Judgement]:
        return read_judgements(self.judge(responses), responses, self.reward.on_error)

    def _responses(self, trajectories: Sequence[Trajectory]) -> list[Response]:
        texts = self.tokenizer.batch_decode(
            [list(trajectory.response_ids) for trajectory in trajectories],
            skip_special_tokens=True,
        )
        return [Response(each.prompt, text) for each, text in zip(trajectories, texts)]

    def _shape(self, score: float, trajectory: Trajectory) -> float:
        reward = self.reward
        if reward.clip is not None:
            score = clip_score(score, reward.clip)
        if trajectory.finish_reason != "stop":
            if reward.missing_eos_score is not None:
                score = reward.missing_eos_score
            score -= reward.missing_eos_penalty or 0.0
        if reward.overlong_buffer_len:
            assert self.max_response_length is not None
            score += overlong_penalty(
                len(trajectory.response_ids),
                self.max_response_length,
                reward.overlong_buffer_len,
                reward.overlong_penalty_factor,
            )
        return score


def build_scorer(
    reward: RewardConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_response_length: int | None = None,
) -> Scorer:
    """The scorer a recipe asks for.

    Args:
        reward: the recipe's section.
        tokenizer: decodes response tokens.
        max_response_length: ``data.max_response_length``; needed for the overlong penalty.

    Raises:
        ConfigError: unknown verifier, unusable function or URL, wrong or missing keys.
    """
    if reward.overlong_buffer_len:
        limit = max_response_length or 0
        if reward.overlong_buffer_len > limit:
            why = f"longer than data.max_response_length = {limit}"
            issue = ConfigIssue(
                "reward.overlong_buffer_len", reward.overlong_buffer_len, why, "less"
            )
            raise ConfigError([issue])
    return Scorer(_build_judge(reward), tokenizer, reward, max_response_length)


def _build_judge(reward: RewardConfig) -> RewardFunction:
    needed = {"rule": None, "function": "function", "remote": "url"}[reward.name]
    if needed and not getattr(reward, needed):
        why = f"reward.name={reward.name} needs it"
        fix = {"function": "module:function or path.py:function", "url": "http://host:port/path"}
        raise ConfigError([ConfigIssue(f"reward.{needed}", None, why, fix[needed])])
    if reward.name == "rule":
        keys = ("partial_credit", "sandbox")
        make = partial(
            RuleReward, reward.verifier, timeout_s=reward.timeout_s, memory_mb=reward.memory_mb
        )
        return _with_kwargs(make, reward.kwargs, keys)
    if reward.name == "function":
        return load_function(
            str(reward.function), reward.kwargs, reward.timeout_s, reward.memory_mb
        )
    keys = ("batch_size", "retries", "backoff_s", "api_key_env")
    return _with_kwargs(RemoteReward, reward.kwargs, keys, str(reward.url), reward.timeout_s)


def _with_kwargs(
    make: Callable[..., RewardFunction], kwargs: dict[str, Any], known: Sequence[str], *args: Any
) -> RewardFunction:
    issues = []
    for key in kwargs.keys() - set(known):
        guess = nearest(key, known)
        fix = (f"did you mean {guess!r}? " if guess else "") + f"there are {', '.join(known)}"
        issues.append(ConfigIssue(f"reward.kwargs.{key}", kwargs[key], "no such parameter", fix))
    if issues:
        raise ConfigError(issues)
    return make(*args, **kwargs)
