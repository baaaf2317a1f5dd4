"""Requests to servers over HTTP: errors, limits, retries, keys, external servers."""

from __future__ import annotations

import http.server
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hostile_server import echoes, endless, hostile_server, raw, says
from test_rollout_server_process import CONFIG, process_server

from mppo.recipe.sections.rollout import RolloutConfig
from mppo.rollout.sglang import server_api
from mppo.rollout.sglang.fleet import API_KEY_VARIABLE, Fleet
from mppo.rollout.sglang.http_client import JsonClient, RequestRefused, ServerLost
from mppo.rollout.sglang.requests import ATTEMPTS, Requests
from mppo.rollout.sglang.server_api import SGLangApi
from mppo.rollout.sglang.server_options import (
    is_ours,
)
from mppo.rollout.sglang.server_process import ServerError

NEVER = threading.Event()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        known = self.path == "/health" or self.headers["Authorization"] == "Bearer key"
        self.send_response(404 if self.path.startswith("/wiki") else 200 if known else 401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        status = {"/refuse": 400, "/fail": 500}.get(
            self.path, 404 if "weight" in self.path else 200
        )
        if self.path == "/slow":
            NEVER.wait(60)
        got = {"got": json.loads(body), "key": self.headers["Authorization"]}
        answer = json.dumps(got | {"from": self.client_address[1]})
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer.encode())
        if self.path == "/once":
            self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(autouse=True)
def _patient(monkeypatch) -> None:
    monkeypatch.setattr(server_api, "_QUICK_S", 60.0)


@pytest.fixture
def url() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_client_distinguishes_refusals_from_lost_servers(url: str) -> None:
    client = JsonClient(url, "key", timeout_s=30.0)
    answer = client.post("/echo", {"a": [1]})
    assert (answer["got"], answer["key"]) == ({"a": [1]}, "Bearer key")
    with pytest.raises(RequestRefused, match="status 400"):
        client.post("/refuse")
    with pytest.raises(ServerLost, match="status 500"):
        client.post("/fail")
    with pytest.raises(ServerLost, match="no answer within"):
        client.post("/slow", timeout_s=0.2)
    with pytest.raises(ServerLost):
        JsonClient("http://127.0.0.1:9", None, 60.0).get("/")


CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (endless(b"HTTP/1.1 200 OK\r\nX: ", b"y", 0.1), ServerLost, "no answer within 1 s"),
        (endless(CHUNKS, b"1\r\n[\r\n", 0.1), ServerLost, "no answer within 1 s"),
        (raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9999999999\r\n\r\n"), ServerLost, "2048 MiB"),
        (raw(CHUNKS + b"-5\r\n"), ServerLost, "malformed answer"),
        (says(b'{"a": 1, "a": 2}'), ServerLost, "the key 'a' occurs twice"),
        (says(b"[" * 100_000), ServerLost, "nested too deeply"),
        (says(b"", b"307 Found", b"Location: http://x/\r\n"), RequestRefused, "not followed"),
        (echoes(b"401"), RequestRefused, r"status 401: .*Authorization: \*\*\*"),
        (says(b"\x1b[2Jsesame-sesame\r\n", b"500 No"), ServerLost, r"status 500: \[2J\*\*\*  $"),
    ],
)
def test_a_hostile_servers_answer_is_limited_and_sanitised(answer, error, message) -> None:
    timeout_s = 1.0 if "no answer" in message else 60.0
    with hostile_server(answer) as url, pytest.raises(error, match=message) as caught:
        JsonClient(url, "sesame-sesame", timeout_s).post("/generate", {})
    assert "sesame" not in str(caught.value)


def test_a_kept_alive_connection_that_was_closed_is_opened_again(url: str) -> None:
    client = JsonClient(url, None, timeout_s=30.0)
    for _ in range(3):
        assert client.post("/once", {"a": 1})["got"] == {"a": 1}
        time.sleep(0.1)


def test_a_connection_is_reused_by_other_threads(url: str) -> None:
    client, used = JsonClient(url, None, timeout_s=30.0), []
    for _ in range(3):
        asking = threading.Thread(target=lambda: used.append(client.post("/echo")["from"]))
        asking.start()
        asking.join()
    assert len(used) == 3
    assert len(set(used)) == 1


