"""The folder in which a page's commands run: the repository, and the files and runs they name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from pages.blocks import ROOT
from pages.programs import GPU_SCRIPTS, names

CLIENT = Path(__file__).with_name("page_client.py")
LINKED = ("mppo", "checkpoints_convert", "benchmarks", "slurm", "pyproject.toml")
RECIPE = """
model: {path: "builtin:tiny", dtype: float32}
data:
  task: arithmetic
  train_batch_size: 8
  val_size: 4
  max_prompt_length: 16
  max_response_length: 4
actor: {ppo_mini_batch_size: 8}
rollout: {name: local}
trainer: {total_training_steps: 3, dump_rollouts: true, save_freq: 3, val_before_train: false}
"""
"""Of the run that pages look at."""
FOUR_NODES = "base: recipes/deepseek_llm_7b_gsm8k.yaml\ntrainer: {nnodes: 4}\n"
"""A recipe of which three ranks stand for all 32 (``mppo-simulate --all``)."""
WRITE_REWARD_MODEL = (
    "from mppo.hub.builtin import resolve_model; print(resolve_model('builtin:tiny-reward'))"
)
RUNS = ("runs/a", "runs/b", "runs/sums", "runs/x", "RUN")
MODELS = ("smollm2", "HF", "models/SmolLM2-135M-Instruct")
GSM8K = {"question": "How many?", "answer": "5 * 2 = <<5*2=10>>10\n#### 10"}
MATH = {"problem": "Find $x$.", "level": "Level 5", "type": "Algebra", "solution": "\\boxed{2}"}
VERL = "python3 -m verl.trainer.main_ppo data.train_files=a.parquet actor_rollout_ref.model.path=m"


def make_template(folder: Path) -> Path:
    """What all pages have in common, in a folder that is copied for each."""
    bin_folder = folder / ".venv/bin"
    bin_folder.mkdir(parents=True)
    client = folder / "client"
    client.write_text(f"#!{sys.executable} -IS\n{CLIENT.read_text()}")
    client.chmod(0o755)
    for name in names():
        (bin_folder / name).symlink_to(client)
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    (folder / "te").symlink_to(ROOT / ".venv/te")
    (folder / "docs/images").mkdir(parents=True)
    (folder / "tests/gpu").mkdir(parents=True)
    for name in GPU_SCRIPTS:
        (folder / "tests/gpu" / name).symlink_to(client)
    (folder / "tests/unit").symlink_to(ROOT / "tests/unit")
    shutil.copytree(ROOT / "recipes", folder / "recipes", ignore=lambda *_: ["configs"])
    (folder / "recipes/configs").symlink_to(ROOT / "recipes/configs")
    shutil.copy(ROOT / "recipes/qwen2_7b_gsm8k_math.yaml", folder / "recipes/x.yaml")
    (folder / "home/data").mkdir(parents=True)
    (folder / "home/models").mkdir()
    for config in (ROOT / "recipes/configs").iterdir():
        (folder / "home/models" / config.name).symlink_to(config)
    for name, row in {"gsm8k": GSM8K, "math": MATH}.items():
        _write_rows(folder / "downloads" / name, row)
    for name in ("run.sh", "command.sh"):
        (folder / name).write_text(VERL)
    for name in ("train.jsonl", "test.jsonl"):
        (folder / name).write_text((json.dumps({"prompt": "3+4=", "answer": "7"}) + "\n") * 32)
    return folder


def add_run(folder: Path, environment: dict[str, str]) -> None:
    """A small real run, under the names that pages have for runs and models."""
    (folder / "RECIPE").write_text(RECIPE)
    (folder / "recipe.yaml").write_text(FOUR_NODES)
    train = "python mppo/train.py --config RECIPE trainer.default_local_dir=runs/ppo"
    code, output = shell(folder, train, environment | {"PAGE_SMALL": "trainer.export_hf=true"})
    assert code == 0, output
    code, output = shell(folder, f'python -c "{WRITE_REWARD_MODEL}"', environment)
    assert code == 0, output
    (folder / "models").mkdir()
    (folder / "models/FsfairX-LLaMA3-RM-v0.1").symlink_to(output.strip())
    for name in RUNS:
        shutil.copytree(folder / "runs/ppo", folder / name)
    for name in MODELS:
        (folder / name).symlink_to(folder / "runs/ppo/actor")
    (folder / "models/Qwen2-7B-Instruct").symlink_to(ROOT / "recipes/configs/Qwen2-7B-Instruct")


def _write_rows(folder: Path, row: dict[str, str]) -> None:
    """Both splits of a data set, as its authors publish it, with a batch of rows."""
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text((json.dumps(row) + "\n") * 1024)


def variables(folder: Path) -> dict[str, str]:
    """The variables of a page's shell."""
    path = os.environ["PATH"]
    return {
        key: value for key, value in os.environ.items() if not key.startswith("SLURM")
    } | {
        "HOME": str(folder / "home"),
        "PATH": f"{folder / '.venv/bin'}:{path}",
        "PAGE_PATH": path,
        "PYTHONWARNINGS": "ignore",
        "MPPO_DEVICE": "cpu",
        "COLUMNS": "200",
    }  # fmt: skip


def shell(folder: Path, script: str, environment: dict[str, str]) -> tuple[int, str]:
    """Run a script as a reader would, in a page's folder; exit code and output."""
    found = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=1600,
    )  # fmt: skip
    return found.returncode, found.stdout.replace(f"{folder}/", "")
