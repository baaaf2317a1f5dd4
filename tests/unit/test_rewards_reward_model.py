"""The reward model's tokens, the scale of its scores, and their sum with other scores."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mppo.batch.episode import Episode, EpisodeResult, EpisodeTokens
from mppo.batch.prompt import Prompt
from mppo.hub.builtin import load_config, load_tokenizer, resolve_model
from mppo.recipe.errors import ConfigError
from mppo.recipe.load import load_recipe
from mppo.recipe.sections.reward import RewardConfig
from mppo.recipe.sections.reward_model import RewardModelNormalization
from mppo.rewards.division import ScoringError
from mppo.rewards.early import EarlyScores
from mppo.rewards.reward_model.model_scorer import (
    RewardModelScale,
    reward_model_texts,
    scoring_batch,
)
from mppo.rewards.scorer import Scorer, build_scorer
from mppo.rewards.scores import ModelScore

OTHER_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
EOS = 2


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder for tokenizers."""
    return tmp_path_factory.mktemp("tokenizers")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(resolve_model("builtin:tiny"))


def other_tokenizer(models, name: str, template: str | None):
    """The folder of a tokenizer with the same vocabulary and another chat template."""
    own = load_tokenizer(resolve_model("builtin:tiny"))
    own.chat_template = template
    own.save_pretrained(models / name)
    return models / name


def texts_of(tokenizer, *overrides: str):
    recipe = load_recipe(
        None, ["data.task=arithmetic", "reward_model.path=builtin:tiny-reward", *overrides]
    )
    return reward_model_texts(recipe, tokenizer, load_config("builtin:tiny-reward"))


def episode(tokenizer, text: str, finish: str = "stop", chat: bool = True) -> Episode:
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": " 1+2= "}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    if not chat:
        rendered = "1+2="
    ids = tokenizer(rendered)["input_ids"]
    response = tokenizer(text)["input_ids"] + [EOS] * (finish == "stop")
    shown = tuple(messages) if chat else ()
    prompt = Prompt(0, tuple(ids), "sums", "3", rendered, messages=shown)
    tokens = EpisodeTokens(response, [0.0] * len(response))
    return Episode.sampled(prompt, tokens, finish, 0)


def tokens(texts, *episodes: Episode) -> list[torch.Tensor]:
    """The reward model's tokens of these responses."""
    held, lengths = texts.tokens(episodes)
    assert lengths == [len(ids) for ids in held.values()]
    return list(held.values())


def both(one: Episode) -> list[int]:
    """The tokens of prompt and response."""
    return [*one.prompt.token_ids.tolist(), *one.here.ids.tolist()]


def test_equal_tokenizer_and_template_use_the_actors_tokens(models, tokenizer):
    texts = texts_of(tokenizer)
    one = episode(tokenizer, "three")
    (ids,) = tokens(texts, one)
    assert texts.same_tokens
    assert ids.tolist() == both(one)


def test_another_template_renders_the_messages_and_the_answer_again(models, tokenizer):
    folder = other_tokenizer(models, "other", OTHER_TEMPLATE)
    texts = texts_of(tokenizer, f"reward_model.tokenizer_path={folder}")
    found = tokens(texts, episode(tokenizer, " three "), episode(tokenizer, "4", "length"))
    assert [texts.own.decode(ids) for ids in found] == [
        "[system] Add.\n[user] 1+2=\n[assistant] three\n",
        "[system] Add.\n[user] 1+2=\n[assistant] 4\n",
    ]


def test_a_plain_prompt_becomes_the_message_of_a_user(models, tokenizer):
    folder = other_tokenizer(models, "for_plain", OTHER_TEMPLATE)
    keys = ("data.apply_chat_template=false", "reward_model.apply_chat_template=true")
    texts = texts_of(tokenizer, f"reward_model.tokenizer_path={folder}", *keys)
    (ids,) = tokens(texts, episode(tokenizer, "3", chat=False))
    assert texts.own.decode(ids) == "[user] 1+2=\n[assistant] 3\n"


def test_without_a_template_the_text_goes_on_and_ends_as_the_response_did(models, tokenizer):
    plain = texts_of(
        tokenizer,
        "data.apply_chat_template=false", "reward_model.apply_chat_template=false",
    )  # fmt: skip
    assert plain.same_tokens  # the template plays no part
    again = replace(plain, same_tokens=False)
    stopped, cut = (
        episode(tokenizer, "3", chat=False),
        episode(tokenizer, "3", "length", False),
    )
    found = tokens(again, stopped, cut)
    assert [ids.tolist() for ids in found] == [both(each) for each in (stopped, cut)]


