"""Forms of reward functions: of one response or several, plain or async, with token rewards."""

import pytest
from hanging_clock import hanging_clock

from mppo.batch.prompt import Prompt
from mppo.recipe.errors import ConfigError
from mppo.recipe.sections.reward import RewardConfig
from mppo.rewards.cache import ScoreCache
from mppo.rewards.function import load_function
from mppo.rewards.response import Response
from mppo.rewards.scorer import build_scorer
from mppo.rewards.scores import read_scores

FORMS = """
import asyncio, os

calls, met, all_met = [], [], asyncio.Event()

def one(data_source, solution_str, ground_truth, extra_info, response_ids, rewards=None):
    return {"ids": response_ids, "dense": [float(each) for each in response_ids],
            "both": {"score": 1.0, "acc": 2, "token_rewards": [(0, 0.5), (2, -1), (0, 0.25)]},
            "far": [(3, 1.0)], "before": [(-1, 1.0)], "half": [(0.5, 1.0)], "short": [1.0],
            "nan": [1.0, float("nan"), 2.0], "mixed": [1.0, (0, 1.0), 2.0]}[solution_str]

def many(data_sources, solution_strs, ground_truths, extra_infos, bonus=0.0):
    calls.append(len(solution_strs))
    for text in solution_strs:
        if text == "raise":
            raise KeyError(text)
        if text == "hang":
            hang()
        if text == "exit":
            os._exit(3)
        if text == "memory":
            bytearray(1 << 36)
    if solution_strs[0] == "none":
        return None
    if solution_strs[0] == "fewer":
        return [1.0] * (len(solution_strs) - 1)
    if solution_strs[0] == "pid":
        return [{"score": len(solution_strs), "pid": os.getpid()} for _ in solution_strs]
    return [len(text) + bonus for text in solution_strs]

async def never():
    for _ in range(100):  # the other calls end
        await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + 1e6  # and every time limit
    await asyncio.Event().wait()

async def concurrent(data_source, solution_str, ground_truth, extra_info):
    calls.append(solution_str)
    if solution_str == "meet":
        met.append(solution_str)
        if len(met) == 4:
            all_met.set()
        await all_met.wait()
    if solution_str == "sleep":
        await never()
    if solution_str == "block":
        hang()
    if solution_str == "raise":
        raise KeyError(solution_str)
    return {"score": len(calls), "pid": os.getpid()}

class Remote:
    async def __call__(self, data_sources, solution_strs, ground_truths, extra_infos):
        if "sleep" in solution_strs:
            await never()
        return [2.0] * len(solution_strs)

several = Remote()
"""
PROMPT = Prompt(5, (1,), "poems", "", "p")


@pytest.fixture
def load(tmp_path, monkeypatch):
    path = tmp_path / "forms.py"
    path.write_text(FORMS + hanging_clock(tmp_path / "hanging", monkeypatch))
    return lambda name, kwargs=None, **settings: load_function(
        f"{path}:{name}", kwargs or {}, **settings
    )


def responses(*texts):
    return [Response(PROMPT, text, (7, 8, 9)) for text in texts]


def scored(function, *texts):
    return read_scores(function(responses(*texts)), responses(*texts), on_error=-1.0)


def test_only_the_response_that_makes_a_batched_function_fail_has_no_score(load):
    function = load("many", {"bonus": 0.5}, memory_mb=8192)
    found = scored(function, "a", "raise", "bb", "hang", "exit", "memory", "ccc")
    assert [each.score for each in found] == [1.5, -1, 2.5, -1, -1, -1, 3.5]
    reasons = ["KeyError: 'raise'", "longer than reward.timeout_s", "exit code 3", "memory_mb"]
    errors = [each.error for each in found if each.error]
    assert all(reason in error for reason, error in zip(reasons, errors, strict=True)), errors
    assert [each.unscored for each in found if each.error] == [None, "timeouts", None, "failures"]
    assert "forms.py line" in errors[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("none", "is missing: the function returned NoneType, not a list, for 3 responses"),
        ("fewer", "is missing: 2 results came for 3 responses"),
    ],
)
def test_a_wrong_number_of_results_leaves_the_call_without_scores(load, text, message):
    function = load("many")
    found = scored(function, text, "a", "b")
    assert [each.score for each in found] == [-1] * 3
    assert all(message in each.error for each in found)
    assert [each.score for each in scored(function, "a", "bb")] == [1, 2]


