"""Outcome rewards of episodes: decode, score, clip, subtract penalties."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mppo.batch.episode import Episode, EpisodeResult
from mppo.batch.prompt import Prompt
from mppo.batch.score import ResponseScore
from mppo.recipe.errors import ConfigError, ConfigIssue, nearest
from mppo.recipe.schema import Recipe
from mppo.recipe.sections.reward import RewardConfig
from mppo.rewards.cache import ScoreCache
from mppo.rewards.division import ScoringError, exchange_scores, score_divided
from mppo.rewards.function import CallableReward, load_function
from mppo.rewards.remote.remote_reward import build_remote_reward
from mppo.rewards.response import Response, RewardFunction, describe
from mppo.rewards.rules import RuleReward
from mppo.rewards.scores import FailedScore, ModelScore, read_scores, without_score
from mppo.rewards.workers.named_code import checked_form


@dataclass(frozen=True)
class Scorer:
    """Decodes responses, calls reward function (None: only the model scores) and, collectively,
    reward model, and shapes the sum of their scores, with the weights ``reward.weight`` and
    ``model_weight``. The shaping changes the outcome reward only, not the rewards of tokens; the
    overlong penalty is full at ``max_response_length`` tokens. With ``has_agent`` responses are
    conversations, of which an agent may have said the score."""

    reward_function: RewardFunction | None
    tokenizer: PreTrainedTokenizerBase
    reward: RewardConfig
    max_response_length: int | None = None
    model: Callable[[Sequence[Episode]], list[ModelScore]] | None = None
    model_weight: float = 1.0
    cache: ScoreCache | None = None
    has_agent: bool = False

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Run the rule verifiers on the first prompt of each data source and verifier; ConfigError
        or ValueError for a prompt that cannot be scored. An agent may give all scores itself: with
        one, a data source needs no verifier."""
        if isinstance(self.reward_function, RuleReward):
            first = {(each.data_source, each.verifier): each for each in reversed(prompts)}
            has_verifier = self.reward_function.has_verifier
            self.reward_function.check(
                each for each in first.values() if not self.has_agent or has_verifier(each)
            )

    def score(self, episodes: Sequence[Episode]) -> list[ResponseScore]:
        """Score responses with reward function and reward model, and shape the scores.

        Collective: each rank scores a part of the responses and gets the scores of all.
        ScoringError on every rank names the prompt of a response that could not be scored.
        """
        return self.finish_scores(self.raw_scores_divided(episodes), episodes)

    def raw_scores(self, episodes: Sequence[Episode]) -> list[ResponseScore]:
        """Score responses by the reward function on this rank, without clip and penalties;
        ValueError if one could not be scored."""
        if self.reward_function is None:
            return [_without_function(each.result, self.reward) for each in episodes]
        pairs = [(each.prompt, each.here.ids) for each in episodes]
        return self._score_ids(pairs, [each.result for each in episodes])

    def raw_scores_divided(self, episodes: Sequence[Episode]) -> list[ResponseScore]:
        """Score responses without clip and penalties; collective as ``score``, and raises as it."""
        if not episodes:
            return []
        known = self._scores_of_conversations(episodes) if self.has_agent else {}
        late = [number for number in range(len(episodes)) if number not in known]
        if late and self.reward_function is None:
            known.update((number, ResponseScore(0.0)) for number in late)
        elif late:  # the same on every rank
            scores = score_divided(self._score_ids, [episodes[number] for number in late])
            known.update(zip(late, scores, strict=True))
        return [known[number] for number in range(len(episodes))]

    def _scores_of_conversations(self, episodes: Sequence[Episode]) -> dict[int, ResponseScore]:
        """Scores of conversations by number, which are scored where their agent ran. Collective;
        raises as ``score``."""
        talks = {n: each for n, each in enumerate(episodes) if each.result is not None}
        mine: dict[int, ResponseScore] = {}
        failure: Exception | None = None
        try:
            mine = dict(zip(talks, self.raw_scores(list(talks.values()))))
        except Exception as error:  # raised after the exchange, in which the other ranks wait
            failure = error
        return exchange_scores(mine, dict(enumerate(episodes)), failure)

    def finish_scores(
        self, scores: Sequence[ResponseScore], episodes: Sequence[Episode]
    ) -> list[ResponseScore]:
        """Add the reward model's scores to the reward function's; clip or replace the sums and
        subtract the penalties. Collective with a reward model; raises as ``score``."""
        if self.model is not None and episodes:
            scores = [
                self._add(rule, found, each.prompt)
                for rule, found, each in zip(scores, self.model(episodes), episodes, strict=True)
            ]
        pairs = zip(scores, episodes)
        return [raw.with_outcome(self._shape(raw.outcome, each)) for raw, each in pairs]

    def _add(self, rule: ResponseScore, found: ModelScore, prompt: Prompt) -> ResponseScore:
        """The weighted sum of both scores, which are among its numbers; a conversation whose agent
        failed keeps its score (``reward.on_error``)."""
        if self.has_agent and rule.error is not None:
            return replace(rule, numbers={**rule.numbers, "rm_score": found.raw})
        if not math.isfinite(found.raw):
            error = f"the reward model's score of {describe(prompt)} is {found.raw}, not finite"
            try:
                failed = without_score(FailedScore(error), self.reward.on_error)
                known = {"answer": rule.answer, "right": rule.right}
                return replace(failed, numbers=rule.numbers, **known)
            except ValueError as stop:  # on every rank: all ranks have these scores
                raise ScoringError(str(stop)) from None
        numbers, weight = {**rule.numbers, "rm_score": found.raw}, self.reward.weight
        if weight is not None:
            numbers["rule_score"] = rule.score
        rule = rule.scaled(weight or 0.0)
        outcome = self.model_weight * found.score + rule.outcome
        return replace(rule.with_outcome(outcome), numbers=numbers)

    def _score_ids(
        self,
        given: Sequence[tuple[Prompt, Tensor]],
        results: Sequence[EpisodeResult | None] | None = None,
    ) -> list[ResponseScore]:
        if not given:
            return []
        ids = [each.tolist() for _, each in given]
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        said = [None] * len(ids) if results is None else results
        return self._score(
            [
                Response(prompt, text, array("i", own), result)
                for (prompt, _), text, own, result in zip(given, texts, ids, said, strict=True)
            ]
        )

    def _score(self, responses: Sequence[Response]) -> list[ResponseScore]:
        def call(some: Sequence[Response]) -> list[ResponseScore]:
            assert self.reward_function is not None
            scores = read_scores(self.reward_function(some), some, self.reward.on_error)
            if not isinstance(self.reward_function, RuleReward):
                return scores
            read = self.reward_function.answer
            return [
                # right is None where the verifier could not score the response
                replace(
                    score,
                    answer=read(each),
                    right=score.score == 1.0 if score.error is None else None,
                )
                for score, each in zip(scores, some, strict=True)
            ]

        known = {i: _by_agent(each.result, self.reward) for i, each in enumerate(responses)}
        left = [each for each, score in zip(responses, known.values()) if score is None]
        found = iter(call(left) if self.cache is None else self.cache.score(call, left))
        scores = [next(found) if score is None else score for score in known.values()]
        return [
            replace(score, numbers={**score.numbers, **each.result.numbers})
            if each.result is not None and each.result.numbers
            else score
            for score, each in zip(scores, responses)
        ]

    def _shape(self, score: float, episode: Episode) -> float:
        reward = self.reward
        if reward.clip is not None:  # as DeepSpeed-Chat
            score = min(max(score, -reward.clip), reward.clip)
        if episode.finish_reason != "stop":
            if reward.missing_eos_score is not None:
                score = reward.missing_eos_score
            score -= reward.missing_eos_penalty or 0.0
        if reward.overlong_buffer_len:
            assert self.max_response_length is not None
            score += overlong_penalty(
                episode.length,
                self.max_response_length,
                reward.overlong_buffer_len,
                reward.overlong_penalty_factor,
            )
        return score


