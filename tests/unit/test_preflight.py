"""The preflight's report on a set of nodes."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import socket
from pathlib import Path

import pytest

from mppo.preflight import MARK, NodeReport, compare_nodes, main, node_table, report_node

GOOD = NodeReport(
    host="n1",
    python="3.11.7",
    packages={"torch": "2.13.0"},
    mppo="0.1.0 in /code/mppo",
    device="H100",
    devices=8,
    gpus=8,
    driver="580.95.05",
    torch_cuda="13.0",
    ranks=8,
    free_disk_gb=900.0,
    writable=True,
    port_free=True,
    clock_s=1000.0,
)
OTHER = dataclasses.replace(GOOD, host="n2")


def test_nodes_that_are_alike_and_able_have_no_fault():
    assert compare_nodes([GOOD, OTHER], 2, 1001.0) == []


@pytest.mark.parametrize(
    ("changes", "key", "why"),
    [
        ({"devices": 4}, "n2", "4 GPUs for 8 ranks"),
        ({"devices": 0}, "n2", "torch sees none of them"),
        ({"devices": 0, "driver": "535.183.01"}, "n2", "needs driver 580 or newer"),
        ({"torch_cuda": "12.8"}, "torch_cuda", "n1: 13.0; n2: 12.8"),
        ({"free_disk_gb": 1.0}, "n2", "1.0 GB left"),
        ({"writable": False}, "n2", "is not writable"),
        ({"port_free": False}, "n2", "port is in use"),
        ({"clock_s": 1300.0}, "n2", "+300 s off"),
        ({"python": "3.10.1"}, "python", "n1: 3.11.7; n2: 3.10.1"),
        ({"packages": {"torch": "2.12.0"}}, "packages", "2.12.0"),
        ({"device": "A100"}, "device", "n2: A100"),
        ({"mppo": "0.2.0 in /code/mppo"}, "mppo", "0.2.0"),
    ],
)
def test_one_node_that_differs_is_named(changes, key, why):
    faults = compare_nodes([GOOD, dataclasses.replace(OTHER, **changes)], 2, 1000.0)
    assert [fault.key for fault in faults] == [key]
    assert why in faults[0].why


def test_a_node_that_does_not_answer_is_missed():
    faults = compare_nodes([GOOD], 3, 1000.0)
    assert faults[0].why == "only 1 of 3 nodes answered: n1"


def test_a_node_without_gpus_needs_none():
    without = dataclasses.replace(GOOD, devices=0, gpus=0)
    assert compare_nodes([without], 1, 1000.0) == []


def test_this_node_can_be_looked_at(tmp_path):
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        report = report_node(2, listener.getsockname()[1], tmp_path)
    assert report.packages["torch"] != "absent"
    assert report.writable
    assert not report.port_free
    assert report.host in node_table([report])


def test_judge_reads_reports_between_other_lines(monkeypatch, capsys):
    lines = ["srun: some noise", MARK + json.dumps(dataclasses.asdict(GOOD))]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    assert main(["judge", "--nodes", "2"]) == 2
    shown = capsys.readouterr()
    assert "some noise" in shown.err
    assert "only 1 of 2 nodes answered" in shown.err
    assert "n1" in shown.out


def test_a_recipe_is_judged_for_the_job(tmp_path, capsys, monkeypatch):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("data: {task: arithmetic, train_files: [nowhere.jsonl]}\n")
    assert main(["recipe", "--config", str(recipe), "--world-size", "2"]) == 2
    assert "no such file" in capsys.readouterr().err
    good = str(Path(__file__).parents[2] / "recipes" / "tiny_cpu_tp2_pp2.yaml")
    full = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    assert main(["recipe", "--config", good, "--world-size", "4"]) == 0
    assert "and its disk has 1.0 MB free" in capsys.readouterr().err
