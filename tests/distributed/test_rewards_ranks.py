"""Ranks divide the scoring, have the same scores, and fail together."""

import os

import pytest
import torch.distributed as dist
from ranks import start_ranks

from mppo.batch import Prompt, Trajectory
from mppo.config.sections.reward import RewardConfig
from mppo.hub.builtin import load_tokenizer, resolve_model
from mppo.rewards.division import ScoringError, score_divided
from mppo.rewards.early import EarlyScores
from mppo.rewards.response import Response
from mppo.rewards.scorer import Scorer
from mppo.rewards.scores import read_scores

RESPONSES = [Response(Prompt(uid, (1,), "t", "", "p"), "x") for uid in range(5)]


def _worker(rank: int, world: int, store: str, cache: str) -> None:
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world)
    scored: list[int] = []

    def judge(responses):
        scored.extend(response.prompt.uid for response in responses)
        return [response.prompt.uid + 0.5 for response in responses]

    def fails_on_the_fourth(responses):
        return [1.0 if response.prompt.uid != 3 else float("nan") for response in responses]

    def divided(judge) -> list[float]:
        judgements = score_divided(lambda part: read_scores(judge(part), part), RESPONSES)
        return [judgement.score for judgement in judgements]

    try:
        assert divided(judge) == [0.5, 1.5, 2.5, 3.5, 4.5]
        assert scored == list(range(rank, 5, world))
        guilty = 3 % world
        message = "the score of prompt 3" if rank == guilty else f"failed on rank {guilty}"
        with pytest.raises(ScoringError, match=message):
            divided(fails_on_the_fourth)
        different = divided(lambda mine: [os.getpid()] * len(mine))
        agreed: list = [None] * world
        dist.all_gather_object(agreed, different)
        assert agreed == [agreed[0]] * world
        scorer = Scorer(judge, load_tokenizer(resolve_model("builtin:tiny", cache)), RewardConfig())
        everything = [Trajectory(each.prompt, (5,), (0.0,), "stop", 0) for each in RESPONSES]
        early = EarlyScores(scorer)
        scored.clear()
        if rank == world - 1:
            early.take([3, 1], [everything[3], everything[1]])
        finished = early.finish(range(5), everything)
        assert [judgement.score for judgement in finished] == [0.5, 1.5, 2.5, 3.5, 4.5]
        assert scored == [3, 1] * (rank == world - 1) + [0, 2, 4][rank::world]
    finally:
        dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_response_is_scored_once_and_all_ranks_get_all_scores(tmp_path, world: int) -> None:
    start_ranks(_worker, (world, str(tmp_path / "store"), str(tmp_path)), world)
