"""The predicted time of a step from measured kernels, and the option --time of a plan."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from random_dump import write_dump

import mppo
from mppo.plan import main
from mppo.planning.time import library
from mppo.planning.time.generation_time import ENGINE, EnginePasses, Servers
from mppo.planning.time.recipe import recipe_sequences
from mppo.planning.time.role_load import AgentTurns
from mppo.planning.time.upkeep import Upkeep, check_upkeep
from mppo.planning.verdict import EXIT_TOO_LARGE
from mppo.recipe.errors import ConfigError
from mppo.recipe.gpu_types import find_gpu
from mppo.recipe.model_shape import model_shape

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
RECIPE = str(ROOT / "recipes" / "qwen3_30b_a3b_gsm8k_math.yaml")
DRAWN = ROOT / "docs" / "images" / "step_qwen3_30b.svg"
with_library = pytest.mark.skipif(
    find_spec("aiconfigurator_core") is None,
    reason='measured kernels are not installed: pip install "mppo[plan]" (Python 3.11 or newer)',
)


@pytest.fixture(scope="module")
def benchmark():
    return import_module("predicted_time")


def test_without_the_library_one_command_is_told(monkeypatch, capsys):
    monkeypatch.setattr(library, "PACKAGE", "no-such-package")
    assert main(["--config", RECIPE, "--time"]) == 2
    told = capsys.readouterr().err
    assert "--time" in told
    assert 'pip install "mppo[plan]"' in told


@with_library
def test_a_library_that_cannot_be_imported_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk.perf_database", None)
    library._module.cache_clear()
    assert main(["--config", RECIPE, "--time"]) == 2
    told = capsys.readouterr().err
    assert "aiconfigurator-core cannot be imported" in told
    assert "pip install --force-reinstall aiconfigurator-core" in told


def test_a_mean_without_time_is_not_ignored(capsys):
    for option in (["--mean-response", "100"], ["--search", "best.yaml"], ["--price", "2"]):
        assert main(["--config", RECIPE, *option]) == 2
        assert "add --time" in capsys.readouterr().err


@pytest.mark.parametrize("mean", ["0", "2049"])
def test_a_mean_beyond_the_limit_is_refused(mean, capsys):
    assert main(["--config", RECIPE, "--time", "--mean-response", mean]) == 2
    told = capsys.readouterr().err
    assert "--mean-response" in told
    assert "data.max_response_length = 2048" in told


def test_what_an_option_needs_is_told(capsys):
    for given, told in (
        (["--turn-seconds", "2"], "add --turns"),
        (["--lengths", "runs/a"], "add --time"),
        (["--time", "--disk", "2", "--search", "best.yaml"], "a search compares steps without it"),
    ):
        assert main(["--config", RECIPE, *given]) == 2
        assert told in capsys.readouterr().err


@pytest.fixture(scope="module")
def short():
    """A recipe with an agent."""
    limits = ("data.max_prompt_length=4", "data.max_response_length=4", "data.train_batch_size=8")
    return mppo.load({}, *limits, "data.task=reverse", "rollout.agent.path=agent.py:Agent")


def test_the_lengths_of_a_dump_are_read(short, tmp_path):
    write_dump(tmp_path, 1)
    write_dump(tmp_path, 2)
    sequences = recipe_sequences(short, None, None, tmp_path)
    assert sequences.known == (2, 2, 3, 3)
    assert (sequences.prompt, sequences.response) == (1.0, 2.5)
    assert sequences.responses(8) == [2] * 4 + [3] * 4


def test_a_folder_without_fitting_lengths_is_refused(short, tmp_path):
    def refused(told: str, folder, *means) -> None:
        with pytest.raises(ConfigError, match=told):
            recipe_sequences(recipe, *(means or (None, None)), folder)

    recipe = short
    refused("it does not exist", tmp_path / "missing")
    refused("it has no dumped step", tmp_path)
    folder = write_dump(tmp_path, 1)
    refused("remove one of the two", tmp_path, 3.0, None)
    recipe = mppo.load({}, "data.max_response_length=2", "data.task=reverse")
    refused("set data.max_response_length=3", tmp_path)
    (folder / "rank_0.safetensors").write_bytes(b"")
    refused("the lengths of step_1 cannot be read", tmp_path)


@pytest.mark.parametrize(("turns", "told"), [
    (AgentTurns(0.5), "between 1 and rollout.agent.max_turns = 8"),
    (AgentTurns(2, seconds=-1.0), "--turn-seconds = -1.0"),
    (AgentTurns(2, seconds=float("nan")), "--turn-seconds = nan"),
    (AgentTurns(2, tokens=-1.0), "--turn-tokens = -1.0"),
    (AgentTurns(2, tokens=4.0), "2 turns add 4 tokens, a response has 4"),
])  # fmt: skip
def test_turns_that_cannot_be_are_refused(short, turns, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        recipe_sequences(short, None, None, turns=turns)


def test_turns_need_an_agent_and_shares_a_frequency():
    recipe = mppo.load({}, "data.task=reverse")
    with pytest.raises(ConfigError, match=r"rollout\.agent is null"):
        recipe_sequences(recipe, None, None, turns=AgentTurns(2))
    with pytest.raises(ConfigError, match=r"test_freq = -1(?s:.*)--disk = -1(?s:.*)above 0"):
        check_upkeep(recipe, Upkeep(prompts=8, disk=-1))


@pytest.mark.parametrize("price", ["0", "-1", "nan", "inf"])
def test_a_price_that_is_none_is_refused(price, capsys):
    assert main(["--config", RECIPE, "--time", f"--price={price}"]) == 2
    assert "--price" in capsys.readouterr().err


@with_library
def test_a_plan_predicts_every_phase_and_names_its_source(tmp_path, capsys):
    picture = tmp_path / "step.svg"
    options = ["--time", "--mean-prompt", "150", "--mean-response", "800", "--price", "2.5"]
    options += ["trainer.nnodes=2", "--picture", str(picture)]
    for role in ("actor", "critic"):
        options += [
            f"{role}.megatron.tensor_model_parallel_size=4",
            f"{role}.megatron.recompute_granularity=full",
            f"{role}.ppo_max_token_len_per_gpu=6144",
        ]
    assert main(["--config", RECIPE, *options]) == 0
    text = capsys.readouterr().out
    assert f"drawn: {picture}" in text
    texts = [re.findall(r"<text [^>]*>([^<]*)</text>", one.read_text()) for one in (picture, DRAWN)]
    assert texts[0] == texts[1]
    assert {"ranks 0 to 7", "ranks 8 to 15", "idle pipeline"} <= set(texts[0])
    table = text[text.index("# predicted time of a step") :]
    assert re.search(r"^generation +\d+\.\d +\d+% +- +\w+", table, re.MULTILINE)
    assert re.search(r"^update of actor and critic +\d+\.\d +\d+% +\d+% ", table, re.MULTILINE)
    assert re.search(r"^predicted step: \d+\.\d s, [\d,]+ tokens/s/GPU on 16 GPUs$", table, re.M)
    use = r"^predicted MFU: actor \d+%, critic \d+%; GPUs wait for \d+% of the step \(network \d+%"
    assert re.search(use, table, re.MULTILINE)
    seconds = float(re.findall(r"^predicted step: ([\d.]+) s", table, re.MULTILINE)[0])
    cost = float(re.findall(r"^predicted cost: ([\d.]+) a step", table, re.MULTILINE)[0])
    assert cost == pytest.approx(2.5 * 16 * seconds / 3600, abs=0.01)
    assert re.search(r"^predicted by formulas from aiconfigurator-core \d+\.\d+", table, re.M)


@with_library
def test_a_search_writes_the_fastest_layout_as_a_recipe(tmp_path, capsys):
    small = [
        "--config",
        str(ROOT / "recipes" / "qwen2.5_0.5b_gsm8k.yaml"),
        "trainer.n_gpus_per_node=2",
    ]
    best = tmp_path / "best.yaml"
    (tmp_path / "configs").symlink_to(ROOT / "recipes" / "configs")
    assert main([*small, "--time", "--mean-response", "200", "--search", str(best)]) == 0
    text = capsys.readouterr().out
    now = float(re.findall(r"^predicted step: ([\d.]+) s", text, re.MULTILINE)[0])
    places = re.findall(r"^\d\. .*: predicted ([\d.]+) s, .* to spare$", text, re.MULTILINE)
    seconds = [float(place) for place in places]
    assert len(seconds) == 5
    assert seconds == sorted(seconds)
    assert seconds[0] <= now
    assert re.search(r"^   generation .*; offloaded: actor|^   generation .*GPUs wait", text, re.M)
    assert re.search(r"^[\d,]+ candidates compared; predicted by formulas from", text, re.MULTILINE)
    # the written recipe is planned with the time that was promised
    again = ["--config", str(best), "--time", "--mean-response", "200"]
    assert main(again) == 0
    found = re.findall(r"^predicted step: ([\d.]+) s", capsys.readouterr().out, re.MULTILINE)
    assert float(found[0]) == pytest.approx(seconds[0], abs=0.11)


@with_library
def test_a_small_critic_has_a_layout_of_its_own(tmp_path, capsys):
    options = ["--time", "--mean-prompt", "128", "--mean-response", "128"]
    best = tmp_path / "best.yaml"
    (tmp_path / "configs").symlink_to(ROOT / "recipes" / "configs")
    small = [
        *("critic.path=$HOME/models/Qwen2.5-0.5B-Instruct", "trainer.n_gpus_per_node=4"),
        *("critic.megatron.tensor_model_parallel_size=2", "rollout.tensor_model_parallel_size=2"),
    ]
    recipe = str(ROOT / "recipes" / "qwen2_7b_gsm8k_math.yaml")
    assert main(["--config", recipe, *small, *options, "--search", str(best)]) == 0
    text = capsys.readouterr().out
    found = r"^\d\. (.*?), [\d,]+ tokens.*, critic \((.*?), [\d,]+ tokens.*: predicted ([\d.]+) s"
    listed = re.findall(found, text, re.MULTILINE)
    assert any(actor != critic for actor, critic, _ in listed)
    own, shared = re.findall(r"another layout for the critic ([\d.]+) s, .* ([\d.]+) s", text)[0]
    assert float(own) < float(shared), "by formulas"
    assert main(["--config", str(best), *options]) == 0
    again = re.findall(r"^predicted step: ([\d.]+) s", capsys.readouterr().out, re.MULTILINE)
    assert float(again[0]) == pytest.approx(float(listed[0][2]), abs=0.11)


@with_library
def test_a_search_in_which_nothing_fits_names_what_is_missing(tmp_path, capsys):
    small = ["--config", str(ROOT / "recipes" / "qwen2.5_0.5b_gsm8k.yaml")]
    best = tmp_path / "best.yaml"
    options = ["--time", "--search", str(best), "--gpu", "3GiB"]
    assert main([*small, "trainer.n_gpus_per_node=1", *options]) == EXIT_TOO_LARGE
    text = capsys.readouterr().out
    text = text[text.index("# layouts of actor and critic") :]
    assert re.search(r"^1\. .*; does not fit$", text, re.MULTILINE)
    assert "none fits; this one lacks the least:\nlargest moment:" in text
    assert "What would help:" in text
    assert "not written:" in text
    assert not best.exists()


@pytest.mark.parametrize(("name", "said"), [("there.yaml", "it exists"), ("no/a.yaml", "folder")])
def test_a_search_overwrites_nothing(name, said, tmp_path, capsys):
    (tmp_path / "there.yaml").write_text("")
    assert main(["--config", RECIPE, "--time", "--search", str(tmp_path / name)]) == 2
    told = capsys.readouterr().err
    assert "--search" in told
    assert said in told


@with_library
def test_longer_responses_and_slower_gpus_take_longer(benchmark):
    row = next(row for row in benchmark.ROWS if row.model == "Qwen3-30B-A3B" and not row.ahead)
    seconds = benchmark.predict(row).seconds
    assert 0.65 < seconds / row.seconds < 1.35
    shorter = benchmark.predict(replace(row, mean=row.mean // 2)).seconds
    assert shorter < 0.8 * seconds
    a100 = benchmark.predict(replace(row, gpu="a100-80gb")).seconds
    assert a100 > 1.2 * seconds


@with_library
def test_every_published_step_is_within_the_stated_error(benchmark):
    errors = {
        (row.model, row.ahead): benchmark.predict(row).seconds / row.seconds - 1
        for row in benchmark.ROWS
    }
    assert all(abs(error) <= 0.35 for error in errors.values()), errors
    judged = sorted(abs(error) for (_, ahead), error in errors.items() if not ahead)
    assert judged[len(judged) // 2] <= 0.15


@with_library
def test_a_decoding_step_is_that_of_the_library_s_own_model(benchmark):
    handle = import_module("aiconfigurator_core.sdk.engine").EngineHandle
    own = handle.compile(
        "Qwen/Qwen3-30B-A3B", "h100_sxm", "sglang", tp_size=2, moe_tp_size=2, moe_ep_size=1
    )
    config = benchmark.AutoConfig.for_model(**benchmark.MODELS["Qwen3-30B-A3B"])
    kernels = library.open_library(find_gpu("h100-80gb"))
    engine = EnginePasses(kernels, model_shape(config), 8, Servers(1, 2, 256))
    for batch, context in ((16, 1000), (64, 2000), (256, 2000)):
        seconds = engine.decode_step(batch, context).seconds / ENGINE
        theirs = own.predict_decode_latency(batch, context, 2) / 1e3
        assert seconds == pytest.approx(theirs, rel=0.2), (batch, context)


@with_library
@pytest.mark.parametrize(("gpu", "said"), [
    ("h200", "h200_sxm"), ("h20-96gb", "scaled to NVIDIA H20"),
    ("40GiB", "no measurements, so seconds and MFU are those of the nearest known GPU, h100_sxm"),
])  # fmt: skip
def test_a_gpu_without_measurements_has_those_of_a_named_one(gpu, said):
    kernels = library.open_library(find_gpu(gpu))
    assert said in kernels.source
    assert kernels.gemm(4096, 4096, 4096) > 0


@with_library
def test_latent_attention_and_unmeasured_experts_have_times():
    kernels = library.open_library(find_gpu("h100-80gb"))
    assert 0 < kernels.latent_decode(64, 1000, 16) < kernels.latent_decode(64, 4000, 16)
    assert library.Measured.experts(kernels, 64, 2048, 1408, 6, 64, 1, 1) > 0
    assert "experts of 2048 x 1408 (6 of 64) have no measurements" in kernels.source


@with_library
def test_attention_without_measurements_has_a_time_and_is_named():
    kernels = library.open_library(find_gpu("a100-80gb"))
    measured, unmeasured = (kernels.attention(8, 4000, 16, 16, dim) for dim in (128, 96))
    assert 0.3 * measured < unmeasured < measured
    assert kernels.decode(64, 4000, 16, 16, 256) > kernels.decode(64, 4000, 16, 16, 128)
    assert kernels.latent_decode(64, 4000, 16) > 0
    for what in ("attention with heads of 96", "decoding with heads of 256", "latent attention"):
        assert f"{what} has no measurements" in kernels.source


def test_a_name_that_two_types_have_is_not_guessed():
    with pytest.raises(ConfigError, match="unknown GPU"):
        find_gpu("a100")


def test_the_error_of_a_missing_library_has_a_fix(monkeypatch):
    monkeypatch.setattr(library, "PACKAGE", "no-such-package")
    with pytest.raises(ConfigError, match="no-such-package"):
        library.open_library(find_gpu("h100-80gb"))
