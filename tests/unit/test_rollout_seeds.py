"""Servers draw different random numbers; one that starts again draws others than before."""

from __future__ import annotations

import json
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from hostile_server import hostile_server, says

from mppo.recipe.sections.rollout import RolloutConfig
from mppo.report.run_record import read_events
from mppo.rollout.sglang.fleet import Fleet
from mppo.rollout.sglang.server_options import own_server, server_seed
from mppo.rollout.sglang.server_process import ServerProcess


def test_servers_starts_and_steps_have_seeds_of_their_own() -> None:
    from mppo.rollout.engine import sampling_seed

    drawn = {
        server_seed(sampling_seed(seed, step), server, start)
        for seed in (0, 1, 42)
        for step in (0, 1, 100)
        for server in range(64)
        for start in range(3)
    }
    assert len(drawn) == 3 * 3 * 64 * 3
    assert all(0 <= seed < 1 << 31 for seed in drawn)
    assert server_seed(7, 3, 1) == server_seed(7, 3, 1), "a run that is repeated has the same seeds"


def _fleet(folder, seed: int, make_server: Any, **rollout: Any) -> Fleet:
    return Fleet(
        RolloutConfig(name="sglang", start_timeout_s=20.0, **rollout),
        folder,
        SimpleNamespace(model_type="qwen2"),
        torch.float32,
        0,
        1,
        torch.device("cpu"),
        folder / "rollout",
        make_server,
        seed,
    )


def test_each_start_passes_its_seed_to_the_server_and_notes_it_in_the_log(tmp_path) -> None:
    """The command is replaced by one that writes SGLang's options and answers like a server."""

    def make_server(*arguments: Any, **named: Any) -> ServerProcess:
        server = own_server(*arguments, **named)
        launched = server.command
        server.command = lambda port: ["sh", "-c", f"cat {launched(port)[-1]}; sleep 60"]
        server._is_up = lambda port: "random-seed" in server.log.read_text().rpartition("starts")[2]
        return server

    fleet = _fleet(tmp_path, 5, make_server, servers=2)
    try:
        assert fleet.revive() == [0, 1]
        fleet.lost[1] = "killed"
        assert fleet.revive() == [1]
    finally:
        logs = [process.log.read_text().splitlines() for process in fleet.processes.values()]
        fleet.stop()
    expected = [[server_seed(5, 0, 0)], [server_seed(5, 1, 0), server_seed(5, 1, 1)]]
    for server, (lines, seeds) in enumerate(zip(logs, expected, strict=True)):
        given = [yaml.safe_load(line) for line in lines if line.startswith("random-seed:")]
        assert given == [{"random-seed": seed} for seed in seeds]
        noted = [f"mppo: SGLang server {server} starts with random_seed {seed}" for seed in seeds]
        assert [line for line in lines if line.startswith("mppo: SGLang")] == noted


@pytest.mark.parametrize(
    ("told", "warning"),
    [
        ([{"random_seed": 5}, {"random_seed": 5}, {"random_seed": 6}], "same random_seed 5"),
        ([{"random_seed": 5}, {"random_seed": 6, "dp_size": 2}], "has 2 replicas"),
        ([{"random_seed": 5}, {"random_seed": 6, "dp_size": 1}], None),
        ([{}, {}, [1], None], None),
    ],
)
def test_external_servers_that_repeat_each_others_samples_are_told_once(
    tmp_path, capsys, told: list, warning: str | None
) -> None:
    with ExitStack() as stack:
        urls = tuple(
            stack.enter_context(hostile_server(says(json.dumps(each).encode()))) for each in told
        )
        fleet = _fleet(tmp_path, 0, own_server, mode="disaggregated", urls=urls)
        fleet.revive()
        fleet.lost[0] = "lost"
        fleet.revive()
    events = [event.text for event in read_events(tmp_path) if event.kind == "warning"]
    shown = capsys.readouterr().out.count("mppo: warning: ")
    if warning is None:
        assert not events
        assert not shown
        return
    (event,) = events
    assert shown == 1
    assert warning in event
    assert event.count("http://") == (2 if "same" in warning else 1)
