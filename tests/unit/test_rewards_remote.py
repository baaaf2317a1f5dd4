"""Scores by a server: a real HTTP server on the loopback interface answers."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mppo.batch.prompt import Prompt
from mppo.recipe.sections.reward import RewardConfig
from mppo.rewards.cache import ScoreCache
from mppo.rewards.remote.remote_reward import CircuitBreaker, build_remote_reward
from mppo.rewards.response import Response
from mppo.rewards.scores import FailedScore, read_scores

GO_ON = 0.0
MESSAGES = ({"role": "user", "content": "write"},)
RESPONSES = [
    Response(Prompt(uid, (1,), "poems", "x", "p", messages=MESSAGES), "a" * uid) for uid in range(5)
]


def lengths(body):
    """The length of each response, with its id."""
    items = body["items"]
    return {"scores": [len(i["response"]) for i in items], "ids": [i["id"] for i in items]}


@pytest.fixture
def server():
    """Answers with the next entry of ``server.plan``: a status code, the body to send, or a
    function of the request; once the plan is through, with ``server.then``. Requests are kept."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.requests.append((body, dict(self.headers)))
            answer = server.plan.pop(0) if server.plan else server.then
            if callable(answer):
                answer = answer(body)
            status = answer if isinstance(answer, int) else 200
            content = answer if isinstance(answer, str) else json.dumps(answer)
            content = b"go away" if isinstance(answer, int) else content.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments):
            """Keep the test's output clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests, server.plan, server.then = [], [], lengths
    server.url = f"http://127.0.0.1:{server.server_port}/score?token=sesame"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def client(url, wire="mppo", timeout_s=60.0, **kwargs):
    kwargs = {"backoff_s": 0.0, **kwargs}
    section = RewardConfig(name="remote", url=url, format=wire, timeout_s=timeout_s, kwargs=kwargs)
    return build_remote_reward(section)


def scores(reward, responses):
    return [found.score for found in read_scores(reward(responses), responses)]


def test_responses_go_in_batches_and_scores_come_back_in_order(server):
    assert client(server.url, batch_size=2)(RESPONSES) == [0, 1, 2, 3, 4]
    assert sorted(len(body["items"]) for body, _ in server.requests) == [1, 2, 2]
    items = [item for body, _ in server.requests for item in body["items"]]
    (item,) = [item for item in items if item["uid"] == 1]
    assert len({item.pop("id") for item in items}) == 5
    assert item == {
        "uid": 1,
        "prompt": "p",
        "messages": [{"role": "user", "content": "write"}],
        "response": "a",
        "ground_truth": "x",
        "data_source": "poems",
        "extra": {},
    }


def test_a_temporary_failure_is_retried(server):
    server.plan = [503, 429, "oops", {"scores": [1]}]
    assert client(server.url, retries=4)(RESPONSES[:2]) == [0, 1]
    assert len(server.requests) == 5


def test_only_the_scores_that_are_missing_are_asked_for_again(server):
    server.plan = [lambda body: {**lengths(body), "scores": [7, None]}]
    assert client(server.url)(RESPONSES[:2]) == [7, 1]
    assert [len(body["items"]) for body, _ in server.requests] == [2, 1]


def test_an_error_that_the_server_reports_for_a_response_is_final(server):
    server.plan = [lambda body: {**lengths(body), "scores": [7, {"error": "no verdict"}]}]
    first, second = client(server.url)(RESPONSES[:2])
    assert first == 7
    assert isinstance(second, FailedScore)
    assert "prompt 1 (poems: 'p'), response 'a': the server reports: no verdict" in second.message
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (503, "failed 3 times, last: HTTP 503"),
        (400, "failed: HTTP 400 Bad Request: go away"),
        ("oops", "sent no JSON"),
        ("[1, 2]", "no such list"),
        ({"scores": [1]}, "a list 'scores' of length 2; it sent a list of 1"),
        ({"scores": [1, 2]}, "must repeat the request's ids in a list 'ids'"),
        ({"scores": [1, 2], "ids": ["a", "b"]}, "does not have the ids of the request"),
    ],
)
def test_a_lasting_failure_is_explained_without_the_urls_secrets(server, answer, message):
    server.then = answer
    results = client(server.url, retries=2)(RESPONSES[:2])
    with pytest.raises(ValueError) as error:
        read_scores(results, RESPONSES[:2])
    if answer == 400:  # one refused response must not cost the other its score
        assert len(server.requests) == 3
    assert message in str(error.value)
    assert "sesame" not in str(error.value)
    # on_error: each response, not the batch, decides
    assert all(isinstance(each, FailedScore) for each in results)


def test_a_response_that_the_server_refuses_does_not_spoil_its_batch(server):
    def answer(body):
        return 413 if "aaa" in [item["response"] for item in body["items"]] else lengths(body)

    server.then = answer
    found = client(server.url)([RESPONSES[i] for i in (0, 1, 2, 3)])
    assert found[:3] == [0, 1, 2]
    assert "HTTP 413" in found[3].message


def test_a_silent_server_runs_into_the_time_out():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        (found,) = client(url, timeout_s=0.1, retries=1)(RESPONSES[:1])
    assert "failed 2 times" in found.message
    assert "timed out" in found.message


def test_loopback_is_reached_past_a_proxy_and_the_key_comes_from_the_environment(
    server, monkeypatch
):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("MY_REWARD_KEY", "opensesame")
    judge = client(server.url, api_key_env="MY_REWARD_KEY")
    assert judge(RESPONSES[:1]) == [0]
    assert server.requests[0][1]["Authorization"] == "Bearer opensesame"
    assert "opensesame" not in repr(judge)


def test_a_server_that_fails_again_and_again_gets_no_further_requests(server):
    server.then = 503
    options = {"batch_size": 1, "concurrency": 1, "retries": 1, "max_failures": 2}
    reward = client(server.url, **options, cool_down_s=3600.0)
    found = reward(RESPONSES)
    assert len(server.requests) == 4  # two responses, twice each
    assert all(isinstance(each, FailedScore) for each in found)
    assert "no request is sent, because the last 2 failed" in found[4].message
    assert [each.score for each in read_scores(found, RESPONSES, GO_ON)] == [0.0] * 5


def test_one_request_finds_out_whether_the_server_has_recovered(server):
    options = {"batch_size": 1, "concurrency": 1, "retries": 3, "max_failures": 1}
    reward = client(server.url, **options, cool_down_s=0.0)
    server.then = 503
    assert all(isinstance(each, FailedScore) for each in reward(RESPONSES[:2]))
    assert len(server.requests) == 5  # a probe is not repeated
    server.then = lengths
    assert scores(reward, RESPONSES) == [0, 1, 2, 3, 4]


def test_the_breaker_admits_one_probe_at_a_time():
    now = [0.0]
    breaker = CircuitBreaker(2, 10.0, lambda: now[0])
    breaker.failed("a")
    assert breaker.tries(3) == 3
    breaker.failed("b")
    assert breaker.tries(3) == 0
    now[0] = 10.0
    assert [breaker.tries(3) for _ in range(2)] == [1, 0]
    breaker.failed("c")
    now[0] = 19.0
    assert breaker.tries(3) == 0
    now[0] = 20.0
    assert breaker.tries(3) == 1
    breaker.succeeded()
    assert [breaker.tries(3) for _ in range(2)] == [3, 3]
    breaker.failed("d")
    assert breaker.tries(3) == 3


def test_openrlhf_sends_queries_prompts_and_labels(server):
    server.then = {"rewards": [0.5, 1.5], "extra_logs": {"style": [3, 4], "odd": [1]}}
    found = client(server.url, "openrlhf", batch_size=2)(RESPONSES[1:3])
    assert found == [{"style": 3, "score": 0.5}, {"style": 4, "score": 1.5}]
    assert server.requests[0][0] == {
        "query": ["pa", "paa"], "prompts": ["p", "p"], "labels": ["x", "x"]
    }  # fmt: skip


TEMPLATE = "Question: {prompt}\nAnswer: {response}\nTruth: {ground_truth}\nScore it 1 to 10."


def judged(server, *texts, **options):
    """The results of responses with these texts."""
    responses = [Response(Prompt(i, (1,), "poems", "x", "p"), text) for i, text in enumerate(texts)]
    return client(server.url, "judge", model="m", template=TEMPLATE, **options)(responses)


def says(text):
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def test_a_judge_reads_the_template_and_its_last_score_counts(server):
    server.then = says("Score: 2 at first. But it rhymes.\n**Score:** 7.5")
    assert judged(server, "{ground_truth}") == [7.5]
    ((body, _),) = server.requests
    assert body == {
        "model": "m",
        "messages": [
            {
                "role": "user",
                "content": "Question: p\nAnswer: {ground_truth}\nTruth: x\nScore it 1 to 10.",
            }
        ],
        "temperature": 0.0,
        "max_tokens": 512,
    }


def cached(reward, cache, responses):
    """The scores with ``reward.cache``."""

    def score(some):
        return read_scores(reward(some), some, GO_ON)

    return [found.score for found in cache.score(score, responses)]


def test_a_judge_with_a_cache_is_asked_about_a_text_once(server):
    server.then = lambda body: says(f"Score: {len(server.requests)}")
    reward = client(server.url, "judge", model="m", template="{response}", concurrency=1)
    responses = [Response(Prompt(0, (1,), "poems", "x", "p"), text) for text in "abac"]
    cache = ScoreCache()
    assert cached(reward, cache, responses) == [1.0, 2.0, 1.0, 3.0]
    assert cached(reward, cache, responses[::-1]) == [3.0, 1.0, 2.0, 1.0]
    assert len(server.requests) == 3


def test_a_failed_judgement_is_not_cached(server):
    server.plan = [says("I would rather not."), says("Score: 4")]
    reward, cache = client(server.url, "judge", model="m", template="{response}"), ScoreCache()
    assert cached(reward, cache, RESPONSES[:1]) == [0.0]
    assert cached(reward, cache, RESPONSES[:1]) == [4.0]


@pytest.mark.parametrize(
    ("answer", "options", "message"),
    [
        (says("I would rather not."), {}, "has no score: 'I would rather not.'"),
        (says("Score: 1000000"), {"range": [1, 10]}, "score 1e+06 is outside of 1 to 10"),
        (says("Score: one"), {"pattern": r"Score: (\w+)"}, "the score 'one', not a number"),
        (says("a" * 5000), {"pattern": r"(a+)+b"}, "pattern needs more than 1 s"),
        (says(None), {}, "a text in choices[0].message.content"),
        ({"choices": []}, {}, "a text in choices[0].message.content"),
        ({"choices": [None]}, {}, "a text in choices[0].message.content"),
    ],
)
def test_an_answer_without_a_usable_score_fails_that_response(server, answer, options, message):
    server.then = answer
    (found,) = judged(server, "a", retries=1, **options)
    assert message in found.message
