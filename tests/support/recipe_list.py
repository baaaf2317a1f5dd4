"""The shipped recipes: their headers, and which of them the simulation runs."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import NamedTuple

from mppo.recipe.load import load_recipe
from mppo.recipe.rules.rule import world_size_of

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
SMALL = ("tiny_", "demo", "smollm2")
"""How the names of the recipes for CPUs begin."""
CPU_RECIPES = [path for path in RECIPES if path.stem.startswith(SMALL)]
GPU_RECIPES = [path for path in RECIPES if not path.stem.startswith(SMALL)]
LABELS = ("Reproduces", "Hardware", "Published", "Corrected", "Run")
"""What the header of a recipe for GPUs says, in this order; that of others only ``Run``."""
ALIKE = {
    "first:deepseek_llm_7b_gsm8k",
    "first:deepseek_llm_7b_hh_rlhf",
    "first:deepspeed_chat_step3",
    "first:deepseek_v3_671b_gsm8k",
    "first:pythia_160m_trl_minimal",
    "first:qwen2.5_0.5b_gsm8k",
    "first:qwen2_7b_gsm8k_math",
    "first:qwen2_7b_rm",
    "first:qwen2_7b_rm_seq_balance",
    "last:qwen1.5_moe_a2.7b_gsm8k",
    "last:qwen3_8b_gsm8k_math",
}
"""Stages whose modules of Transformer Engine and whose collectives are those of another one."""
FULL_DEPTH = (
    "first:pythia_1b_tldr",
    "first:gemma_2_2b_gsm8k",
    "first:deepseek_llm_7b_gsm8k_cp2",
    "first:qwen2.5_32b_gsm8k_math",
    "first:qwen3_30b_a3b_gsm8k_math",
    "last:moonlight_16b_a3b_gsm8k",
)
"""One stage of each kind of layout: data parallel, TP, CP, TP with PP, EP with PP, all but CP."""
_LABEL = re.compile(rf"({'|'.join(LABELS)}): (.*)")


class Header(NamedTuple):
    """The comment at the top of a recipe: its first sentences, and a text by label."""

    title: str
    labels: dict[str, str]


def header_of(path: Path) -> Header:
    """Read the header of a recipe. Indented lines after its first sentences are commands."""
    title: list[str] = []
    labels: dict[str, str] = {}
    label = ""
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        text = line.removeprefix("#").removeprefix(" ")
        if found := _LABEL.fullmatch(text):
            label = found[1]
            labels[label] = found[2]
        elif label:
            labels[label] += f" {text.strip()}"
        elif not text.startswith(" "):
            title.append(text)
    return Header(" ".join(title), labels)


def simulated_recipes() -> dict[str, str]:
    """The recipe whose simulation stands for each recipe for GPUs, by name.

    Recipes with equal roles (models, layouts, batches), lengths, schedule, servers and number of
    ranks build equal ranks: of those, the one with the shortest name is simulated. The others
    differ in data, scores, responses per prompt, or what a run reports.
    """
    alike: dict[Hashable, list[str]] = {}
    for path in GPU_RECIPES:
        alike.setdefault(_rank_of(path), []).append(path.stem)
    return {name: min(names, key=len) for names in alike.values() for name in names}


def _rank_of(path: Path) -> Hashable:
    """What decides the memory and the operations of a recipe's ranks."""
    recipe = load_recipe(path)
    roles = [
        (role.name, Path(role.path).name, role.megatron, role.batching.model_dump(exclude={"path"}))
        for role in recipe.roles()
    ]
    data, rollout = recipe.data, recipe.rollout
    engine = (rollout.mode, rollout.tensor_model_parallel_size, rollout.server_args)
    lengths = (data.max_prompt_length, data.max_response_length)
    return repr(
        (roles, recipe.model.dtype, lengths, recipe.trainer.schedule, engine, world_size_of(recipe))
    )
