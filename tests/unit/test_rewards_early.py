"""Responses that arrive early are scored once, with the same result as at the end."""

import threading

import pytest

from mppo.batch.episode import Episode, EpisodeTokens
from mppo.batch.prompt import Prompt
from mppo.hub.builtin import load_tokenizer, resolve_model
from mppo.recipe.sections.reward import RewardConfig
from mppo.rewards.division import ScoringError
from mppo.rewards.early import EarlyScores
from mppo.rewards.scorer import Scorer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(resolve_model("builtin:tiny", tmp_path_factory.mktemp("models")))


def scores_of(judgements) -> list[float]:
    return [judgement.score for judgement in judgements]


def episodes(tokenizer) -> list[Episode]:
    return [
        Episode.sampled(
            Prompt(uid, (1,), "t", "", "p"), EpisodeTokens(ids, [0.0] * len(ids)), "length", 0
        )
        for uid, ids in enumerate(tokenizer(["1", "12", "3", "45", "6"])["input_ids"])
    ]


def test_early_and_late_responses_are_judged_once(tokenizer) -> None:
    seen: list[int] = []
    begun = threading.Event()

    def judge(responses):
        begun.set()
        seen.extend(response.prompt.uid for response in responses)
        return [float(response.text) for response in responses]

    scorer = Scorer(judge, tokenizer, RewardConfig(missing_eos_penalty=0.5))
    everything = episodes(tokenizer)
    early = EarlyScores(scorer)
    early.take([3, 1], [everything[3], everything[1]])
    assert begun.wait(30), "judging waits for the end of generation"
    early.take([0], everything[:1])
    assert scores_of(early.finish(range(5), everything)) == [0.5, 11.5, 2.5, 44.5, 5.5]
    assert seen == [3, 1, 0, 2, 4]
    seen.clear()
    assert scores_of(scorer.score(everything)) == [0.5, 11.5, 2.5, 44.5, 5.5]


def test_a_failure_of_judging_early_is_reported_at_the_end(tokenizer) -> None:
    scorer = Scorer(lambda responses: [float("nan")] * len(responses), tokenizer, RewardConfig())
    early = EarlyScores(scorer)
    early.take([1], episodes(tokenizer)[1:2])
    with pytest.raises(ScoringError, match="score of prompt 1"):
        early.finish(range(5), episodes(tokenizer))
