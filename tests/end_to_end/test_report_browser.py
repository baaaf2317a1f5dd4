"""The HTML report in a headless browser: plots, tokens, narrow and dark screens, a live run."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import pytest
import torch
from browser import Page, open_browser
from recorded_update import measured, recorded_update, schedule_of, write_timeline

from mppo.batch.batch import Batch
from mppo.batch.outputs import Outputs
from mppo.dumps.experience_files import write_share
from mppo.dumps.step_dump import SequenceRow, StepDump, step_folder, write_header, write_pieces
from mppo.pipeline.actions import RoleWork
from mppo.pipeline.timeline import planned_events
from mppo.recipe.sections.algorithm import AlgorithmConfig
from mppo.report.html.page import page_data, page_text
from mppo.report.html.plots import SPECS
from mppo.report.html.program import ReportServer
from mppo.trainer.advantages import estimate

STEPS = 10_000
PHONE = {"width": 360, "height": 800, "deviceScaleFactor": 2, "mobile": True}
DARK = {"name": "prefers-color-scheme", "value": "dark"}
HOSTILE = "</script><img src=x onerror=alert(1)>"
POINTS = """Object.fromEntries(Object.entries(mppoPlots).map(([id, plot]) => {
  const {width, height} = plot.ctx.canvas;
  const {left, top, width: w, height: h} = plot.bbox;
  const pixels = plot.ctx.getImageData(left, top, w, h).data;
  let coloured = 0;  // the grid is grey: red, green and blue are close
  for (let i = 0; i < pixels.length; i += 4) {
    const rgb = [pixels[i], pixels[i + 1], pixels[i + 2]];
    if (pixels[i + 3] && Math.max(...rgb) - Math.min(...rgb) > 40) coloured++;
  }
  return [id, {steps: plot.data[0].length, series: plot.data.length - 1, coloured,
               right: plot.root.getBoundingClientRect().right}];
}))"""


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Page:
    with open_browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


def write_run(folder: Path, steps: int, shift: float = 0.0) -> Path:
    """A run folder with every metric that the page plots."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            wave = shift + math.sin(step / 50)
            row = dict.fromkeys(
                [
                    "critic/score/mean", "objective/kl", "actor/reward_kl_penalty",
                    "policy/entropy_avg", "response_length/mean", "response_length/clip_ratio",
                    "actor/pg_clipfrac", "critic/vf_explained_var",
                    "training/rollout_logprob_diff_mean", "actor/pg_loss", "actor/grad_norm",
                    "actor/lr", "perf/tokens_per_second", "training/skipped_steps",
                    "reward/gsm8k/acc/mean", "reward/errors", "conversation/turns/mean",
                ],
                round(wave, 4),
            )  # fmt: skip
            row |= {"timing_s/step": 3.0, "timing_s/gen": 2 + wave / 9, "timing_s/update": 1.0}
            for rank in range(4):
                row |= {f"perf/rank_memory_gb/{rank}": rank + wave}
                row |= {f"perf/rank_probe_ms/{rank}": 1 + rank / 10}
                row |= {f"actor/moe/layer_{rank}/max_vio": abs(wave) + rank}
            if step % 500 == 0 or step == steps:
                row |= {"val/reward": wave, "val-core/gsm8k/reward/mean": wave}
                row |= {"val-core/gsm8k/acc/mean": wave}
            file.write(json.dumps({"step": step, **row}) + "\n")
    (folder / "recipe.yaml").write_text(
        f"trainer: {{project_name: p, experiment_name: {folder.name}, seed: {shift}}}\n"
    )
    return folder


def write_dump(folder: Path, sequences: int = 1) -> None:
    """A dump of one step: a prompt token and five response tokens, one of hostile text; a second
    sequence leaves the episode of the first after three tokens."""
    mask_T = torch.tensor([0.0, 1, 1, 1, 1, 1]).repeat(sequences)
    numbers_T = torch.tensor([0.0, -0.1, -0.5, -1.0, -2.0, -0.2]).repeat(sequences)
    tokens_T = torch.arange(6).repeat(sequences)
    tokens_T[9:] += 10
    batch = Batch(
        tokens_T=tokens_T, cu_seqlens=torch.arange(0, len(tokens_T) + 1, 6),
        response_mask_T=mask_T, rollout_logprobs_T=numbers_T * 1.1,
        group_B=torch.zeros(sequences, dtype=torch.int64), scores_B=torch.ones(sequences),
        truncated_B=torch.zeros(sequences, dtype=torch.bool),
        weight_version_T=torch.zeros(len(tokens_T), dtype=torch.int64),
    )  # fmt: skip
    values_T = mask_T * torch.tensor([0.0, 0.9, -0.3, 0.4, 0.1, 0.7]).repeat(sequences)
    outputs = Outputs(batch, numbers_T, numbers_T * 0.9, values_T, entropy_T=mask_T * 0.3)
    step = step_folder(folder, 3)
    step.mkdir(parents=True)
    write_share(step, 0, estimate(outputs, AlgorithmConfig(), 0.0))
    texts = dict(enumerate(["2+2=", " four", HOSTILE, "\n", "é", "."]))
    write_pieces(step, 0, texts | {13: " 4", 14: "!", 15: "."})
    row = SequenceRow(0, "src", "2+2=", "4", "stop", [(0, 5)], 1.0, episode=0)
    write_header(step, StepDump(3, "00", 1, 0.1, (row,) * sequences))


