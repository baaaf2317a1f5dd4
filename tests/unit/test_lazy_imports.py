"""Help of every program, and errors of a recipe, are printed before any heavy import."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "megatron", "transformers", "sglang", "numpy", "rich")
PROGRAM = f"""
import importlib, json, sys
module, arguments = json.loads(sys.argv[1])
sys.argv = ["program", *arguments]
try:
    code = importlib.import_module(module).main()
except SystemExit as end:
    code = end.code
print(json.dumps([code, [name for name in {HEAVY!r} if name in sys.modules]]))
"""


CALLS = [
    (["--help"], 0),
    ([], 2),
    (["--world-size", "3"], 2),
    (["--trainer.seed=3"], 2),
    (["--config", "nowhere.yaml"], 2),
    (["data.task=arithmetic", "actor.ppo_mini_batch=3"], 2),
    (["data.task=arithmetic", "rollout.temperature=0"], 2),
    (["data.train_files=[nowhere.jsonl]"], 2),
    (["data.task=arithmetic", "model.path=Qwen/Qwen2.5-0.5B-Instruct"], 2),
    (["data.task=arithmetic", "actor_rollout_ref.rollout.name=vllm"], 2),
    (["data.task=arithmetic", "--dry-run", "--picture", "plan.docx"], 2),
    (["data.task=arithmetic", "--dry-run", "--price", "2"], 2),
]


EXTRAS = ("migrate", "reward_server", "simulate")
PATH = os.pathsep.join(map(str, (ROOT, *(ROOT / "extras" / name for name in EXTRAS))))


def told(module: str, arguments: list[str], folder: Path) -> tuple[int, list[str]]:
    """Exit code of a program, and the heavy packages that it has imported."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([module, arguments])],
        capture_output=True, text=True, timeout=300, cwd=folder,
        env={**os.environ, "PYTHONPATH": PATH},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    code, imported = json.loads(result.stdout.splitlines()[-1])
    return code, imported


@pytest.mark.parametrize(("arguments", "code"), CALLS, ids=[" ".join(call) for call, _ in CALLS])
def test_nothing_heavy_is_imported_to_tell_it(arguments, code, tmp_path):
    assert told("mppo.train", arguments, tmp_path) == (code, [])


JUDGE = ["--judge", "http://127.0.0.1:9/v1/chat/completions", "--judge-model", "name"]
REWARD = ["reward.name=function", "reward.function=mine.py:score"]


@pytest.mark.parametrize(
    "arguments",
    [REWARD, ["reward.verifier=exact"], [*JUDGE, "--against", "gone.jsonl"], ["data.val_size=0"]],
    ids=["reward", "row", "judge", "nothing"],
)
def test_an_evaluation_tells_faults_of_code_and_rows_before_it_imports_torch(arguments, tmp_path):
    (tmp_path / "mine.py").write_text("def score(answer): return 1.0\n")
    row = {"prompt": "1+1=", "answer": "2"}
    rows = [row, {} if "exact" in arguments[0] else row]
    (tmp_path / "val.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    recipe = {
        "model": {"path": "builtin:tiny"},
        "data": {"train_files": ["elsewhere.jsonl"], "val_files": ["val.jsonl"]},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    code, imported = told("mppo.evaluate", ["--config", "recipe.yaml", *arguments], tmp_path)
    assert code == 2
    assert not {"torch", "transformers"} & set(imported)


def test_a_conversion_tells_a_missing_folder_before_it_imports_torch(tmp_path):
    arguments = ["verify", "--hf", str(tmp_path), "--megatron", "gone"]
    code, imported = told("checkpoints_convert.__main__", arguments, tmp_path)
    assert code == 2
    assert "torch" not in imported


def programs() -> list[str]:
    """The module of every program: those that an installation starts by name, and the others."""
    files = [ROOT / "pyproject.toml", *(ROOT / "extras").glob("*/pyproject.toml")]
    named = re.findall(
        r'^mppo-[\w-]+ = "([\w.]+):main"$', "".join(map(Path.read_text, files)), re.M
    )
    others = ("mppo.serve", "mppo.preflight", "mppo.data.__main__", "mppo.hub.smollm2")
    return sorted({*named, *others})


@pytest.mark.parametrize("module", programs())
def test_help_imports_neither_torch_nor_a_library_on_it(module, tmp_path):
    code, imported = told(module, ["--help"], tmp_path)
    assert code == 0
    assert not {"torch", "megatron", "transformers", "sglang"} & set(imported)


def test_every_program_is_asked_for_its_help():
    assert {"mppo.evaluate", "mppo.replay", "mppo_simulate.__main__"} <= set(programs())
    assert len(programs()) >= 14
