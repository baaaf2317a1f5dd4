"""A model behind an SGLang server that stays: options and environment of the server."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mppo.hub.builtin import load_tokenizer, read_model_config, resolve_model
from mppo.hub.download import fetch_model
from mppo.hub.local_model import check_model_folder, is_hub_name
from mppo.recipe.errors import ConfigError, ConfigIssue
from mppo.recipe.load import read_recipe, source_name
from mppo.recipe.schema import Recipe
from mppo.rollout.sglang.model_support import engine_issues
from mppo.rollout.sglang.server_options import server_environment, server_options
from mppo.rollout.transport.checked_load import LOADER
from mppo.weights.model_folder import companion_folder, is_megatron_checkpoint


def server_start(
    config: Path, overrides: Sequence[str], empty: bool, on_cpu: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """SGLang's options, without address and key, and environment variables to add, for a recipe;
    ConfigError if it is invalid, or the model cannot be served."""
    remarks: list[str] = []
    recipe, issues = read_recipe(config, overrides, remarks)
    if recipe is None or issues:
        raise ConfigError(issues, source=source_name(config))
    folder = companion_folder(resolve_model(recipe.model.path)) if empty else _model_folder(recipe)
    if not empty:
        remarks += _chat_remarks(recipe, folder)
    for remark in remarks:
        print(f"mppo: {remark}", file=sys.stderr)
    rollout, trust = recipe.rollout, recipe.model.trust_remote_code
    hf_config = read_model_config(folder, trust)
    served = recipe.model_copy(update={"rollout": rollout.model_copy(update={"name": "sglang"})})
    issues = list(engine_issues(served, hf_config, on_cpu))
    if issues:
        raise ConfigError(issues, source=source_name(config))
    options = server_options(
        str(folder),
        rollout.dtype or recipe.model.dtype,
        rollout.tensor_model_parallel_size,
        on_cpu,
        rollout.server_args,
        hf_config,
        rollout.expert_parallel_size,
        with_weights=not empty,
        sleeps=False,
    )
    options["custom_weight_loader"] = [LOADER]
    if not empty and trust:
        options["trust_remote_code"] = True
    if not empty and recipe.model.tokenizer_path:
        options["tokenizer_path"] = recipe.model.tokenizer_path
    return options, server_environment(options["tp_size"], on_cpu, hf_config.model_type)


def _model_folder(recipe: Recipe) -> Path:
    """The folder with the served weights; ConfigError if SGLang cannot read the model."""
    name, model = recipe.model.path, recipe.model
    if model.hub and is_hub_name(name):
        name = str(fetch_model(name, model.hub, True, model.trust_remote_code))
    issues = check_model_folder("model.path", name)
    folder = Path(name) if issues else resolve_model(name, seed=recipe.trainer.seed)
    if not issues and is_megatron_checkpoint(folder):
        fix = "export it with python -m checkpoints_convert megatron-to-hf, and serve that folder"
        why = "is a Megatron checkpoint, which SGLang cannot read"
        issues = [ConfigIssue("model.path", name, why, fix)]
    if issues:
        raise ConfigError(issues, source="serve")
    return folder


def _chat_remarks(recipe: Recipe, folder: Path) -> list[str]:
    """A line for the log if the server cannot answer chat requests."""
    model = recipe.model
    tokenizer = load_tokenizer(model.tokenizer_path or folder, model.trust_remote_code)
    if tokenizer.chat_template:
        return []
    return ["the tokenizer has no chat template: use /v1/completions, not /v1/chat/completions"]