BARS = """Object.values(mppoTimelines).flatMap(({plot, rows}) => {
  const {ctx} = plot, {width, height} = ctx.canvas;
  const pixels = ctx.getImageData(0, 0, width, height).data;
  const {left, top} = plot.over.getBoundingClientRect();
  return rows.flatMap((row, place) => row.bars.map(({start, end, action}) => {
    const x = Math.floor(plot.valToPos(start + 0.7 * (end - start), "x", true));
    const at = 4 * (x + width * Math.floor(plot.valToPos(-place, "y", true)));
    const pixel = [...pixels.slice(at, at + 4)];
    return {panel: row.panel, row: row.label, start, end, action, pixel,
            x: left + plot.valToPos((start + end) / 2, "x"), y: top + plot.valToPos(-place, "y")};
  }));
})"""


def point(page: Page, kind: str, x: float, y: float, clicks: int = 1) -> None:
    """Move, press or release the mouse."""
    button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": clicks}
    held = {"buttons": 1} if kind != "mouseReleased" else {}
    page.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button, **held)


def in_view(page: Page) -> None:
    page.look("document.querySelector('[id^=timeline]').scrollIntoView({behavior: 'instant'})")


def url_of(folder: Path, *more: Path) -> str:
    file = folder / "report.html"
    file.write_text(page_text(page_data([folder, *more])))
    return file.as_uri()


def test_ten_thousand_steps_are_drawn_without_an_error_or_a_request(page, tmp_path):
    url = url_of(write_run(tmp_path, STEPS))
    page.open(url)
    assert page.errors == []
    assert page.requests == [url]
    plots = page.look(POINTS)
    assert len(plots) == len(SPECS)
    # validation; a heat map has columns of some steps
    steps = {"plot-1": 20, "plot-2": 20, "plot-22-0": 500}
    for name, found in plots.items():
        assert found["steps"] == steps.get(name, STEPS), name
        assert found["coloured"] > 20, f"{name} has no points: {found}"
    assert plots["plot-19"]["series"] == 4
    print("milliseconds until drawn:", page.look("document.documentElement.dataset.ready"))


def test_a_narrow_dark_screen(page, tmp_path):
    url = url_of(write_run(tmp_path, 50))
    page.send("Emulation.setDeviceMetricsOverride", **PHONE)
    page.send("Emulation.setEmulatedMedia", features=[DARK])
    try:
        page.open(url)
        assert page.look("document.documentElement.scrollWidth") <= 360
        colour = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
        assert max(page.look(colour)) < 60
        assert min(page.look(colour.replace("backgroundColor", "color"))) > 180
        for name, found in page.look(POINTS).items():
            assert found["coloured"] > 20, name
            assert found["right"] <= 360, name
        assert page.errors == []
    finally:
        page.send("Emulation.clearDeviceMetricsOverride")
        page.send("Emulation.setEmulatedMedia", features=[])


def test_tokens_are_coloured_and_show_their_numbers(page, tmp_path):
    write_dump(write_run(tmp_path, 5))
    page.open(url_of(tmp_path))
    spans = "[...document.querySelectorAll('.tokens span')]"
    assert page.look(f"{spans}.map((s) => s.textContent)") == [
        "2+2=", " four", HOSTILE, "\n", "é", ".",
    ]  # fmt: skip
    assert page.look("document.querySelectorAll('.tokens img').length") == 0
    colours = f"{spans}.map((s) => getComputedStyle(s).backgroundColor)"
    by_advantage = page.look(colours)
    assert len(set(by_advantage[1:])) == 5
    choose = (
        "(() => {{ const chosen = document.querySelector('select'); chosen.value = '{}';"
        " chosen.dispatchEvent(new Event('change')); }})()"
    )
    for name in ("ratio", "kl", "value", "entropy"):
        page.look(choose.format(name))
        now = page.look(colours)
        assert now != by_advantage, name
        assert (len(set(now[1:])) == 1) == (name == "entropy"), name
    hover = "new MouseEvent('mouseover', {bubbles: true})"
    page.look(f"{spans}[4].dispatchEvent({hover})")
    shown = page.look("document.querySelector('.numbers').textContent")
    for words in ('"é": logprob -2', "rollout_logprob -2.2", "value 0.1", "kl -0.2", "entropy 0.3"):
        assert words in shown
    assert page.errors == []


