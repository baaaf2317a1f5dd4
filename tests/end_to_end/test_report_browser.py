"""The HTML report in a headless browser: plots, tokens, narrow and dark screens, a live run."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import pytest
import torch
from browser import Page, open_browser

from mppo.batch import Batch, ModelOutputs
from mppo.config.sections.algorithm import AlgorithmConfig
from mppo.dumps.experience_files import write_share
from mppo.dumps.step_dump import SequenceRow, StepDump, step_folder, write_header, write_pieces
from mppo.report.html.page import page_data, page_text
from mppo.report.html.plots import SPECS
from mppo.report.html.serve import report_server
from mppo.trainer.advantages import estimate

STEPS = 10_000
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
            file.write(json.dumps({"step": step, **row}) + "\n")
    (folder / "recipe.yaml").write_text(
        f"trainer: {{project_name: p, experiment_name: {folder.name}, seed: {shift}}}\n"
    )
    return folder


def write_dump(folder: Path) -> None:
    """A dump of one step: a prompt token and five response tokens, one of hostile text."""
    mask_T = torch.tensor([0.0, 1, 1, 1, 1, 1])
    numbers_T = torch.tensor([0.0, -0.1, -0.5, -1.0, -2.0, -0.2])
    batch = Batch(
        tokens_T=torch.arange(6), cu_seqlens=torch.tensor([0, 6]), response_mask_T=mask_T,
        rollout_logprobs_T=numbers_T * 1.1, group_B=torch.tensor([0]),
        scores_B=torch.tensor([1.0]), truncated_B=torch.tensor([False]),
        weight_version_T=torch.zeros(6, dtype=torch.int64),
    )  # fmt: skip
    values_T = mask_T * torch.tensor([0.0, 0.9, -0.3, 0.4, 0.1, 0.7])
    outputs = ModelOutputs(batch, numbers_T, numbers_T * 0.9, values_T, entropy_T=mask_T * 0.3)
    step = step_folder(folder, 3)
    step.mkdir(parents=True)
    write_share(step, 0, estimate(outputs, AlgorithmConfig(), 0.0))
    write_pieces(step, 0, dict(enumerate(["2+2=", " four", HOSTILE, "\n", "é", "."])))
    row = SequenceRow(0, "src", "2+2=", "4", "stop", [(0, 5)], 1.0)
    write_header(step, StepDump(3, "00", 1, 0.1, (row,)))


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
    for name, found in plots.items():
        sparse = name == "plot-1"
        assert found["steps"] == (20 if sparse else STEPS), name
        assert found["coloured"] > 20, f"{name} has no points: {found}"
    assert plots["plot-15"]["series"] == 4
    print("milliseconds until drawn:", page.look("document.documentElement.dataset.ready"))


def test_a_narrow_dark_screen(page, tmp_path):
    url = url_of(write_run(tmp_path, 50))
    phone = {"width": 360, "height": 800, "deviceScaleFactor": 2, "mobile": True}
    page.send("Emulation.setDeviceMetricsOverride", **phone)
    dark = {"name": "prefers-color-scheme", "value": "dark"}
    page.send("Emulation.setEmulatedMedia", features=[dark])
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


def test_two_runs_share_their_plots(page, tmp_path):
    runs = [write_run(tmp_path / name, 30, shift) for name, shift in (("a", 0.0), ("b", 2.0))]
    page.open(url_of(*runs))
    legend = page.look("document.querySelector('#plot-2 .u-legend').textContent")
    assert "p/a" in legend
    assert "p/b" in legend
    assert page.look("mppoPlots['plot-2'].data.length") == 3
    cells = "[...document.querySelectorAll('details td')]"
    table = page.look(f"{cells}.map((cell) => cell.textContent)")
    assert table == [
        "trainer.experiment_name", '"a"', '"b"', "trainer.seed", "0.0", "2.0",
    ]  # fmt: skip
    assert page.errors == []


def test_a_served_page_follows_its_run(page, tmp_path):
    write_run(tmp_path, 4)
    with report_server([tmp_path], 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        origin = f"http://127.0.0.1:{server.server_port}/"
        page.open(origin)
        assert page.look("mppoPlots['plot-2'].data[0].length") == 4
        write_run(tmp_path, 9)
        page.until("mppoPlots['plot-2'].data[0].length === 9")
        assert page.errors == []
        assert {url for url in page.requests if not url.startswith(origin)} <= {"data:,"}
        server.shutdown()
