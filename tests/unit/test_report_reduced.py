"""Numbers of hundreds of ranks, and of many layers and steps, make small plots."""

from __future__ import annotations

import json
import math
import random
from statistics import median

import pytest

from mppo.report.history import MEMORY, PROBE
from mppo.report.html.page import page_data
from mppo.report.html.reduced import COLUMNS, WORST, in_columns, rank_lines
from mppo.trainer.metrics import by_rank

RANKS, SLOW, FULL = 512, 317, 44
DRAW = random.Random(0)


def values_of(rank: int) -> float:
    return 1.0 + DRAW.random() / 10


def rows_of(steps: int, named: bool) -> list[tuple[int, dict[str, float]]]:
    """Speed and memory of all ranks: each one, or as a run logs those of many."""
    rows = []
    for step in range(1, steps + 1):
        times = [values_of(rank) for rank in range(RANKS)]
        times[SLOW] += 0.2
        memory = [values_of(rank) for rank in range(RANKS)]
        memory[FULL] += 0.2
        if named:
            row = {f"{PROBE}{rank}": v for rank, v in enumerate(times)}
            row |= {f"{MEMORY}{rank}": v for rank, v in enumerate(memory)}
        else:
            row = by_rank(PROBE, times) | by_rank(MEMORY, memory)
        rows.append((step, row))
    return rows


@pytest.mark.parametrize("named", [True, False], ids=["all logged", "as logged"])
def test_of_many_ranks_the_plot_has_the_middle_the_ends_and_the_worst(named):
    rows = rows_of(20, named)
    for prefix, worst in ((PROBE, SLOW), (MEMORY, FULL)):
        lines = rank_lines(rows, prefix)
        assert [label for label, *_ in lines[:4]] == ["min", "median", "max", f"rank {worst}"]
        assert len(lines) == 3 + WORST
        if named:
            for step, row in rows:
                values = [v for name, v in row.items() if name.startswith(prefix)]
                found = [y[step - 1] for _, _, y in lines[:3]]
                assert found == [min(values), median(values), max(values)]
        _, x, y = lines[3]
        assert x == [step for step, _ in rows]
        assert y == [row[f"{prefix}{worst}"] for _, row in rows]


def test_a_few_ranks_have_a_line_each():
    rows = [(1, by_rank(PROBE, range(12))), (2, {f"{PROBE}3": 5.0, f"{PROBE}4": math.nan})]
    lines = {label: (x, y) for label, x, y in rank_lines(rows, PROBE)}
    assert list(lines) == [f"rank {rank}" for rank in range(12)]
    assert lines["rank 3"] == ([1, 2], [3, 5.0])
    assert lines["rank 4"] == ([1], [4])
    assert rank_lines([(1, {"a": 1.0})], PROBE) == []


def test_a_few_logged_ranks_of_many_do_not_hide_the_others():
    # the highest eight ranks are the same in every step
    rows = [(step, by_rank(MEMORY, range(40))) for step in (1, 2)]
    lines = {label: (x, y) for label, x, y in rank_lines(rows, MEMORY)}
    worst = [f"rank {rank}" for rank in (39, 38, 37, 36)]
    assert list(lines) == ["min", "median", "max", *worst]
    assert lines["median"] == ([1, 2], [19.5, 19.5])


def test_metrics_of_many_ranks_are_few():
    assert by_rank(MEMORY, range(32)) == {f"{MEMORY}{rank}": rank for rank in range(32)}
    found = by_rank(MEMORY, [*range(40), -5])
    assert [found.pop(f"{MEMORY}{name}") for name in ("min", "median", "max")] == [-5, 19, 39]
    assert found == {f"{MEMORY}{rank}": rank for rank in range(32, 40)}


def test_a_column_of_a_heat_map_is_the_largest_of_its_steps():
    values = [1.0, 3.0, None, None, None, 2.0, 7.0]
    assert in_columns(range(1, 8), values, 3) == ([1, 4, 7], [3.0, 2.0, 7.0])
    assert in_columns([1, 2], [None, None], 2) == ([1], [None])


def test_the_page_of_512_ranks_and_61_layers_stays_small(tmp_path):
    layers = {f"actor/moe/layer_{layer}/max_vio": layer / 61 for layer in range(61)}
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step, row in rows_of(1000, named=False):
            row = {name: round(value, 4) for name, value in row.items()}
            file.write(json.dumps({"step": step, **row, **layers}) + "\n")
    plots = {plot["title"]: plot for plot in page_data([tmp_path])["plots"]}
    for title in ("Memory per rank", "Speed of the ranks"):
        assert len(plots[title]["lines"]) == 3 + WORST
    heat = plots["Load of the fullest expert"]
    assert heat["unit"] == "layer, largest of 2 steps"
    assert {(len(line["x"]), len(line["y"])) for line in heat["lines"]} == {(COLUMNS, COLUMNS)}
    assert [line["y"][0] for line in heat["lines"]] == pytest.approx(
        [layer / 61 for layer in range(61)], rel=1e-4
    )
    assert len(json.dumps(plots)) < 600_000