def test_an_episode_is_a_tree_of_its_sequences(page, tmp_path):
    write_dump(write_run(tmp_path, 5), sequences=2)
    page.open(url_of(tmp_path))
    texts = "[...document.querySelectorAll('{}')].map((each) => each.textContent)"
    assert page.look(texts.format(".card.tree > .tokens")) == [f"2+2= four{HOSTILE}\né."]
    assert page.look(texts.format(".card.tree > .branch > .tokens")) == [" 4!."]
    of_root, of_branch = page.look(texts.format(".sequence h3"))
    assert of_root.startswith("step 3, sequence 0, of 2 of its episode: score 1")
    assert of_branch.startswith("step 3, sequence 1, from sequence 0 after token 3: score 1")
    colours = "[...document.querySelectorAll('{} > .tokens span')].map((s) => s.style.background)"
    root, branch = (page.look(colours.format(part)) for part in (".tree", ".branch"))
    assert len(branch) == 3
    assert all(branch)
    assert root[1:] != branch
    assert page.errors == []


def test_two_runs_share_their_plots(page, tmp_path):
    runs = [write_run(tmp_path / name, 30, shift) for name, shift in (("a", 0.0), ("b", 2.0))]
    page.open(url_of(*runs))
    legend = page.look("document.querySelector('#plot-6 .u-legend').textContent")
    assert "p/a" in legend
    assert "p/b" in legend
    assert page.look("mppoPlots['plot-6'].data.length") == 3
    cells = "[...document.querySelectorAll('td')]"
    table = page.look(f"{cells}.map((cell) => cell.textContent)")
    assert table[:6] == [
        "trainer.experiment_name", '"a"', '"b"', "trainer.seed", "0.0", "2.0",
    ], "the difference of the recipes comes first"  # fmt: skip
    side = dict(zip(table[6::3], zip(table[7::3], table[8::3])))
    assert side["seconds of update"] == ("30 (33%)", "30 (31%)")
    assert page.errors == []


def test_small_numbers_have_labels_and_a_line_of_zeros_an_axis_to_one(page, tmp_path):
    rows = [(i, {"actor/lr": 1e-6, "policy/entropy_avg": 5.539 + i * 2e-5}) for i in range(1, 9)]
    lines = [json.dumps({"step": i, "critic/score/mean": 0, **row}) + "\n" for i, row in rows]
    first = json.dumps({"step": 0, "val-core/sums/reward/mean": 0.5}) + "\n"
    (tmp_path / "metrics.jsonl").write_text("".join([first, *lines]))
    page.open(url_of(tmp_path))
    plot = "Object.entries(mppoPlots).find(([id]) => {0} === id)[1]"
    number = {spec.title: f"plot-{i}" for i, spec in enumerate(SPECS)}
    labels = ".axes[1]._values"
    for title in ("Learning rates", "Entropy"):
        found = page.look(plot.format(f"'{number[title]}'") + labels)
        assert len(set(found)) == len(found) > 2, (title, found)
    assert all(
        "e-" in label for label in page.look(plot.format(f"'{number['Learning rates']}'") + labels)
    )
    scale = page.look(plot.format(f"'{number['Reward']}'") + ".scales.y")
    assert (scale["min"], scale["max"]) == (0, 1)
    scale = page.look(plot.format(f"'{number['Validation by source']}'") + ".scales.x")
    assert (scale["min"], scale["max"]) == (-1, 1), "around the only point"
    assert page.errors == []


def test_all_metrics_are_searched_and_drawn(page, tmp_path):
    page.open(url_of(write_run(tmp_path, 30)))
    rows = "[...document.querySelectorAll('#all tbody tr')].filter((row) => !row.hidden)"
    assert page.look(f"{rows}.length") > 30
    find = "(() => { const box = document.getElementById('search'); box.value = 'ACC reward'; "
    page.look(find + "box.dispatchEvent(new Event('input')); })()")
    assert page.look(f"{rows}.map((row) => row.querySelector('button').textContent)") == [
        "reward/gsm8k/acc/mean"
    ]
    page.look("document.querySelector('#all tr:not([hidden]) button').click()")
    assert page.look("mppoPlots['reward/gsm8k/acc/mean'].data[0].length") == 30
    answers = page.look(
        "[...document.querySelectorAll('.answers dt')].map((each) => each.textContent)"
    )
    assert answers == [
        "Does it learn?", "Is it stable?", "Where does the time go?", "What is wrong?",
    ]  # fmt: skip
    assert page.errors == []


