"""Scores of responses as a flat table of numbers."""

from __future__ import annotations

import pickle
from array import array

import pytest
from varied_scores import plain, random_scores

from mppo.batch import Prompt
from mppo.responses import ResponseRow
from mppo.rewards.division import exchange_scores
from mppo.rewards.score_table import read_score_table, score_table, with_texts
from mppo.rewards.scores import ResponseScore


@pytest.mark.parametrize("count", [0, 1, 8, 100])
def test_a_table_holds_all_bits(count):
    scores = random_scores(count)
    table, text = score_table(scores)
    read = read_score_table(table)
    assert read.text_bytes == len(text)
    assert read.rewarded == [key for key, each in scores.items() if each.token_rewards]
    found = with_texts(read.scores, text)
    expected = {key: plain(each) | {"token_rewards": b""} for key, each in scores.items()}
    assert {key: plain(each) for key, each in found.items()} == expected


def test_whole_numbers_are_scores_too():
    table, _ = score_table({3: ResponseScore(-1, {"acc": 1})})
    assert read_score_table(table).scores == {3: ResponseScore(-1.0, {"acc": 1.0})}


def test_one_rank_alone_keeps_everything():
    scores = random_scores(30)
    prompt = Prompt(0, (1,), "t", "", "p")
    rows = {key: ResponseRow(prompt, "stop", ((0, 7),), 0) for key in scores}
    found = exchange_scores(scores, rows, None)
    expected = {key: plain(each) for key, each in scores.items()}
    assert {key: plain(each) for key, each in found.items()} == expected


def test_names_that_differ_for_every_response_take_no_more_than_their_numbers():
    scores = {key: ResponseScore(0.0, {f"{key}_{i}": 1.0 for i in range(4)}) for key in range(400)}
    table, _ = score_table(scores)
    assert table.nbytes / 400 < 4 * (8 + 400 / 8 + 12) + 16


def test_a_sequence_of_a_batch_takes_few_bytes():
    """1536 responses whose verifier reads answers; what every rank gets of a response."""
    scores = {}
    for key in range(1536):
        right = key % 2
        numbers = {"acc": float(right), "format": 1.0}
        scores[key] = ResponseScore(float(right), numbers, answer=str(key), right=right == 1)
    table, text = score_table(scores)
    assert table.nbytes / 1536 < 33, "key and flags, score, two numbers and their bits"
    assert text.nbytes / 1536 < 9, "to one rank alone"
    assert table.nbytes < len(pickle.dumps(scores)) / 2
    rewarded = {
        key: ResponseScore(1.0, token_total=1.0, token_rewards=array("d", [0.5] * 1000))
        for key in range(16)
    }
    assert score_table(rewarded)[0].nbytes < 16 * 26 + 64, "rewards of tokens do not travel"
