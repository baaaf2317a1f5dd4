"""Scores by a server: a real HTTP server on the loopback interface answers."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mppo.batch import Prompt
from mppo.rewards.remote import RemoteReward
from mppo.rewards.response import Response

RESPONSES = [Response(Prompt(uid, (1,), "poems", "x", "p"), "a" * uid) for uid in range(5)]


@pytest.fixture
def server():
    """Answers with the next entry of ``server.plan``: a status code, or the body to send; once
    the plan is through, with the length of each response. Requests are kept."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.requests.append((body, dict(self.headers)))
            lengths = [len(item["response"]) for item in body["items"]]
            answer = server.plan.pop(0) if server.plan else json.dumps({"scores": lengths})
            status = answer if isinstance(answer, int) else 200
            content = b"go away" if isinstance(answer, int) else answer.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments):
            """Keep the test's output clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests, server.plan = [], []
    server.url = f"http://127.0.0.1:{server.server_port}/score?token=sesame"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_responses_go_in_batches_and_scores_come_back_in_order(server):
    assert RemoteReward(server.url, batch_size=2)(RESPONSES) == [0, 1, 2, 3, 4]
    assert [len(body["items"]) for body, _ in server.requests] == [2, 2, 1]
    assert server.requests[0][0]["items"][1] == {
        "uid": 1,
        "prompt": "p",
        "response": "a",
        "ground_truth": "x",
        "data_source": "poems",
        "extra": {},
    }


def test_a_temporary_failure_is_retried(server):
    server.plan = [503, 429]
    assert RemoteReward(server.url, backoff_s=0.0)(RESPONSES[:2]) == [0, 1]
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ([503] * 3, "failed 3 times, last: HTTP 503"),
        ([400], "answered HTTP 400 Bad Request: go away"),
        (["oops"], "sent no JSON"),
        (["[1, 2]"], "no such list"),
        (['{"scores": [1]}'], "2 numbers, for prompts 0 to 1; it sent a list of 1"),
    ],
)
def test_a_lasting_failure_is_explained_without_the_urls_secrets(server, plan, message):
    server.plan = plan
    with pytest.raises(ValueError, match=message) as error:
        RemoteReward(server.url, retries=2, backoff_s=0.0)(RESPONSES[:2])
    assert "sesame" not in str(error.value)


def test_a_silent_server_runs_into_the_time_out():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        with pytest.raises(ValueError, match=r"failed 2 times.*timed out"):
            RemoteReward(url, timeout_s=0.1, retries=1, backoff_s=0.0)(RESPONSES[:1])


def test_loopback_is_reached_past_a_proxy_and_the_key_comes_from_the_environment(
    server, monkeypatch
):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("MY_REWARD_KEY", "opensesame")
    judge = RemoteReward(server.url, api_key_env="MY_REWARD_KEY")
    assert judge(RESPONSES[:1]) == [0]
    assert server.requests[0][1]["Authorization"] == "Bearer opensesame"
    assert "opensesame" not in repr(judge)