def test_a_served_page_follows_its_run(page, tmp_path):
    write_run(tmp_path, 4)
    with ReportServer([tmp_path], 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page.open(server.url)
        assert page.look("mppoPlots['plot-6'].data[0].length") == 4
        write_run(tmp_path, 9)
        page.until("mppoPlots['plot-6'].data[0].length === 9")
        assert page.errors == []
        assert {url for url in page.requests if not url.startswith(server.url)} <= {"data:,"}
        server.shutdown()


def test_a_timeline_has_a_bar_for_each_event_and_names_it(page, tmp_path):
    schedule = schedule_of()
    write_timeline(write_run(tmp_path, 5), 3, recorded_update(schedule))
    page.open(url_of(tmp_path))
    in_view(page)
    bars = page.look(BARS)
    events = [e for rows in (planned_events(schedule), measured(schedule)) for r in rows for e in r]
    assert [tuple(bar["action"]) for bar in bars] == [
        (e.action.kind, *e.action.numbers) for e in events
    ]
    assert [bar["row"] for bar in bars if bar["action"][3] == 0 and bar["action"][0] == "step"] == [
        "rank 0", "rank 1", "rank 2",
    ]  # fmt: skip
    painted = [max(bar["pixel"][:3]) - min(bar["pixel"][:3]) > 60 for bar in bars]
    steps = [bar["action"][0] == "step" for bar in bars]
    assert [bar["pixel"][3] > 0 for bar in bars] == [True] * len(bars)
    assert painted == [not step for step in steps], "each pass in the colour of its role"
    for bar in (bars[0], bars[-2], bars[-1]):
        kind, role, mini_batch, micro_batch, _ = bar["action"]
        point(page, "mouseMoved", bar["x"], bar["y"])
        shown = page.look("document.querySelector('[id^=timeline] .numbers').textContent")
        assert shown.startswith(f"{bar['row']} ({bar['panel']}): {role}, mini-batch {mini_batch}, ")
        name = "optimizer step" if kind == "step" else f"micro-batch {micro_batch}, {kind}"
        assert f"{name}: start " in shown
        start, length = (part.split()[-2] for part in shown.split(": ")[-1].split(", "))
        assert float(start) == pytest.approx(bar["start"], abs=1e-5)
        assert float(length) == pytest.approx(bar["end"] - bar["start"], abs=1e-5)

    width = "(({min, max}) => max - min)(Object.values(mppoTimelines)[0].plot.scales.x)"
    full, first, last = page.look(width), bars[0], bars[len(bars) // 4]
    point(page, "mouseMoved", first["x"], first["y"])
    point(page, "mousePressed", first["x"], first["y"])
    point(page, "mouseMoved", last["x"], first["y"])
    point(page, "mouseReleased", last["x"], first["y"])
    assert 0 < page.look(width) < 0.9 * full
    for clicks in (1, 2):
        point(page, "mousePressed", last["x"], first["y"], clicks)
        point(page, "mouseReleased", last["x"], first["y"], clicks)
    page.until(f"{width} === {full}")
    assert page.errors == []


def test_a_timeline_of_64_stages_on_a_narrow_dark_screen(page, tmp_path):
    work = (RoleWork("critic", (70,), 1.0, 2.0), RoleWork("actor", (70,), 1.0, 2.0))
    write_timeline(write_run(tmp_path, 5), 3, recorded_update(schedule_of(64, work)))
    url = url_of(tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 1_500_000
    page.send("Emulation.setDeviceMetricsOverride", **PHONE)
    page.send("Emulation.setEmulatedMedia", features=[DARK])
    try:
        page.open(url)
        in_view(page)
        assert page.look("document.documentElement.scrollWidth") <= 360
        bars = page.look(BARS)
        assert len(bars) == 64 * 280 * 2 + 64
        assert sum(bar["pixel"][3] > 0 for bar in bars) > 0.95 * len(bars)
        steps = [bar["pixel"] for bar in bars if bar["action"][0] == "step"]
        assert max(min(pixel[:3]) for pixel in steps) > 180, "the ink of a dark page is light"
        assert page.errors == []
    finally:
        page.send("Emulation.clearDeviceMetricsOverride")
        page.send("Emulation.setEmulatedMedia", features=[])