def _by_agent(result: EpisodeResult | None, reward: RewardConfig) -> ResponseScore | None:
    """The score of a conversation that its agent has scored, or failed on; None: not yet scored.
    ValueError if the agent failed, and ``reward.on_error`` is ``stop``."""
    if result is None or (result.reward is None and result.error is None):
        return None
    if result.error is not None:
        return without_score(FailedScore(result.error), reward.on_error)
    assert result.reward is not None
    return ResponseScore(result.reward)


def _without_function(result: EpisodeResult | None, reward: RewardConfig) -> ResponseScore:
    """What the sum with the reward model's score begins with; see ``_by_agent``."""
    score = _by_agent(result, reward)
    if result is None or score is None:
        return ResponseScore(0.0, {} if result is None else result.numbers)
    reported = {} if result.reward is None else {"agent_reward": result.reward}
    return replace(score, numbers={**score.numbers, **result.numbers, **reported})


def build_scorer(
    reward: RewardConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_response_length: int | None = None,
    with_model: bool = False,
    has_agent: bool = False,
    given: Callable[..., Any] | None = None,
) -> Scorer:
    """Build the scorer of a recipe; ConfigError for an unknown verifier, an unusable function or
    URL, or wrong or missing keys. ``with_model``: the caller adds a reward model, which without
    ``reward.weight`` is the only source of scores. ``given`` is the function that
    ``reward.function`` names, of the program that started the run; None: it is imported."""
    buffer, limit = reward.overlong_buffer_len, max_response_length or 0
    if buffer and buffer > limit:
        why = f"longer than data.max_response_length = {limit}"
        raise ConfigError([ConfigIssue("reward.overlong_buffer_len", buffer, why, "lower it")])
    alone = with_model and reward.weight is None
    function = None if alone else build_reward_function(reward, given)
    cache = ScoreCache() if reward.cache else None
    return Scorer(
        function, tokenizer, reward, max_response_length, cache=cache, has_agent=has_agent
    )


