"""A good recipe for the tables of bad ones, the files that rows name, and the expected refusal."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from pathlib import Path

from malicious_pickle import MaliciousPickle

from mppo.hub.builtin import resolve_model
from mppo.train import main

GOOD = """
model: {path: "builtin:tiny", dtype: float32}
data: {task: arithmetic, max_prompt_length: 32, max_response_length: 16, train_batch_size: 8}
actor: {ppo_mini_batch_size: 4}
trainer: {experiment_name: spoilt}
"""


def write_files(root: Path) -> dict[str, Path]:
    """Write the files and folders that rows name in braces; their paths by name."""
    (root / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (root / "empty.jsonl").touch()
    (root / "rows.txt").write_text("1+1=2\n")
    (root / "folder").mkdir()
    sizes = {
        "model_type": "qwen2", "hidden_size": 36, "intermediate_size": 36, "vocab_size": 64,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    experts = {
        "model_type": "qwen2_moe", "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    }  # fmt: skip
    labelled = {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}
    models = {
        "bare": {},
        "alien": {"model_type": "gpt2", "n_embd": 32},
        "nine_heads": {"num_attention_heads": 9, "num_key_value_heads": 9},
        "three_layers": {"num_hidden_layers": 3},
        "odd_width": {"intermediate_size": 37},
        "six_experts": experts,
        "mixed_layers": {**experts, "mlp_only_layers": [0]},
        "three_labels": {**labelled, "num_labels": 3},
    }
    for name, changes in models.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps({**sizes, **changes}))
    for name in ("alien", "three_labels"):
        (root / name / "model.safetensors").touch()
    shutil.copytree(resolve_model("builtin:tiny"), root / "headless")
    config = json.loads((root / "headless" / "config.json").read_text())
    (root / "headless" / "config.json").write_text(json.dumps({**config, **labelled}))
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    (root / "pointer.jsonl").write_text(pointer)
    (root / "pointers").mkdir()
    shutil.copy(root / "bare" / "config.json", root / "pointers")
    (root / "pointers" / "model.safetensors").write_text(pointer)
    shutil.copytree(root / "bare", root / "a_run" / "actor")
    (root / "unsafe" / "hf").mkdir(parents=True)
    (root / "unsafe" / ".metadata").write_bytes(pickle.dumps(MaliciousPickle(Path("done"))))
    shutil.copy(root / "bare" / "config.json", root / "unsafe" / "hf")
    (root / "mine.py").write_text("def score(text): ...\n\n\ndef agent(a, b): ...\n")
    folders = ("folder", "unsafe", "headless", "pointers", "a_run", *models)
    return {name: root / name for name in folders} | {
        "file": root / "rows.jsonl", "empty": root / "empty.jsonl", "text": root / "rows.txt",
        "pointer": root / "pointer.jsonl", "mine": root / "mine.py",
    }  # fmt: skip


def arguments_of(tmp_path: Path, text: str, settings: str, *options: str) -> list[str]:
    """Write a recipe; the program's arguments with it and settings ``section.key=value ...``."""
    given = [part.replace(" ", "") for part in re.split(r" (?=\w+\.)", settings) if part]
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return ["--config", str(path), *options, *given]


def refusal(tmp_path: Path, capsys, text: str, settings: str, *options: str) -> str:
    """Run the entry point with a recipe and settings; its refusal."""
    code = main(arguments_of(tmp_path, text, settings, *options))
    shown = capsys.readouterr()
    assert_refused(code, shown.out, shown.err)
    return shown.err


def assert_refused(code: int, out: str, err: str) -> None:
    assert code == 2, err
    assert "Traceback" not in err
    assert out == ""


def assert_one_fault(message: str, key: str, expected: str) -> None:
    assert ": 1 issue\n" in message, message
    assert re.search(rf"^  1\. {re.escape(key)} = ", message, re.MULTILINE), message
    assert expected in " ".join(message.split()), message
    assert re.search(r"^ +fix: \S", message, re.MULTILINE), message
