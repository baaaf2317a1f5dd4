"""Ranks divide the scoring, have the same scores, and fail together."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch.distributed as dist
from ranks import start_ranks
from varied_scores import plain, random_scores

from mppo.batch.episode import Episode, EpisodeTokens, with_scores
from mppo.batch.prompt import Prompt
from mppo.hub.builtin import load_tokenizer, resolve_model
from mppo.recipe.sections.reward import RewardConfig
from mppo.rewards.division import ScoringError, exchange_scores, score_divided, scoring_ranks
from mppo.rewards.early import EarlyScores
from mppo.rewards.response import Response
from mppo.rewards.scorer import Scorer
from mppo.rewards.scores import read_scores
from mppo.trainer.validation.validation_stage import sample_lines

PROMPTS = [Prompt(uid, (1,), "t", "", "p") for uid in range(5)]


def _at_home(everything: Sequence[Episode], homes: Sequence[int]) -> list[Episode]:
    """The episodes as this rank knows them."""
    rank = dist.get_rank()
    return [
        replace(each, home=home) if home == rank else each.elsewhere(home)
        for each, home in zip(everything, homes, strict=True)
    ]


def _worker(rank: int, world: int, store: str, cache: str) -> None:
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world)
    scored: list[int] = []

    def judge(responses):
        scored.extend(response.prompt.uid for response in responses)
        return [response.prompt.uid + 0.5 for response in responses]

    def steps(responses):
        return [[(0, response.prompt.uid + 1.0)] for response in responses]

    def fails_on_the_fourth(responses):
        return [1.0 if response.prompt.uid != 3 else float("nan") for response in responses]

    def divided(judge, homes=None) -> list[float]:
        homes = homes or [index % world for index in range(5)]
        everything = [
            Episode.sampled(each, EpisodeTokens((each.uid,), (0.0,)), "stop", 0) for each in PROMPTS
        ]
        episodes = _at_home(everything, homes)

        def score(pairs):
            assert all(ids.tolist() == [prompt.uid] for prompt, ids in pairs)
            part = [Response(prompt, "x") for prompt, _ in pairs]
            return read_scores(judge(part), part)

        return [judgement.score for judgement in score_divided(score, episodes)]

    try:
        assert divided(judge) == [0.5, 1.5, 2.5, 3.5, 4.5]
        assert scored == list(range(rank, 5, world))
        scored.clear()
        assert divided(judge, [world - 1] * 5) == [0.5, 1.5, 2.5, 3.5, 4.5]
        assert 0 < len(scored) <= -(-5 // world), "texts move to ranks that received nothing"
        guilty = 3 % world
        message = "the score of prompt 3" if rank == guilty else f"failed on rank {guilty}"
        with pytest.raises(ScoringError, match=message):
            divided(fails_on_the_fourth)
        different = divided(lambda mine: [os.getpid()] * len(mine))
        agreed: list = [None] * world
        dist.all_gather_object(agreed, different)
        assert agreed == [agreed[0]] * world
        scorer = Scorer(judge, load_tokenizer(resolve_model("builtin:tiny", cache)), RewardConfig())
        tokens = EpisodeTokens((5,), (0.0,))
        everything = [Episode.sampled(prompt, tokens, "stop", 0) for prompt in PROMPTS]
        episodes = _at_home(everything, [i % world for i in range(5)])
        early = EarlyScores(scorer)
        scored.clear()
        if rank == world - 1:
            early.take([3, 1], [everything[3], everything[1]])
        finished = early.finish(range(5), episodes)
        assert [judgement.score for judgement in finished] == [0.5, 1.5, 2.5, 3.5, 4.5]
        lines = sample_lines(with_scores(episodes, finished), scorer.tokenizer)
        written = [json.loads(line)["score"] for line in lines]
        assert written == ([] if rank else [0.5, 1.5, 2.5, 3.5, 4.5])
        late = [
            i for i in (0, 2, 4) if scoring_ranks([0, 2 % world, 4 % world], world)[i // 2] == rank
        ]
        assert scored == [3, 1] * (rank == world - 1) + late
        _compare_token_rewards(Scorer(steps, scorer.tokenizer, RewardConfig()), everything)
        _compare_numbers_and_texts()
    finally:
        dist.destroy_process_group()


def _compare_token_rewards(scorer: Scorer, everything: list[Episode]) -> None:
    """Rewards of tokens lie with the tokens, wherever the response was scored."""
    rank, world = dist.get_rank(), dist.get_world_size()
    homes = [min(index, 1) % world for index in range(5)]  # more than the share of one rank
    episodes = _at_home(everything, homes)
    early = EarlyScores(scorer)
    if rank == 0:
        early.take([0], everything[:1])
    for found in (scorer.score(episodes), early.finish(range(5), episodes)):
        assert [each.score for each in found] == [1.0, 2.0, 3.0, 4.0, 5.0]
        mine = [list(each.token_rewards) for each in found]
        assert mine == [[uid + 1.0] if homes[uid] == rank else [] for uid in range(5)]


def _compare_numbers_and_texts() -> None:
    """Every rank gets the same bits and texts, and each home its rewards."""
    rank, world = dist.get_rank(), dist.get_world_size()
    everything = random_scores(40)
    episodes = {
        key: Episode(PROMPTS[0], ((0, max(1, len(each.token_rewards))),), "stop", home % world)
        for home, (key, each) in enumerate(everything.items())
    }
    mine = {key: each for key, each in everything.items() if (key // 3) % world == rank}
    found = exchange_scores(mine, episodes, None)
    assert found.keys() == everything.keys()
    for key, each in found.items():
        known = plain(everything[key])
        if episodes[key].home != rank:
            known = known | {"token_rewards": b""}
        assert plain(each) == known
    message = r"^(scoring failed on rank 0: )?KeyError: 'no \\ud800'$"
    with pytest.raises(ScoringError, match=message):
        exchange_scores(mine, episodes, KeyError("no \ud800") if rank == 0 else None)


@pytest.mark.parametrize(
    ("homes", "world", "ranks"),
    [
        ([0, 1, 0, 1], 2, [0, 1, 0, 1]),
        ([0, 0, 0, 0, 0], 3, [0, 0, 1, 1, 2]),
        ([2, 2, 2, 0], 4, [2, 1, 3, 0]),
        ([1, 0, 0, 0], 2, [1, 0, 0, 1]),
        ([], 2, []),
        ([0, 0], 1, [0, 0]),
    ],
)
def test_responses_are_scored_at_home_up_to_an_even_share(homes, world, ranks) -> None:
    assert scoring_ranks(homes, world) == ranks


@pytest.mark.distributed
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_response_is_scored_once_and_all_ranks_get_all_scores(tmp_path, world: int) -> None:
    start_ranks(_worker, (world, str(tmp_path / "store"), str(tmp_path)), world)