def build_run_scorer(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    given: Callable[..., Any] | None = None,
) -> Scorer:
    limit, with_model = recipe.data.max_response_length, recipe.reward_model.in_use
    has_agent = recipe.rollout.agent is not None
    return build_scorer(recipe.reward, tokenizer, limit, with_model, has_agent, given)


def build_reward_function(
    reward: RewardConfig, given: Callable[..., Any] | None = None
) -> RewardFunction:
    """Build the rule, function or client of a server that ``reward.*`` names; raises as
    ``build_scorer``."""
    needed = {"rule": None, "function": "function", "remote": "url"}[reward.name]
    if needed and not getattr(reward, needed):
        why = f"reward.name={reward.name} needs it"
        forms = {"function": "module:function or path.py:function", "url": "http://host:port/path"}
        raise ConfigError([ConfigIssue(f"reward.{needed}", None, why, f"set it: {forms[needed]}")])
    limits: dict[str, Any] = {"timeout_s": reward.timeout_s, "memory_mb": reward.memory_mb}
    if reward.name == "rule" and reward.server_format:
        return RuleReward(reward.verifier, programs=build_remote_reward(reward), **limits)
    if reward.name == "rule":
        _check_keys(reward.kwargs, ("partial_credit", "sandbox"))
        return RuleReward(reward.verifier, **reward.kwargs, **limits)
    if given is not None:
        name, kwargs = str(reward.function), reward.kwargs
        form = checked_form(name, given, kwargs)
        return CallableReward(name, given, kwargs, form, reward.timeout_s)
    if reward.name == "function":
        return load_function(
            str(reward.function),
            reward.kwargs,
            workers=reward.processes,
            batch_size=reward.batch_size,
            **limits,
        )
    return build_remote_reward(reward)


def _check_keys(kwargs: Mapping[str, Any], known: Sequence[str]) -> None:
    issues = []
    for key in kwargs.keys() - set(known):
        guess = nearest(key, known)
        fix = (f"did you mean {guess!r}? " if guess else "") + f"the keys are {', '.join(known)}"
        issues.append(ConfigIssue(f"reward.kwargs.{key}", kwargs[key], "no such parameter", fix))
    if issues:
        raise ConfigError(issues)


def overlong_penalty(response_length: int, max_length: int, buffer: int, factor: float) -> float:
    """Penalise a response that reaches into the last ``buffer`` tokens before the length limit.

    0 up to ``max_length - buffer`` tokens, then linear down to ``-factor`` at ``max_length``
    (Soft Overlong Punishment, DAPO, https://arxiv.org/abs/2503.14476, eq. 13).
    """
    excess = response_length - (max_length - buffer)
    return -factor * min(max(excess / buffer, 0.0), 1.0)