def test_another_runs_server_on_the_same_port_does_not_count_as_ours(url: str, tmp_path) -> None:
    assert is_ours(SGLangApi(url, "key", 60.0))
    stranger = SGLangApi(url, "another", 60.0)
    assert stranger.is_up()
    assert not is_ours(stranger)
    taken = [sys.executable, "-c", "print('address already in use'); raise SystemExit(1)"]
    server = process_server(tmp_path, taken, up=lambda port: is_ours(stranger))
    server.start()
    with pytest.raises(ServerError, match=r"(?s)ended while starting.*address already in use"):
        server.wait_until_up()


def test_a_version_without_a_needed_call_is_reported(url: str) -> None:
    api = SGLangApi(url, "key", 60.0)
    api.begin_update()  # versions before 0.5.21 have no sessions
    api.end_update()
    with pytest.raises(
        RequestRefused, match=r"update_weights_from_tensor: .*no such call.*0\.5\.21"
    ):
        api.update_from_tensor(["payload"], 1)


def _external(url: str, folder: Path, **options: object) -> Fleet:
    rollout = RolloutConfig(name="sglang", mode="disaggregated", urls=(url,), **options)
    return Fleet(rollout, folder, CONFIG, torch.float32, 0, 1, torch.device("cpu"), folder)


def test_a_server_that_is_never_idle_is_lost(monkeypatch) -> None:
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += 40.0

    monkeypatch.setattr(
        server_api, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep)
    )
    busy = says(b"pending requests", status=b"400 Bad Request")
    with hostile_server(busy) as url, pytest.raises(ServerLost, match="is not idle within 60 s"):
        SGLangApi(url, None, 60.0).wait_until_idle(60.0)


def test_a_server_that_refuses_to_tell_whether_it_is_idle_is_not_asked_again() -> None:
    refusal = says(b"no key", status=b"401 Unauthorized")
    with hostile_server(refusal) as url, pytest.raises(RequestRefused, match="status 401"):
        SGLangApi(url, None, 60.0).wait_until_idle(600.0)


def test_an_external_server_that_refuses_the_key_is_reported(
    url: str, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "another")
    with pytest.raises(RuntimeError, match=rf"{url} .*refuses the key in {API_KEY_VARIABLE}"):
        _external(url, tmp_path).revive()
    monkeypatch.setenv(API_KEY_VARIABLE, "key")
    assert _external(url, tmp_path).revive() == [0]


def test_an_external_address_without_a_server_is_reported(url: str, tmp_path) -> None:
    """At once if another program answers, after ``start_timeout_s`` if none does."""
    wiki = f"{url}/wiki"
    with pytest.raises(
        RuntimeError,
        match=rf"{wiki} .*does not answer like an SGLang server: .*/health: status 404",
    ):
        _external(wiki, tmp_path, start_timeout_s=60.0).revive()
    nowhere = "http://127.0.0.1:9"
    with pytest.raises(RuntimeError, match=rf"no SGLang server answered at {nowhere} .*within 1 s"):
        _external(nowhere, tmp_path, start_timeout_s=1.0).revive()
    assert not is_ours(SGLangApi(wiki, "key", 60.0))


def test_a_request_that_fails_every_attempt_is_reported_with_the_servers_reason(
    url: str, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "key")
    fleet = _external(url, tmp_path)
    fleet.revive()
    revived: list[int] = []
    requested: list[str] = []

    def restore() -> int:
        revived.extend(fleet.revive())
        return 0

    def call(api: SGLangApi, job: str) -> object:
        requested.append(job)
        served = job == "at once" or (job == "at last" and requested.count(job) == ATTEMPTS)
        return JsonClient(api.url, "key", 30.0).post("/echo" if served else "/fail", {"job": job})

    requests = Requests(fleet, restore, 0, 1)
    answered = requests.collect(["at once", "at last"], call, max_in_flight=1)
    assert [answered[index]["got"]["job"] for index in (0, 1)] == ["at once", "at last"]
    assert requested == ["at once", *["at last"] * ATTEMPTS]
    assert revived == [0] * (ATTEMPTS - 1)
    requested.clear()
    why = rf"1 of 2 requests were not served in {ATTEMPTS} attempts: .*{url}: /fail: status 500"
    with pytest.raises(RuntimeError, match=why):
        requests.collect(["at once", "never"], call, max_in_flight=1)
    assert requested == ["at once", *["never"] * ATTEMPTS]