def test_of_a_long_text_the_last_tokens_are_kept(models, tokenizer):
    texts = texts_of(tokenizer, "reward_model.max_length=3")
    one = episode(tokenizer, "three")
    (ids,) = tokens(texts, one)
    assert ids.tolist() == one.here.ids[-3:].tolist()
    assert texts_of(tokenizer).max_length == 512  # the model's positions


def test_a_tokenizer_that_cannot_be_used_is_refused(models, tokenizer, tmp_path):
    without = other_tokenizer(models, "without", None)
    with pytest.raises(ConfigError, match="has no chat template"):
        texts_of(tokenizer, f"reward_model.tokenizer_path={without}")
    with pytest.raises(ConfigError, match=r"reward_model\.tokenizer_path"):
        texts_of(tokenizer, f"reward_model.tokenizer_path={tmp_path}")


def test_a_template_that_renders_nothing_or_fails_is_an_error(models, tokenizer):
    for name, template, message in (
        ("empty", "{# nothing #}", "are no token of the reward model"),
        ("raising", "{{ raise_exception('no system role') }}", "no system role"),
    ):
        folder = other_tokenizer(models, name, template)
        texts = texts_of(tokenizer, f"reward_model.tokenizer_path={folder}")
        with pytest.raises(ScoringError, match=message):
            tokens(texts, episode(tokenizer, "3"))


def test_only_the_last_token_of_each_text_has_a_score():
    batch = scoring_batch({0: torch.tensor([5, 6, 7]), 1: torch.tensor([8])}, [3, 1], [-1, -1])
    assert batch.tokens_T.tolist() == [5, 6, 7, 7, 8, 8]
    assert batch.cu_seqlens.tolist() == [0, 4, 6]
    assert batch.value_mask_T.tolist() == [0, 0, 0, 1, 0, 1]  # index t: the state before token t


SCORES = torch.tensor([1.0, 2.0, 6.0])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1.0, 2.0, 6.0]),
        ({"mode": "given", "mean": 2.0, "std": 4.0}, [-0.25, 0.0, 1.0]),
        ({"mode": "config"}, [0.5, 1.0, 3.0]),
        ({"mode": "measured"}, [-2 / math.sqrt(7), -1 / math.sqrt(7), 3 / math.sqrt(7)]),
    ],
)
def test_scales(settings, expected):
    config = SimpleNamespace(mean=0.0, std=2.0)
    scale = RewardModelScale(RewardModelNormalization(**settings), config)
    torch.testing.assert_close(scale(SCORES), torch.tensor(expected))


def test_moments_are_measured_once_and_come_back_from_a_checkpoint():
    measured = RewardModelNormalization(mode="measured")
    scale = RewardModelScale(measured, None)
    assert scale.state_dict() is None
    first = scale(torch.tensor([1.0, 2.0, 6.0, math.nan]))
    torch.testing.assert_close(scale(SCORES), first[:3])
    torch.testing.assert_close(scale(torch.tensor([3.0])), torch.tensor([0.0]))
    resumed = RewardModelScale(measured, None)
    resumed.load_state_dict(scale.state_dict())
    torch.testing.assert_close(resumed(SCORES), first[:3])
    given = RewardModelScale(RewardModelNormalization(mode="given", mean=1.0), None)
    given.load_state_dict(scale.state_dict())
    assert given(SCORES).tolist() == [0.0, 1.0, 5.0]


@pytest.mark.parametrize("scores", [[1.0], [2.0, 2.0], [math.nan, 3.0]])
def test_scores_without_deviation_cannot_be_measured(scores):
    scale = RewardModelScale(RewardModelNormalization(mode="measured"), None)
    with pytest.raises(ValueError, match="no standard deviation to measure"):
        scale(torch.tensor(scores))


def scored(tokenizer, reward: RewardConfig, raw: float, weight: float = 1.0, rule=None):
    """The judgements of a stopped and a cut response by a rule and a model."""

    def model(episodes):
        return [ModelScore(raw, 2 * raw) for _ in episodes]

    scorer = Scorer(rule, tokenizer, reward, None, model, weight)
    answers = [episode(tokenizer, "3"), episode(tokenizer, "3", "length")]
    early = EarlyScores(scorer)
    early.take([0], answers[:1])
    assert early.finish([0, 1], answers) == scorer.score(answers)
    return scorer.score(answers)


