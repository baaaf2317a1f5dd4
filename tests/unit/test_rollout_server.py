"""Server processes: clean environment, refusals, no orphan whatever way the owner ends."""

import http.server
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import yaml
from hostile_server import echoes, endless, hostile_server, raw, says

from mppo.config.schema import RolloutConfig
from mppo.rollout.sglang.api import SGLangApi
from mppo.rollout.sglang.fleet import API_KEY_VARIABLE, Fleet
from mppo.rollout.sglang.http_client import JsonClient, RequestRefused, ServerLost
from mppo.rollout.sglang.requests import ATTEMPTS, Requests
from mppo.rollout.sglang.server_options import (
    is_ours,
    own_server,
    server_environment,
    server_options,
)
from mppo.rollout.sglang.server_process import ServerError, ServerProcess, clean_environment
from mppo.safety.temporary import SHARED_MEMORY, remove_leftovers

CONFIG = SimpleNamespace(model_type="qwen2")
SLEEPER = [sys.executable, "-c", "import subprocess, sys; subprocess.run(['sleep', '600'])"]


def _wait(condition, limit_s: float = 180.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(condition())


def _running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def _server(tmp_path: Path, command: list[str], timeout_s: float = 30.0, up=lambda port: True):
    return ServerProcess("test", lambda port: command, {}, tmp_path / "log", up, timeout_s)


def test_the_servers_environment_knows_nothing_of_the_launcher(monkeypatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "SLURM_PROCID", "PMI_RANK"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KEPT", "yes")
    environment = clean_environment({"EXTRA": "2"})
    assert environment["KEPT"] == "yes"
    assert environment["EXTRA"] == "2"
    assert not {"RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "SLURM_PROCID", "PMI_RANK"} & set(
        environment
    )


def test_stop_kills_the_whole_tree(tmp_path) -> None:
    server = _server(tmp_path, SLEEPER)
    server.start()
    guard = psutil.Process(server.pid)
    assert _wait(lambda: len(guard.children(recursive=True)) == 2)
    family = [guard, *guard.children(recursive=True)]
    server.stop()
    server.stop()
    assert _wait(lambda: not any(_running(p.pid) for p in family))


def test_an_option_that_a_server_does_not_know_is_told_without_those_it_knows(tmp_path) -> None:
    code = "import argparse; p = argparse.ArgumentParser('server')\nfor i in range(99):"
    code += " p.add_argument(f'--known-{i}')\np.parse_args(['--unknown', '3'])"
    server = _server(tmp_path, [sys.executable, "-c", code], up=lambda port: False)
    server.start()
    with pytest.raises(ServerError) as caught:
        server.wait_until_up()
    assert str(caught.value) == (
        "test ended while starting: unrecognized arguments: --unknown 3 (rollout.server_args)"
    )


def test_a_server_that_ends_or_stays_silent_is_told_with_its_last_words(tmp_path, capsys) -> None:
    talker = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    server = _server(tmp_path, talker, up=lambda port: False)
    server.start()
    with pytest.raises(ServerError, match=r"(?s)ended while starting.*no such model"):
        server.wait_until_up()
    assert f"waiting for test (its output: {tmp_path / 'log'})" in capsys.readouterr().out
    assert not server.alive
    silent = _server(tmp_path, SLEEPER, timeout_s=0.2, up=lambda port: False)
    silent.start()
    with pytest.raises(ServerError, match="start_timeout_s"):
        silent.wait_until_up()


@pytest.mark.parametrize(("kills", "victim"), [(2, "getpid"), (2, "getppid"), (3, "getpid")])
def test_a_server_killed_while_starting_is_started_again(tmp_path, capsys, kills, victim) -> None:
    program = f"""
import os, pathlib, signal, time
starts = pathlib.Path({str(tmp_path / "starts")!r})
count = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (count + 1))
if count < {kills}:
    os.kill(os.{victim}(), signal.SIGKILL)
    time.sleep(60)
pathlib.Path({str(tmp_path / "up")!r}).touch()
time.sleep(600)
"""
    up = (tmp_path / "up").exists
    server = _server(tmp_path, [sys.executable, "-c", program], up=lambda port: up())
    server.start()
    if kills == 3:
        with pytest.raises(ServerError, match="ended while starting"):
            server.wait_until_up()
    else:
        server.wait_until_up()
        assert server.alive
        server.stop()
    assert len((tmp_path / "starts").read_text()) == 3
    assert capsys.readouterr().out.count("was killed while starting; restarting it") == 2


@pytest.mark.parametrize("victim", ["owner", "guard", "server"])
def test_no_orphan_after_kill_9_of(tmp_path, victim: str) -> None:
    program = f"""
import sys, time
from pathlib import Path
from mppo.rollout.sglang.server_process import ServerProcess
server = ServerProcess("x", lambda port: {SLEEPER!r}, {{}}, Path({str(tmp_path / "log")!r}),
                       lambda port: True, 30.0)
server.start()
print(server.pid, flush=True)
time.sleep(600)
"""
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    family: list[psutil.Process] = []
    try:
        guard = psutil.Process(int(owner.stdout.readline()))
        assert _wait(lambda: len(guard.children(recursive=True)) == 2)
        child, grandchild = family = guard.children(recursive=True)
        target = {"owner": owner.pid, "guard": guard.pid, "server": child.pid}[victim]
        os.kill(target, signal.SIGKILL)
        assert _wait(lambda: not _running(child.pid))
        if victim != "guard":
            assert _wait(lambda: not _running(grandchild.pid))
            assert _wait(lambda: not _running(guard.pid))
    finally:
        owner.kill()
        owner.wait()
        for process in family:
            if _running(process.pid):
                process.kill()


def test_shared_memory_of_a_server_is_removed_though_its_owner_was_killed(tmp_path) -> None:
    """SGLang names its segments itself, and a killed server leaves them behind."""
    shared = SHARED_MEMORY / f"server-test-{secrets.token_hex(8)}"
    maps = f"""
import mmap, time
with open({str(shared)!r}, "w+b") as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
open({str(tmp_path / "up")!r}, "w").close()
time.sleep(600)
"""
    program = f"""
import time
from pathlib import Path
from mppo.rollout.sglang.server_process import ServerProcess
from mppo.safety.temporary import SHARED_MEMORY, remove_leftovers
server = ServerProcess("x", lambda port: {[sys.executable, "-c", maps]!r}, {{}},
                       Path({str(tmp_path / "log")!r}),
                       lambda port: Path({str(tmp_path / "up")!r}).exists(), 60.0)
server.start()
server.wait_until_up()
print(server.pid, flush=True)
time.sleep(600)
"""
    place = tmp_path / "temporary"
    place.mkdir()
    owner = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(place)},
    )
    try:
        assert owner.stdout.readline().startswith("mppo: waiting")
        guard = int(owner.stdout.readline())
        owner.kill()
        owner.wait()
        assert _wait(lambda: not _running(guard))
        assert shared.exists()
        assert len(remove_leftovers(place)) == 1
        assert not shared.exists()
    finally:
        owner.kill()
        owner.wait()
        shared.unlink(missing_ok=True)


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
            time.sleep(2)
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


