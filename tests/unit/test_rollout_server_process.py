"""Server processes: environment, options, start-up errors, and no orphan however the owner ends."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml

from mppo.rollout.sglang.server_options import (
    own_server,
    server_environment,
    server_options,
    sleeping_environment,
)
from mppo.rollout.sglang.server_process import ServerError, ServerProcess
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


def process_server(
    tmp_path: Path, command: list[str], timeout_s: float = 30.0, up=lambda port: True
):
    return ServerProcess(
        "test", lambda port: command, dict(os.environ), tmp_path / "log", up, timeout_s
    )


def test_stop_kills_the_process_tree(tmp_path) -> None:
    server = process_server(tmp_path, SLEEPER)
    server.start()
    guard = psutil.Process(server.pid)
    assert _wait(lambda: len(guard.children(recursive=True)) == 2)
    family = [guard, *guard.children(recursive=True)]
    server.stop()
    server.stop()
    assert _wait(lambda: not any(_running(p.pid) for p in family))


def test_an_unknown_server_option_is_reported_without_the_known_ones(tmp_path) -> None:
    code = "import argparse; p = argparse.ArgumentParser('server')\nfor i in range(99):"
    code += " p.add_argument(f'--known-{i}')\np.parse_args(['--unknown', '3'])"
    server = process_server(tmp_path, [sys.executable, "-c", code], up=lambda port: False)
    server.start()
    with pytest.raises(ServerError) as caught:
        server.wait_until_up()
    assert str(caught.value) == (
        "test ended while starting: unrecognized arguments: --unknown 3 (rollout.server_args)"
    )


def test_a_server_that_exits_or_does_not_start_is_reported_with_its_last_output(
    tmp_path, capsys
) -> None:
    talker = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    server = process_server(tmp_path, talker, up=lambda port: False)
    server.start()
    with pytest.raises(ServerError, match=r"(?s)ended while starting.*no such model"):
        server.wait_until_up()
    assert f"waiting for test (its output: {tmp_path / 'log'})" in capsys.readouterr().out
    assert not server.alive
    silent = process_server(tmp_path, SLEEPER, timeout_s=0.2, up=lambda port: False)
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
    server = process_server(tmp_path, [sys.executable, "-c", program], up=lambda port: up())
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
import os, sys, time
from pathlib import Path
from mppo.rollout.sglang.server_process import ServerProcess
server = ServerProcess("x", lambda port: {SLEEPER!r}, dict(os.environ),
                       Path({str(tmp_path / "log")!r}), lambda port: True, 30.0)
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


def test_shared_memory_of_a_server_is_removed_after_its_owner_was_killed(tmp_path) -> None:
    """SGLang chooses the segments' names, and a killed server does not remove them."""
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
import os, time
from pathlib import Path
from mppo.rollout.sglang.server_process import ServerProcess
from mppo.safety.temporary import SHARED_MEMORY, remove_leftovers
server = ServerProcess("x", lambda port: {[sys.executable, "-c", maps]!r}, dict(os.environ),
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


def test_the_key_is_not_in_the_command_and_its_file_is_private(tmp_path) -> None:
    options = server_options("/model", "float32", 2, True, {"max-total-tokens": 64}, CONFIG)
    server = own_server(0, options, server_environment(2, True, "qwen2"), "secret", tmp_path, 1.0)
    command = server.command(1234)
    assert "secret" not in " ".join(command)
    config = Path(command[-1])
    assert config.stat().st_mode & 0o077 == 0
    text = config.read_text()
    assert "api-key: secret" in text
    assert "max-total-tokens: 64" in text
    assert "host: 127.0.0.1" in text


def test_every_start_chooses_a_rendezvous_port_for_the_servers_ranks(tmp_path) -> None:
    def nccl_port(server_args: dict[str, object]) -> int:
        options = server_options("/model", "float32", 1, True, server_args, CONFIG)
        server = own_server(0, options, server_environment(1, True, "qwen2"), "key", tmp_path, 1.0)
        return yaml.safe_load(Path(server.command(1234)[-1]).read_text())["nccl-port"]

    drawn = [nccl_port({}) for _ in range(8)]
    assert len(set(drawn)) > 1, "a server that starts again may find the old one taken"
    outgoing = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first_outgoing = int(outgoing.read_text().split()[0]) if outgoing.exists() else 1 << 16
    assert all(1024 <= port < first_outgoing for port in drawn)
    assert nccl_port({"nccl_port": 23456}) == 23456


def test_a_server_on_training_gpus_can_release_all_its_memory() -> None:
    options = server_options("/model", "bfloat16", 4, False, {"mem_fraction_static": 0.6}, CONFIG)
    assert options["enable_memory_saver"] is True
    assert options["cuda_graph_backend_prefill"] == "disabled", "breakable graphs refuse to start"
    assert options["mem_fraction_static"] == 0.6
    environment = sleeping_environment([3, 1])
    assert environment["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "1"
    assert environment["CUDA_VISIBLE_DEVICES"] == "3,1"
    alone = server_options("/model", "bfloat16", 4, False, {}, CONFIG, sleeps=False)
    assert not {"enable_memory_saver", "cuda_graph_backend_prefill"} & alone.keys()


def test_settings_missing_in_config_json_are_passed_to_sglang() -> None:
    latent = SimpleNamespace(model_type="deepseek_v3", scoring_func="sigmoid")
    options = server_options("/model", "float32", 1, True, {}, latent)
    given = json.loads(options["json_model_override_args"])
    assert given["topk_method"] == "noaux_tc"
    assert "scoring_func" not in given
    assert "json_model_override_args" not in server_options(
        "/model", "float32", 1, True, {}, CONFIG
    )
