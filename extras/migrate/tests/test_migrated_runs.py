"""Commands of the documents, migrated and trained as they stand, scaled down to two processes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from migration.table import ROOT, commands
from mppo_migrate.__main__ import migrate
from recipe_run import run_recipe

RUN = (
    "run_deepseek7b_llm.sh",
    "run_deepseek7b_llm_sp2.sh",
    "run_deepseek_math_gsm8k_megatron.sh",
    "run_gemma.sh",
    "run_qwen2-7b_rm.sh",
    "run_qwen2.5-32b.sh",
    "verl-options",
    "trl-tldr",
    "openrlhf-ray",
    "deepspeed-chat",
)
"""Of layouts with TP, CP and PP, with and without a reward model and a reference, in bfloat16. The
last two name models whose config.json is not shipped."""


@pytest.mark.distributed
@pytest.mark.parametrize("name", RUN)
def test_a_migrated_command_runs_two_steps(name: str, tmp_path: Path) -> None:
    ((system, arguments, text),) = (rest for found, *rest in commands() if found == name)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(migrate(system, text, arguments)[0])
    (tmp_path / "configs").symlink_to(ROOT / "recipes" / "configs")
    home = {"HOME": str(tmp_path), "MPPO_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    rows = run_recipe(str(recipe), tmp_path / "run", "--scale-down", **home)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(math.isfinite(row["actor/grad_norm"]) for row in rows)