@pytest.fixture
def url() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_client_tells_refusals_from_lost_servers(url: str) -> None:
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
        JsonClient("http://127.0.0.1:9", None, 5.0).get("/")


CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (endless(b"HTTP/1.1 200 OK\r\nX: ", b"y", 0.1), ServerLost, "no answer within 1 s"),
        (endless(CHUNKS, b"1\r\n[\r\n", 0.1), ServerLost, "no answer within 1 s"),
        (raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9999999999\r\n\r\n"), ServerLost, "2048 MiB"),
        (raw(CHUNKS + b"-5\r\n"), ServerLost, "malformed answer"),
        (says(b'{"a": 1, "a": 2}'), ServerLost, "the key 'a' stands twice"),
        (says(b"[" * 100_000), ServerLost, "nested too deeply"),
        (says(b"", b"307 Found", b"Location: http://x/\r\n"), RequestRefused, "not followed"),
        (echoes(b"401"), RequestRefused, r"status 401: .*Authorization: \*\*\*"),
        (says(b"\x1b[2Jsesame-sesame\r\n", b"500 No"), ServerLost, r"status 500: \[2J\*\*\*  $"),
    ],
)
def test_a_hostile_server_is_bounded_and_its_words_are_cleaned(answer, error, message) -> None:
    with hostile_server(answer) as url, pytest.raises(error, match=message) as caught:
        JsonClient(url, "sesame-sesame", timeout_s=1.0).post("/generate", {})
    assert "sesame" not in str(caught.value)


def test_a_kept_alive_connection_that_was_closed_is_opened_again(url: str) -> None:
    client = JsonClient(url, None, timeout_s=30.0)
    for _ in range(3):
        assert client.post("/once", {"a": 1})["got"] == {"a": 1}
        time.sleep(0.1)


def test_a_connection_serves_whichever_thread_asks_next(url: str) -> None:
    client, used = JsonClient(url, None, timeout_s=30.0), []
    for _ in range(3):
        asking = threading.Thread(target=lambda: used.append(client.post("/echo")["from"]))
        asking.start()
        asking.join()
    assert len(used) == 3
    assert len(set(used)) == 1


def test_the_key_is_not_in_the_command_and_its_file_is_private(tmp_path) -> None:
    options = server_options("/model", "float32", 2, 0, True, {"max-total-tokens": 64}, CONFIG)
    server = own_server(0, options, server_environment(2, True, "qwen2"), "secret", tmp_path, 1.0)
    command = server.command(1234)
    assert "secret" not in " ".join(command)
    config = Path(command[-1])
    assert config.stat().st_mode & 0o077 == 0
    text = config.read_text()
    assert "api-key: secret" in text
    assert "max-total-tokens: 64" in text
    assert "host: 127.0.0.1" in text


