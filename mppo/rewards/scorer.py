"""Outcome rewards of trajectories: decode, score, clip, subtract penalties."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from mppo.batch import Prompt, Trajectory
from mppo.config.errors import ConfigError, ConfigIssue, nearest
from mppo.config.sections.reward import RewardConfig
from mppo.responses import ResponseRow, Responses
from mppo.rewards.division import score_divided
from mppo.rewards.function import load_function
from mppo.rewards.remote import RemoteReward
from mppo.rewards.response import Response, RewardFunction
from mppo.rewards.rules import RuleReward
from mppo.rewards.scores import ResponseScore, read_scores
from mppo.rewards.shaping import clip_score, overlong_penalty


@dataclass(frozen=True)
class Scorer:
    """Decodes responses, calls the reward function, and clips and penalises the scores.

    Args:
        reward_function: returns the raw scores of responses.
        tokenizer: decodes response tokens without special tokens.
        reward: clip, penalties, and ``on_error`` for a response that cannot be scored.
        max_response_length: in tokens; the overlong penalty is full at this length.
    """

    reward_function: RewardFunction
    tokenizer: PreTrainedTokenizerBase
    reward: RewardConfig
    max_response_length: int | None = None

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Run the rule verifiers on the first prompt of each data source and verifier.

        Raises:
            ConfigError, ValueError: a prompt cannot be scored.
        """
        if isinstance(self.reward_function, RuleReward):
            first = {(each.data_source, each.verifier): each for each in reversed(prompts)}
            self.reward_function.check(first.values())

    def score(self, responses: Responses) -> list[ResponseScore]:
        """Score responses, clip the scores and subtract the penalties.

        Collective: each rank scores a part of the responses and gets the scores of all.

        Args:
            responses: numbered from 0.

        Raises:
            ScoringError: on every rank: a response could not be scored; the message names the
                prompt.
        """
        return self.shape_scores(self.raw_scores_divided(responses), responses.table)

    def raw_scores(self, trajectories: Sequence[Trajectory]) -> list[ResponseScore]:
        """Score trajectories on this rank, without clip and penalties.

        Raises:
            ValueError: a response could not be scored.
        """
        texts = self._texts(trajectories)
        responses = [Response(each.prompt, text) for each, text in zip(trajectories, texts)]
        return self._score(responses) if responses else []

    def raw_scores_divided(self, responses: Responses) -> list[ResponseScore]:
        """Score responses without clip and penalties; collective as ``score``.

        Raises:
            ScoringError: as ``score``.
        """
        if not responses.rows:
            return []
        texts = dict(zip(responses.held, self._texts(list(responses.held.values()))))
        prompts = [row.prompt for row in responses.table]
        homes = [row.home for row in responses.table]
        return score_divided(self._score, texts, prompts, homes)

    def shape_scores(
        self, scores: Sequence[ResponseScore], rows: Sequence[ResponseRow]
    ) -> list[ResponseScore]:
        """Clip or replace raw scores and subtract the penalties."""
        return [replace(raw, score=self._shape(raw.score, row)) for raw, row in zip(scores, rows)]

    def _score(self, responses: Sequence[Response]) -> list[ResponseScore]:
        return read_scores(self.reward_function(responses), responses, self.reward.on_error)

    def _texts(self, trajectories: Sequence[Trajectory]) -> list[str]:
        ids = [trajectory.response_ids.tolist() for trajectory in trajectories]
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True)

    def _shape(self, score: float, row: ResponseRow) -> float:
        reward = self.reward
        if reward.clip is not None:
            score = clip_score(score, reward.clip)
        if row.finish_reason != "stop":
            if reward.missing_eos_score is not None:
                score = reward.missing_eos_score
            score -= reward.missing_eos_penalty or 0.0
        if reward.overlong_buffer_len:
            assert self.max_response_length is not None
            score += overlong_penalty(
                row.length,
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
    """Build the scorer of a recipe.

    Args:
        reward: the recipe's section.
        tokenizer: decodes response tokens.
        max_response_length: ``data.max_response_length``; needed for the overlong penalty.

    Raises:
        ConfigError: an unknown verifier, an unusable function or URL, or wrong or missing keys.
    """
    if reward.overlong_buffer_len:
        limit = max_response_length or 0
        if reward.overlong_buffer_len > limit:
            why = f"longer than data.max_response_length = {limit}"
            issue = ConfigIssue(
                "reward.overlong_buffer_len", reward.overlong_buffer_len, why, "lower it"
            )
            raise ConfigError([issue])
    return Scorer(_build_reward_function(reward), tokenizer, reward, max_response_length)


def _build_reward_function(reward: RewardConfig) -> RewardFunction:
    needed = {"rule": None, "function": "function", "remote": "url"}[reward.name]
    if needed and not getattr(reward, needed):
        why = f"reward.name={reward.name} needs it"
        forms = {"function": "module:function or path.py:function", "url": "http://host:port/path"}
        raise ConfigError([ConfigIssue(f"reward.{needed}", None, why, f"set it: {forms[needed]}")])
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
        fix = (f"did you mean {guess!r}? " if guess else "") + f"the keys are {', '.join(known)}"
        issues.append(ConfigIssue(f"reward.kwargs.{key}", kwargs[key], "no such parameter", fix))
    if issues:
        raise ConfigError(issues)
    return make(*args, **kwargs)