def test_a_reward_model_alone_is_the_score(tokenizer):
    first, second = scored(tokenizer, RewardConfig(missing_eos_penalty=0.25), 0.5)
    assert (first.score, second.score) == (1.0, 0.75)
    assert first.numbers == {"rm_score": 0.5}


def test_rule_and_reward_model_add_up_by_weights_before_the_shaping(tokenizer):
    def rule(responses):
        return [{"score": 10.0, "acc": 1.0} for _ in responses]

    reward = RewardConfig(weight=0.1, clip=1.6, missing_eos_penalty=0.5)
    first, second = scored(tokenizer, reward, 0.5, 0.5, rule)
    assert (first.score, second.score) == (1.5, 1.0)
    assert first.numbers == {"acc": 1.0, "rm_score": 0.5, "rule_score": 10.0}
    logged, _ = scored(tokenizer, RewardConfig(weight=0.0), 0.5, rule=rule)
    assert (logged.score, logged.numbers["rule_score"]) == (1.0, 10.0)


def test_a_score_of_the_model_that_is_not_finite_is_an_error(tokenizer):
    with pytest.raises(ScoringError, match=r"score of prompt 0 .* is nan, not finite"):
        scored(tokenizer, RewardConfig(), math.nan)
    first, _ = scored(tokenizer, RewardConfig(on_error=-2.0), math.inf)
    assert first.score == -2.0
    assert "is inf, not finite" in first.error

    def rule(responses):
        return [{"score": 1.0, "acc": 1, "pred": "3"} for _ in responses]

    first, _ = scored(tokenizer, RewardConfig(on_error=0.0, weight=1.0), math.inf, 0.5, rule)
    assert (first.answer, first.right) == ("3", True)


SAID = (
    {"role": "user", "content": "7?"},
    {"role": "assistant", "content": "8"},
    {"role": "tool", "content": "less"},
    {"role": "assistant", "content": "7"},
)
"""A conversation whose beginning is not the prompt."""


def test_an_agents_conversation_is_rendered_from_its_messages(models, tokenizer):
    folder = other_tokenizer(models, "for_agents", OTHER_TEMPLATE)
    texts = texts_of(tokenizer, f"reward_model.tokenizer_path={folder}")
    talk = replace(episode(tokenizer, "7"), result=EpisodeResult(messages=SAID))
    (ids,) = tokens(texts, talk)
    assert texts.own.decode(ids) == "[user] 7?\n[assistant] 8\n[tool] less\n[assistant] 7\n"
    plain = replace(texts_of(tokenizer, "reward_model.apply_chat_template=false"))
    (ids,) = tokens(replace(plain, same_tokens=False), talk)
    assert "1+2=" in plain.own.decode(ids), "the sequence itself"


def test_a_reward_model_scores_the_episodes_of_agents(tokenizer):
    """The agent's reward is a part of the sum by ``reward.weight``; a failure has ``on_error``."""

    def found(reward: RewardConfig, with_rule: bool = False):
        talks = [
            replace(episode(tokenizer, "three"), result=said)
            for said in (
                EpisodeResult(0.5),
                EpisodeResult(None, {"n": 3.0}),
                EpisodeResult(error="x"),
            )
        ]
        rule = (lambda responses: [{"score": 4.0} for _ in responses]) if with_rule else None
        scores = [ModelScore(0.5, 1.0)] * len(talks)
        scorer = Scorer(rule, tokenizer, reward, model=lambda _: scores, has_agent=True)
        early = EarlyScores(scorer)
        early.take([0, 2], [talks[0], talks[2]])
        expected = scorer.score(talks)
        assert early.finish([0, 1, 2], talks) == expected
        return expected

    alone = found(RewardConfig(on_error=-1.0))
    assert [each.score for each in alone] == [1.0, 1.0, -1.0]
    assert alone[0].numbers == {"agent_reward": 0.5, "rm_score": 0.5}
    assert alone[1].numbers == {"n": 3.0, "rm_score": 0.5}
    assert alone[2].error == "x"
    both_scores = found(RewardConfig(on_error=-1.0, weight=2.0), with_rule=True)
    assert [each.score for each in both_scores] == [2.0, 9.0, -1.0]
    with pytest.raises(ScoringError, match="x"):
        found(RewardConfig())


def test_without_a_weight_the_rule_is_not_even_built(tokenizer):
    reward = RewardConfig(name="function", function="no_such_module:score")
    assert build_scorer(reward, tokenizer, with_model=True).reward_function is None
    with pytest.raises(ConfigError):
        build_scorer(reward.model_copy(update={"weight": 0.0}), tokenizer, with_model=True)