def test_every_start_gives_the_servers_ranks_a_port_to_meet_at(tmp_path) -> None:
    def nccl_port(server_args: dict[str, object]) -> int:
        options = server_options("/model", "float32", 1, 0, True, server_args, CONFIG)
        server = own_server(0, options, server_environment(1, True, "qwen2"), "key", tmp_path, 1.0)
        return yaml.safe_load(Path(server.command(1234)[-1]).read_text())["nccl-port"]

    drawn = [nccl_port({}) for _ in range(8)]
    assert len(set(drawn)) > 1, "a server that starts again may find the old one taken"
    outgoing = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first_outgoing = int(outgoing.read_text().split()[0]) if outgoing.exists() else 1 << 16
    assert all(1024 <= port < first_outgoing for port in drawn)
    assert nccl_port({"nccl_port": 23456}) == 23456


def test_a_server_on_gpus_begins_at_its_first_and_can_give_memory_back() -> None:
    gpu = server_options("/model", "bfloat16", 4, 4, False, {"mem_fraction_static": 0.6}, CONFIG)
    assert gpu["base_gpu_id"] == 4
    assert gpu["enable_memory_saver"] is True
    assert gpu["mem_fraction_static"] == 0.6


def test_settings_sglang_misses_in_the_folder_are_given() -> None:
    latent = SimpleNamespace(model_type="deepseek_v3", scoring_func="sigmoid")
    options = server_options("/model", "float32", 1, 0, True, {}, latent)
    given = json.loads(options["json_model_override_args"])
    assert given["topk_method"] == "noaux_tc"
    assert "scoring_func" not in given
    assert "json_model_override_args" not in server_options(
        "/model", "float32", 1, 0, True, {}, CONFIG
    )


def test_a_server_of_others_at_the_same_port_is_not_taken_for_ours(url: str, tmp_path) -> None:
    assert is_ours(SGLangApi(url, "key", 5.0))
    stranger = SGLangApi(url, "another", 5.0)
    assert stranger.is_up()
    assert not is_ours(stranger)
    taken = [sys.executable, "-c", "print('address already in use'); raise SystemExit(1)"]
    server = _server(tmp_path, taken, up=lambda port: is_ours(stranger))
    server.start()
    with pytest.raises(ServerError, match=r"(?s)ended while starting.*address already in use"):
        server.wait_until_up()


def test_a_version_without_a_needed_call_is_told(url: str) -> None:
    api = SGLangApi(url, "key", 5.0)
    api.begin_update()  # versions before 0.5.21 have no sessions
    api.end_update()
    with pytest.raises(
        RequestRefused, match=r"update_weights_from_tensor: .*no such call.*0\.5\.21"
    ):
        api.update_from_tensor(["payload"], 1)


def _external(url: str, folder: Path, **options: object) -> Fleet:
    rollout = RolloutConfig(name="sglang", mode="disaggregated", urls=(url,), **options)
    return Fleet(
        rollout, folder, CONFIG, torch.float32, 0, 1, torch.device("cpu"), folder, group=None
    )


def test_an_external_server_that_refuses_the_key_is_told(url: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "another")
    with pytest.raises(RuntimeError, match=rf"{url} .*refuses the key in {API_KEY_VARIABLE}"):
        _external(url, tmp_path).revive()
    monkeypatch.setenv(API_KEY_VARIABLE, "key")
    assert _external(url, tmp_path).revive() == [0]


def test_an_external_address_without_a_server_is_told(url: str, tmp_path) -> None:
    """At once where another program answers, and after ``start_timeout_s`` where none does."""
    wiki = f"{url}/wiki"
    with pytest.raises(
        RuntimeError,
        match=rf"{wiki} .*does not answer like an SGLang server: .*/health: status 404",
    ):
        _external(wiki, tmp_path, start_timeout_s=20.0).revive()
    nowhere = "http://127.0.0.1:9"
    with pytest.raises(RuntimeError, match=rf"no SGLang server answered at {nowhere} .*within 1 s"):
        _external(nowhere, tmp_path, start_timeout_s=1.0).revive()
    assert not is_ours(SGLangApi(wiki, "key", 5.0))


def test_what_no_attempt_serves_is_told_with_the_servers_reason(
    url: str, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "key")
    fleet = _external(url, tmp_path)
    fleet.revive()
    revived: list[int] = []
    asked: list[str] = []

    def restore() -> int:
        revived.extend(fleet.revive())
        return 0

    def call(api: SGLangApi, job: str) -> object:
        asked.append(job)
        served = job == "at once" or (job == "at last" and asked.count(job) == ATTEMPTS)
        return JsonClient(api.url, "key", 30.0).post("/echo" if served else "/fail", {"job": job})

    requests = Requests(fleet, restore, 0, 1, torch.device("cpu"), None)
    answered = requests.collect(["at once", "at last"], call, max_in_flight=1)
    assert [answered[index]["got"]["job"] for index in (0, 1)] == ["at once", "at last"]
    assert asked == ["at once", *["at last"] * ATTEMPTS]
    assert revived == [0] * (ATTEMPTS - 1)
    asked.clear()
    why = rf"1 of 2 requests were not served in {ATTEMPTS} attempts: .*{url}: /fail: status 500"
    with pytest.raises(RuntimeError, match=why):
        requests.collect(["at once", "never"], call, max_in_flight=1)
    assert asked == ["at once", *["never"] * ATTEMPTS]
