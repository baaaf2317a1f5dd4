"""The parts of tests/gpu/run_all.sh that need no GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launched_run import LaunchedRun

from mppo.hub.builtin import read_model_config
from mppo.planning.run_plan import plan_roles
from mppo.trainer.start.loading import load_checked

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
for part in ("gpu", "distributed"):
    sys.path.append(str(ROOT / "tests" / part))

from gpu_checks import (  # noqa: E402
    GPUS,
    LOGPROB,
    RECIPES,
    ROUTES,
    SIZES,
    all_stages,
    judge_memory,
    judge_training,
    recipe_of,
    route_keys,
    training_keys,
)
from gpu_inputs import PROMPT_LENGTH, write_model, write_questions  # noqa: E402
from gpu_report import (  # noqa: E402
    FAILED,
    NOT_RUN,
    PASSED,
    Check,
    Mismatch,
    report_text,
    run_checks,
    selected,
)
from small_checks import Place, judge_numbers, small_checks  # noqa: E402
from small_checks import judge_training as judge_small  # noqa: E402

PYTHON = (sys.executable, "-c")
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
}


def reduced_config(name: str, folder: Path):
    """The config of an input, as gpu_inputs changes it, without its weights."""
    model, changed = SIZES[name]
    config = read_model_config(ROOT / "recipes/configs" / model)
    for field, _, value in (item.partition("=") for item in changed):
        setattr(config, field, int(value))
    return config


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_gpus_the_script_ends_with_2_and_one_message(tmp_path):
    run = subprocess.run(
        [ROOT / "tests/gpu/run_all.sh", "--out", tmp_path / "out"],
        capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "MPPO_PYTHON": sys.executable},
    )  # fmt: skip
    assert run.returncode == 2
    assert run.stderr.startswith("mppo: ")
    assert len(run.stderr.splitlines()) == 1
    assert "install torch for CUDA" in run.stderr or "8 on one node are needed" in run.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("script", ["run_all.sh", "one_gpu.sh"])
@pytest.mark.parametrize("torch_is", ["missing", "broken", "without python"])
def test_without_torch_the_scripts_end_with_2_and_one_message(script, torch_is, tmp_path):
    """In an interpreter without packages, in one whose torch lacks a library, and without any."""
    python, libraries = tmp_path / "python", tmp_path / "libraries"
    libraries.mkdir()
    if torch_is != "without python":
        python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
        python.chmod(0o755)
    if torch_is == "broken":
        (libraries / "torch.py").write_text("raise ImportError('libcudart.so.13: not found')")
    run = subprocess.run(
        [ROOT / "tests/gpu" / script, "--out", tmp_path / "out"],
        capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "MPPO_PYTHON": str(python), "PYTHONPATH": str(libraries)},
    )  # fmt: skip
    assert run.returncode == 2, run.stderr
    (line,) = run.stderr.splitlines()
    assert line.startswith("mppo: ")
    assert "MPPO_PYTHON" in line
    wanted = {"missing": "No module named 'torch'", "broken": "libcudart.so.13"}
    assert wanted.get(torch_is, f"{python}: no such interpreter") in line
    assert not (tmp_path / "out").exists()


def test_the_report_tells_what_passed_failed_and_why(tmp_path):
    def judge(folder: Path) -> str:
        raise Mismatch("3 instead of 4")

    waits = "import time; print('waiting', flush=True); time.sleep(600)"
    stages = [
        [Check("good", "a", (*PYTHON, "print(1)"), 60, judge=lambda folder: "all | fine")],
        [
            Check("bad exit", "b", (*PYTHON, "import sys; print('why'); sys.exit(7)"), 60),
            Check("wrong", "c", (*PYTHON, ""), 60, judge=judge),
            Check("no file", "d", (*PYTHON, ""), 60, judge=lambda f: (f / "x").read_text()),
            Check("slow", "e", (*PYTHON, waits), 0.5),
        ],
    ]
    seen: list[list[str]] = []
    results = run_checks(stages, tmp_path, lambda found: seen.append([r.state for r in found]))
    assert seen == [[NOT_RUN] * 5, [PASSED] + [NOT_RUN] * 4, [PASSED] + [FAILED] * 4]
    found = {result.check.name: result.found for result in results}
    assert found["bad exit"] == "exit code 7"
    assert found["wrong"] == "3 instead of 4"
    assert found["no file"].startswith("FileNotFoundError: ")
    assert found["slow"] == "did not end within 0.5 s"
    text = report_text({"GPUs": "8 x H100"}, results)
    assert "1 passed, 4 FAILED, 0 not run" in text
    assert "- GPUs: 8 x H100" in text
    assert "| good | passed | 0 | all \\| fine | a |" in text
    assert re.search(r"## bad exit\n.*```\nwhy\n```", text, re.DOTALL)
    assert "## good" not in text


def test_a_server_beside_a_check_ends_with_it(tmp_path):
    there = f"import os, time; os.chdir({str(tmp_path)!r})\n"
    server = "open('pid', 'w').write(str(os.getpid())); time.sleep(600)"
    waits = "while not (os.path.exists('pid') and open('pid').read()): time.sleep(0.05)"
    check = Check(
        "served", "", (*PYTHON, there + waits), 60, beside=(*PYTHON, there + server)
    )  # fmt: skip
    (result,) = run_checks([[check]], tmp_path, lambda found: None)
    assert result.state == PASSED, result.found
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize("name", RECIPES)
def test_the_training_runs_are_valid_and_fit_eight_gpus(name, tmp_path):
    config = reduced_config(name, tmp_path)
    keys = training_keys(name, tmp_path)
    recipe = load_checked(recipe_of(name), keys, GPUS, lambda path, *rest: config, files=False)
    configs = {role.name: config for role in recipe.roles()}
    plans = plan_roles(recipe, GPUS, configs)
    held = sum(max(m.weights + m.gradients + m.optimizer for m in plan.memory) for plan in plans)
    assert 10 * GIB < held < 60 * GIB
    assert {plan.layout.pp for plan in plans} == {2}


@pytest.mark.parametrize("route", [*ROUTES, "distributed"])
def test_the_runs_of_the_routes_are_valid(route, tmp_path):
    config = reduced_config("routes", tmp_path)
    recipe, own = "tiny_cpu_sglang", ROUTES.get(route)
    if own is None:
        recipe = "tiny_cpu_sglang_disaggregated"
        own = ("rollout.urls=[http://127.0.0.1:1234]", LOGPROB)
    keys = [*route_keys(route, tmp_path), *own]
    path = ROOT / "recipes" / f"{recipe}.yaml"
    rollout = load_checked(path, keys, 2, lambda *rest: config, files=False).rollout
    assert rollout.verify_sync != "off"
    assert route in (rollout.sync, rollout.sync_mode)


def test_checks_are_chosen_by_name(tmp_path):
    stages = all_stages(tmp_path, 1234, "key")
    names = [check.name for stage in stages for check in stage]
    assert len(names) == len(set(names))
    assert [[c.name for c in stage] for stage in selected(stages, ["numbers"])] == [
        ["numbers cpu"],
        ["numbers cuda"],
    ]
    assert selected(stages, None) == stages
    assert not selected(stages, ["no such check"])
    routes = next(stage for stage in stages if stage[0].name.startswith("route"))
    gpus = [c.environment["CUDA_VISIBLE_DEVICES"] for c in routes]
    assert sorted(",".join(gpus).split(",")) == [str(i) for i in range(GPUS)], "each GPU once"


def test_one_gpu_is_shared_and_several_are_not(tmp_path):
    chosen = ["numbers cuda", "device seam"]
    seam, of_four = selected(small_checks(Place(tmp_path, "cuda", share=True)), chosen)
    _, (alone,) = selected(small_checks(Place(tmp_path, "cuda")), chosen)
    assert of_four[0].environment["MPPO_SHARE_GPU"] == "1"
    assert "MPPO_SHARE_GPU" not in seam[0].environment, "one rank has NCCL"
    assert "MPPO_SHARE_GPU" not in alone.environment
    stages = small_checks(Place(tmp_path, "cpu", share=True))
    on_cpu = [check for stage in stages for check in stage]
    assert all("MPPO_SHARE_GPU" not in check.environment for check in on_cpu)
    limits = {check.name: check.limit_s for check in on_cpu}
    assert limits == {**dict.fromkeys(limits, 120), "large": 180}


def test_a_small_run_is_compared_step_by_step(tmp_path):
    def write(name: str, *losses: float) -> Path:
        run = tmp_path / name
        run.mkdir(exist_ok=True)
        rows = [
            {"step": step, "actor/grad_norm": 1.0, "actor/pg_loss": loss, "timing_s/step": 2.0}
            for step, loss in enumerate(losses, 1)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return run

    reference = write("a", 0.1, 0.2, 0.3)
    assert "6 numbers" in judge_small(tmp_path, write("b", 0.1, 0.2, 0.3), like=reference)
    assert "gradient norm 1" in judge_small(tmp_path, reference)
    with pytest.raises(Mismatch, match=r"steps \[1, 2\] instead of 1 to 3"):
        judge_small(tmp_path, write("b", 0.1, 0.2), like=reference)
    for wrong in (0.21, float("nan")):
        with pytest.raises(Mismatch, match="step 2: actor/pg_loss is"):
            judge_small(tmp_path, write("b", 0.1, wrong, 0.3), like=reference)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_small_script_ends_with_2(tmp_path):
    run = subprocess.run(
        [ROOT / "tests/gpu/one_gpu.sh", "--out", tmp_path / "out"],
        capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "MPPO_PYTHON": sys.executable},
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (2, "mppo: torch sees no GPU (see nvidia-smi)\n")


def test_a_training_run_is_judged_by_the_difference_of_server_and_actor(tmp_path):
    def write(*differences: float) -> None:
        (tmp_path / "run").mkdir(exist_ok=True)
        rows = [
            {
                "actor/grad_norm": 1.0,
                "training/rollout_logprob_diff_mean": difference,
                "timing_s/step": 2.0,
                "perf/tokens_per_second": 100.0,
                "perf/max_memory_allocated_gb": 22.0,
            }
            for difference in differences
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "run" / "metrics.jsonl").write_text(text)

    write(0.01, 0.02)
    assert "differ by 0.0200" in judge_training(tmp_path, "run")
    for wrong in ((0.01,), (0.01, 0.2), (0.01, float("nan"))):
        write(*wrong)
        with pytest.raises(Mismatch):
            judge_training(tmp_path, "run")
    write(0.0, 0.0)
    (tmp_path / "run").rename(tmp_path / "run_dense")
    log = tmp_path / "memory_dense.log"
    table = (
        "phase           peak   reached at                      contents\n"
        "updating actor  {}  mppo/models/optimizer.py:130    actor gradients 1.00\n"
        "generation      11.73                                  actor weights 2.00\n"
        "phase           micro-batches  operations  each   waits  each  GiB moved\n"
        "updating actor  32             54,560      1,705  33     1.0   1452.51\n"
        "largest moment: generation: 31.20 GiB of 79.18 GiB (x): trainer 11.73, CUDA context 1\n"
    )
    log.write_text(table.format("21.50"))
    assert "measured 22.00 GiB, simulated 21.50 GiB (updating actor)" in judge_memory(
        tmp_path, "dense"
    )
    for wrong in (table.format("18.00"), "nothing"):
        log.write_text(wrong)
        with pytest.raises(Mismatch):
            judge_memory(tmp_path, "dense")


@pytest.mark.parametrize("name", ["Qwen2-7B-Instruct", "Moonlight-16B-A3B-Instruct"])
def test_inputs_are_a_model_and_prompts_of_one_length(name, tmp_path):
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    folder = write_model(name, tmp_path, SMALL)
    config = read_model_config(folder)
    assert (config.hidden_size, config.num_hidden_layers) == (64, 2)
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    assert {tensor.dtype for tensor in tensors.values()} <= {torch.bfloat16, torch.float32}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert config.eos_token_id == tokenizer.eos_token_id
    rows = map(json.loads, write_questions(tmp_path, 20).read_text().splitlines())
    lengths = {
        len(tokenizer.apply_chat_template(row["prompt"], tokenize=True, return_dict=False))
        for row in rows
    }
    assert lengths == {PROMPT_LENGTH}


@pytest.mark.distributed
def test_numbers_agree_with_themselves_and_a_changed_one_is_found(tmp_path):
    cases = [str(tmp_path), "qwen2 critic", "moonlight"]
    run = LaunchedRun(tmp_path, program="gpu_numbers", argv=cases, world=4)
    assert run.codes() == [0] * 4, run.texts()
    (tmp_path / "numbers").mkdir()
    text = (tmp_path / "cpu.json").read_text()
    for kind in ("cpu", "cuda"):
        (tmp_path / "numbers" / f"{kind}.json").write_text(text)
    assert judge_numbers(tmp_path) == "largest difference 0.00 of the tolerance"
    for changed in (1.01, float("nan")):
        found = json.loads(text)
        found["moonlight"]["gradient norms"][1] *= changed
        (tmp_path / "numbers" / "cuda.json").write_text(json.dumps(found))
        with pytest.raises(Mismatch, match=r"moonlight: gradient norms\[1\]"):
            judge_numbers(tmp_path)
