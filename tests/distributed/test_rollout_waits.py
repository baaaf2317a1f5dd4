"""Waits for generation and for the servers' memory, longer than every time limit."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import start_ranks
from torch.distributed import distributed_c10d

from mppo.parallel.collectives import all_gather_objects
from mppo.recipe.sections.rollout import RolloutConfig
from mppo.rollout.sglang import requests as requests_module
from mppo.rollout.sglang.fleet import Fleet
from mppo.rollout.sglang.requests import InFlightRequests, Requests
from mppo.supervision import phase

LIMIT_S = 1.0
"""Of a request, and of the collectives of a rank that waits."""
PATIENCE_S = 300.0
"""Of everything else."""
LOOKS = 8


class _Server(http.server.BaseHTTPRequestHandler):
    """What it does depends on the path's first part: ``busy`` generates until somebody has looked
    at its load ``LOOKS`` times, and the others until ``/go``. Time is that of ``clock``, which goes
    on by most of ``LIMIT_S`` with each look."""

    protocol_version = "HTTP/1.1"
    memory_released, looks = 0.0, 0
    generated = threading.Event()

    @classmethod
    def clock(cls) -> float:
        return 0.75 * LIMIT_S * cls.looks

    def do_GET(self) -> None:
        kind = self.path.split("/")[1]
        if "/v1/loads" not in self.path:
            self._say({})
            return
        _Server.looks += 1
        if kind == "busy" and _Server.looks >= LOOKS:
            _Server.generated.set()
        load = {
            "timestamp": 0 if kind == "stuck" else _Server.looks,
            "num_running_reqs": 0 if kind == "idle" else 1,
        }
        self._say({"loads": [load]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/generate"):
            _Server.generated.wait()
            meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-1.0, 7, None]]}
            self._say([{"output_ids": [7], "meta_info": meta}])
            return
        if self.path.endswith("/go"):
            _Server.generated.set()
        if self.path.endswith("/release_memory_occupation"):
            time.sleep(1)
            _Server.memory_released = time.time()
        self._say({"at": _Server.memory_released})

    def _say(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    _Server.looks, _Server.generated = 0, threading.Event()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    _Server.generated.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def clock(monkeypatch) -> None:
    """Limits are of the time that the server counts."""
    for module in ("mppo.safety.bounded_http", "mppo.rollout.sglang.server_api"):
        monkeypatch.setattr(f"{module}.time", SimpleNamespace(monotonic=_Server.clock))


def _fleet(url: str, folder: Path, rank: int, world: int, limit_s: float = LIMIT_S) -> Fleet:
    rollout = RolloutConfig(
        name="sglang", mode="disaggregated", urls=(url,), request_timeout_s=limit_s
    )
    model = SimpleNamespace(model_type="qwen2")
    return Fleet(rollout, folder, model, torch.float32, rank, world, torch.device("cpu"), folder)


def _generate(fleet: Fleet) -> InFlightRequests:
    call = lambda api, job: api.generate([job], {})  # noqa: E731
    return InFlightRequests(lambda: fleet.apis, [[1]], call, 1)


@pytest.mark.usefixtures("clock")
def test_a_long_generation_is_waited_for_while_the_server_computes(url, tmp_path) -> None:
    fleet = _fleet(f"{url}/busy", tmp_path, 0, 1)
    fleet.revive()
    before = phase.progress()
    outcome = _generate(fleet).wait()
    assert outcome.results[0][0].tokens.tolist() == [7]
    assert phase.progress() - before > 2  # the heartbeat sees the server's progress too


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("kind", ["stuck", "idle"])
def test_a_server_that_computes_nothing_is_lost_after_the_limit(url, tmp_path, kind) -> None:
    """``idle``: the server has forgotten the request."""
    fleet = _fleet(f"{url}/{kind}", tmp_path, 0, 1)
    fleet.revive()
    outcome = _generate(fleet).wait()
    assert f"no answer within {LIMIT_S:.0f} s of its last progress" in outcome.lost[0]


def _fails(api, job) -> None:
    raise OSError("no space left")


def _wait_longer_than_a_collective(go: Callable[[], object]) -> None:
    """Let the next wait for the other rank take longer than a collective of this one may: only then
    ``go`` ends it."""
    wait_for_ranks = requests_module.wait_for_ranks

    def wait(world: int) -> None:
        requests_module.wait_for_ranks = wait_for_ranks
        distributed_c10d._set_pg_timeout(timedelta(seconds=LIMIT_S))
        threading.Timer(3 * LIMIT_S, go).start()
        wait_for_ranks(world)
        distributed_c10d._set_pg_timeout(timedelta(seconds=PATIENCE_S))

    requests_module.wait_for_ranks = wait


def _worker(rank: int, world: int, store: str, url: str) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=PATIENCE_S)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world, timeout=limit)
    try:
        fleet = _fleet(f"{url}/gated", Path(store).parent, rank, world, PATIENCE_S)
        fleet.revive()
        requests = Requests(fleet, lambda: 0, rank, world)
        jobs = [[1]] if fleet.mine else []  # the other rank heads no server
        api = fleet.client(f"{url}/gated")
        if not jobs:
            _wait_longer_than_a_collective(lambda: api.client.post("/go"))
        answered = requests.collect(jobs, lambda api, job: api.generate([job], {}), 1)
        assert len(answered) == len(jobs)
        with pytest.raises(RuntimeError, match=r"rank \d: OSError: no space left"):
            requests.collect(jobs, _fails, 1)  # on the rank without a request too
        fleet.sleep(("weights",))
        asleep_at = time.time()  # from here on this rank may use the memory
        assert 0.0 < api.client.post("/when")["at"] <= asleep_at
        assert all_gather_objects(rank) == [0, 1]
    finally:
        dist.destroy_process_group()


@pytest.mark.distributed
def test_a_rank_without_a_server_waits_for_generation_and_for_released_memory(
    url, tmp_path
) -> None:
    start_ranks(_worker, (2, str(tmp_path / "store"), url), 2)