def test_processes_share_the_responses_and_stay(load):
    found = scored(load("many", workers=2), *["pid"] * 5)
    assert [each.score for each in found] == [3, 3, 3, 2, 2]
    assert len({each.numbers["pid"] for each in found}) == 2
    function = load("many", batch_size=2)
    found = scored(function, *["pid"] * 5) + scored(function, "pid")
    assert [each.score for each in found] == [2, 2, 2, 2, 1, 1]
    assert len({each.numbers["pid"] for each in found}) == 1


def test_calls_of_an_async_function_run_concurrently_and_end_by_themselves(load):
    function = load("concurrent")
    found = scored(function, "meet", "sleep", "meet", "raise", "meet", "meet")
    assert [each.error is None for each in found] == [True, False, True, False, True, True]
    assert "longer than reward.timeout_s" in found[1].error
    assert "KeyError: 'raise'" in found[3].error
    (later,) = scored(function, "a")
    assert (later.score, later.numbers) == (7, found[0].numbers)  # the process stays


def test_a_coroutine_that_blocks_costs_no_other_response_its_score(load):
    found = scored(load("concurrent"), "a", "block", "b")
    assert [each.error is None for each in found] == [True, False, True]


def test_a_batched_async_object_is_a_function_too(load):
    found = scored(load("several"), "a", "sleep", "b")
    assert [each.score for each in found] == [2, -1, 2]


def test_a_function_that_has_neither_form_is_refused(tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text("def score(solution_strs, labels): return []\n")
    with pytest.raises(ConfigError, match=r"(?s)do not fit.*or lists as \(data_sources"):
        load_function(f"{path}:score", {})


def test_token_rewards_are_added_where_they_belong(load):
    function = load("one")
    ids, dense, both = scored(function, "ids", "dense", "both")
    assert list(ids.token_rewards) == list(dense.token_rewards) == [7, 8, 9]
    assert (ids.score, ids.token_total, ids.outcome) == (24, 24, 0)
    assert list(both.token_rewards) == [0.75, 0, -1]
    assert (both.score, both.outcome, both.numbers) == (0.75, 1.0, {"acc": 2.0})
    failed = scored(function, "far", "before", "half", "short", "nan", "mixed")
    assert [each.score for each in failed] == [-1] * 6
    messages = [
        "at position 3, and the response has 3 tokens",
        "at position -1, and",
        "nor (position, number) pairs",
        "it has 1 token rewards, and the response has 3 tokens",
        "[1.0, nan, 2.0], neither one finite number for each token",
        "nor (position, number) pairs",
    ]
    for each, message in zip(failed, messages):
        assert message in each.error


def test_scores_of_the_same_content_are_computed_once(load):
    cache, function, seen = ScoreCache(entries=3), load("concurrent"), []

    def score(some):
        seen.extend(each.text for each in some)
        return read_scores(function(some), some, on_error=-1.0)

    first = cache.score(score, responses("a", "b", "a", "raise"))
    assert seen == ["a", "b", "raise"]
    assert [each.score for each in first] == [1, 2, 1, -1]
    again = cache.score(score, [*responses("b", "raise"), Response(PROMPT, "b", (1,))])
    assert seen[3:] == ["raise", "b"], "an error is not remembered; other tokens are other content"
    assert again[0].score == 2
    assert again[2].score != 2
    other = Prompt(6, (1,), "poems", "", "p", {"level": 2})
    cache.score(score, [Response(other, "a", (7, 8, 9)), *responses("c")])
    seen.clear()
    cache.score(score, responses("a", "b", "c"))
    assert seen == ["a", "b"], "the scores not used for longest are forgotten"


def test_the_recipe_turns_the_cache_on():
    assert build_scorer(RewardConfig(), None).cache is None
    assert build_scorer(RewardConfig(cache=True), None).cache is not None
