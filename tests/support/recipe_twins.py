"""Scaled-down twins of the recipes for GPUs: the same keys, for two CPU processes.

A twin is the recipe's own document with the sizes of ``--scale-down``, but with the recipe's data.
Its home folder has what the recipe names: models of the same families, whose config.json is the
recipe's with small sizes, and data files with few rows in the columns of the originals, written by
``mppo.data prepare`` where it knows the data set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mppo.data.__main__ import main as prepare
from mppo.hub.builtin import write_small_model
from mppo.recipe.document import read_document
from mppo.trainer.start.scaled_down import scaled_sizes

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "recipes" / "configs"


def scaled_down(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document of a recipe's twin on 2 ranks; models and data of a hub lie in its home."""
    twin = scaled_sizes(document, 2)
    model, data = twin["model"], twin["data"]
    if model.pop("hub", False):
        model["path"] = f"$HOME/models/{Path(model['path']).name}"
    for key in ("train_files", "val_files"):
        data[key] = [_local(name) for name in data.get(key, ())]
    return twin


def _local(name: str) -> str:
    """A file of the home folder for a data set of the Hub."""
    if not name.startswith("hf:"):
        return name
    return f"$HOME/data/{name.partition('/')[2].partition(':')[0]}.jsonl"


def write_twin(recipe: Path, folder: Path) -> Path:
    """Write the twin of a recipe; returns its file."""
    document, issues = read_document(recipe)
    assert not issues, issues
    path = folder / recipe.name
    path.write_text(yaml.safe_dump(scaled_down(document), sort_keys=False))
    return path


def write_home(home: Path) -> None:
    """Write every model and data file that a twin names."""
    for config in CONFIGS.glob("*/config.json"):
        write_small_model(json.loads(config.read_text()), home / "models" / config.parent.name)
    for name, (files, folder) in PUBLISHED.items():
        raw = home / "raw" / name
        raw.mkdir(parents=True)
        for file, rows in files.items():
            _write_rows(rows, raw / file)
        arguments = ["prepare", name, "--from", str(raw), "--out", str(home / "data" / folder)]
        assert prepare(arguments) == 0
    for name, rows in ON_THE_HUB.items():
        _write_rows(rows, home / "data" / f"{name}.jsonl")


def _write_rows(rows: list[dict[str, Any]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _gsm8k(count: int) -> list[dict[str, Any]]:
    return [
        {"question": f"Tom has {n} eggs and buys 2. How many?", "answer": f"{n}+2\n#### {n + 2}"}
        for n in range(count)
    ]


def _math(count: int) -> list[dict[str, Any]]:
    return [
        {"problem": f"What is $2^{n}$?", "solution": f"It is $\\boxed{{{2**n}}}$.",
         "level": "Level 1", "type": "Algebra"}
        for n in range(count)
    ]  # fmt: skip


def _dialogues(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"\n\nHuman: Is {n} odd?\n\nAssistant:", "response": " Ask again.",
         "chosen": " Ask again.", "rejected": " No."}
        for n in range(count)
    ]  # fmt: skip


def _eurus(count: int) -> list[dict[str, Any]]:
    """Half of the rows are programs, the others mathematics."""
    tests = json.dumps({"inputs": ["1\n"], "outputs": ["1\n"]})
    kinds = (("code", "codeforces", tests), ("math", "numina_aops_forum", "4"))
    return [
        {"data_source": source, "prompt": [{"role": "user", "content": f"Task {n}."}],
         "ability": ability, "reward_model": {"style": "rule", "ground_truth": truth},
         "extra_info": {"split": "train", "index": n}}
        for n in range(count)
        for ability, source, truth in (kinds[n % 2],)
    ]  # fmt: skip


PUBLISHED: dict[str, tuple[dict[str, list[dict[str, Any]]], str]] = {
    "gsm8k": ({"train.jsonl": _gsm8k(8), "test.jsonl": _gsm8k(2)}, "gsm8k"),
    "math": ({"train.jsonl": _math(8), "test.jsonl": _math(2)}, "math"),
    "full_hh_rlhf": ({"train.jsonl": _dialogues(8)}, "full_hh_rlhf/rl"),
    "eurus": (
        {"train.jsonl": _eurus(8), "validation.jsonl": _eurus(2)}, "Eurus-2-RL-Data"
    ),
}  # fmt: skip
"""Files as ``mppo.data prepare`` reads them, and where the recipes name its files."""
ON_THE_HUB: dict[str, list[dict[str, Any]]] = {
    "rm-static": _dialogues(8),
    "tldr": [{"prompt": f"POST: {n} cats.\nTL;DR:", "completion": " Cats."} for n in range(8)],
    "descriptiveness-sentiment-trl-style": [{"prompt": f"It was {n}"} for n in range(8)],
    "prompt-collection-v0.1": [
        {"context_messages": [{"role": "user", "content": f"Is {n} even?"}], "dataset": "made"}
        for n in range(8)
    ],
}
"""Rows of the data sets that the recipes name on the Hub, by name without owner and split."""
