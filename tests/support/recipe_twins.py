"""Scaled-down twins of the recipes for GPUs: the same keys, for two CPU processes.

A twin is the recipe's own document with other values for the keys of sizes (``scaled_down``). Its
home folder has what the recipe names: models of the same families, whose config.json is the
recipe's with small sizes, and data files with few rows in the columns of the originals, written by
``mppo.data prepare`` where it knows the data set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from mppo.config.document import read_document
from mppo.config.presets import apply_preset
from mppo.data.__main__ import main as prepare
from mppo.hub.builtin import BOS, EOS, PAD, VOCAB, byte_tokenizer

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "recipes" / "configs"
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "head_dim": 8, "query_pre_attn_scalar": 8, "vocab_size": len(VOCAB),
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32, "num_experts": 8,
    "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
"""Largest values of a twin's config.json; smaller ones, and keys that it lacks, stay."""
BATCH = {
    "data.train_batch_size": 8, "data.max_response_length": 8, "data.val_size": 2,
    "actor.ppo_mini_batch_size": 4, "critic.ppo_mini_batch_size": 4,
}  # fmt: skip
LAYOUT = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size",
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
)  # fmt: skip
SERVER_KEYS = (
    "tensor_model_parallel_size", "expert_parallel_size", "server_args", "mode", "urls", "servers",
    "max_staleness",
)  # fmt: skip


def scaled_down(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document of a recipe's twin.

    - Models and data sets of a hub are files of the twin's home.
    - Batches have 8 prompts, mini-batches 4, micro-batches at most 2, responses 8 tokens.
    - A layout keeps one kind of parallelism, of size 2: experts with tensor parallelism if it has
      EP, else the pipeline, context or tensor parallelism, the first that it has.
    - The local engine replaces SGLang's servers; experts are replayed from the actor's pass (R2)
      instead of the servers' (R3).
    - The run has 2 steps on 2 ranks, 1 of them with a learning rate that rises.
    """
    twin = {name: _scaled_section(name, part) for name, part in document.items()}
    model, data, rollout = twin["model"], twin["data"], twin.setdefault("rollout", {})
    if model.pop("hub", False):
        model["path"] = f"$HOME/models/{Path(model['path']).name}"
    for key in ("train_files", "val_files"):
        data[key] = [_local(name) for name in data.get(key, ())]
    for key, value in BATCH.items():
        section, _, name = key.partition(".")
        if section != "critic" or name in twin["critic"]:
            twin[section][name] = value
    for key in SERVER_KEYS:
        rollout.pop(key, None)
    rollout["name"] = "local"
    if twin["actor"].get("router_replay") == "R3":
        twin["actor"]["router_replay"] = "R2"
    twin.pop("total_episodes", None)  # TRL's length of the run
    twin["trainer"] |= {"nnodes": 1, "n_gpus_per_node": 2, "total_training_steps": 2}
    twin["trainer"] |= {"save_freq": -1, "logger": ["jsonl"]}
    for role in ("actor", "critic"):
        optimizer = apply_preset(document).get(role, {}).get("optim", {})
        if optimizer.get("lr_warmup_steps"):
            twin[role]["optim"] = {**twin[role].get("optim", {}), "lr_warmup_steps": 1}
    return twin


def _scaled_section(name: str, part: Any) -> Any:
    if not isinstance(part, Mapping):
        return part
    scaled = {
        key: min(value, 2) if key.endswith("micro_batch_size_per_gpu") else value
        for key, value in part.items()
    }
    if "megatron" in scaled:
        scaled["megatron"] = _scaled_layout(scaled["megatron"])
    return scaled


def _scaled_layout(section: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in section.items() if key not in LAYOUT}
    tp, pp, cp, ep = (section.get(key, 1) for key in LAYOUT[:4])
    if ep > 1:
        return kept | {LAYOUT[0]: 2, LAYOUT[3]: 2}
    chosen = next((key for key, size in ((LAYOUT[1], pp), (LAYOUT[2], cp), (LAYOUT[0], tp))
                   if size > 1), None)  # fmt: skip
    return kept | ({chosen: 2} if chosen else {})


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
        _write_model(json.loads(config.read_text()), home / "models" / config.parent.name)
    for name, (files, folder) in PUBLISHED.items():
        raw = home / "raw" / name
        raw.mkdir(parents=True)
        for file, rows in files.items():
            _write_rows(rows, raw / file)
        arguments = ["prepare", name, "--from", str(raw), "--out", str(home / "data" / folder)]
        assert prepare(arguments) == 0
    for name, rows in ON_THE_HUB.items():
        _write_rows(rows, home / "data" / f"{name}.jsonl")


def _write_model(plain: dict[str, Any], folder: Path) -> None:
    """A model of random weights with the config's family, head and options, but small sizes."""
    import transformers as hf

    small = plain | {k: min(v, plain[k]) for k, v in SIZES.items() if plain.get(k) is not None}
    if "num_key_value_heads" in plain:
        grouped = plain["num_key_value_heads"] < plain["num_attention_heads"]
        small["num_key_value_heads"] = 2 if grouped else small["num_attention_heads"]
    tokens = zip(("pad", "bos", "eos"), (PAD, BOS, EOS))
    small |= {f"{kind}_token_id": VOCAB.index(token) for kind, token in tokens}
    (architecture,), kind = small.pop("architectures"), small.pop("model_type")
    config = hf.AutoConfig.for_model(kind, **small)
    scores = architecture.endswith("ForSequenceClassification")
    auto = hf.AutoModelForSequenceClassification if scores else hf.AutoModelForCausalLM
    torch.manual_seed(0)
    auto.from_config(config, dtype=torch.float32).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


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
