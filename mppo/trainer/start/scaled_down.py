"""A recipe's scaled-down twin: the same run with small sizes, for a laptop (``--scale-down``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mppo.hub.local_model import BUILTIN_PREFIX
from mppo.hub.model_config import ModelConfigs
from mppo.recipe.document import leaves
from mppo.recipe.errors import ConfigError
from mppo.recipe.load import load_recipe
from mppo.recipe.presets import apply_preset
from mppo.recipe.schema import Recipe
from mppo.safety.input_files import read_json
from mppo.weights.model_folder import companion_folder

LAYOUT = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size",
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
)  # fmt: skip
SERVER_KEYS = (
    "tensor_model_parallel_size", "expert_parallel_size", "server_args", "mode", "urls", "servers",
    "max_staleness",
)  # fmt: skip
DATA_KEYS = (
    "train_batch_size", "max_prompt_length", "max_response_length", "filter_overlong_prompts",
    "truncation", "shuffle", "seed", "val_size", "apply_chat_template",
)  # fmt: skip
"""Keys of ``data`` that a twin keeps when built-in prompts replace the recipe's."""
TASK = "arithmetic"


def scale_down(given: Path, world: int) -> tuple[dict[str, Any], list[str]]:
    """The twin of a recipe for ``world`` processes, with models that are written here and built-in
    prompts, and a line for every key in which it differs. ConfigError: the recipe is invalid, or
    the folder of one of its models is unusable."""
    recipe = load_recipe(given)
    document = recipe.model_dump(mode="json", exclude_unset=True)
    twin = scaled_sizes(document, world)
    twin["data"] = {k: v for k, v in twin["data"].items() if k in DATA_KEYS} | {"task": TASK}
    _replace_models(twin, recipe, ModelConfigs(given))
    if recipe.reward.name == "rule" and "reward" in twin:
        twin["reward"].pop("verifier", None)
    run_dir = recipe.trainer.run_dir
    twin["trainer"] |= {"default_local_dir": f"{run_dir}_scaled_down", "resume_mode": "disable"}
    twin["trainer"]["logger"] = ["console", "jsonl"]
    if recipe.actor.ptx_coef:
        twin["actor"].pop("ptx_coef")  # no built-in prompts have its documents
    return twin, list(_differences(document, twin))


def scaled_sizes(document: Mapping[str, Any], world: int) -> dict[str, Any]:
    """A recipe's document with small batches, lengths and layouts, for the local engine.

    - Batches have two mini-batches of 4 prompts, or of the next multiple of the processes;
      micro-batches at most 2 rows, responses 8 tokens.
    - Parallel sizes are at most 2, as many as the processes allow: experts with tensor
      parallelism, else the pipeline, context and tensor parallelism, in this order.
    - The local engine replaces SGLang's servers; experts are replayed from the actor's pass (R2)
      instead of the servers' (R3).
    - The run has 2 steps, 1 of them with a learning rate that rises.
    """
    sections = ("model", "data", "actor", "critic", "rollout", "trainer")
    document = {**{key: {} for key in sections}, **document}
    twin = {name: _scaled_section(part, world) for name, part in document.items()}
    data, rollout, trainer = twin["data"], twin["rollout"], twin["trainer"]
    mini_batch = world * -(-4 // world)  # the least multiple of the processes from 4
    data |= {"train_batch_size": 2 * mini_batch, "max_response_length": 8, "val_size": 2}
    twin["actor"]["ppo_mini_batch_size"] = mini_batch
    if twin["critic"].get("ppo_mini_batch_size") is not None:
        twin["critic"]["ppo_mini_batch_size"] = mini_batch
    for key in SERVER_KEYS:
        rollout.pop(key, None)
    rollout["name"] = "local"
    if twin["actor"].get("router_replay") == "R3":
        twin["actor"]["router_replay"] = "R2"
    twin.pop("total_episodes", None)  # TRL's length of the run
    trainer |= {"nnodes": 1, "n_gpus_per_node": world, "total_training_steps": 2}
    trainer |= {"save_freq": -1, "logger": ["jsonl"]}
    for role in ("actor", "critic"):
        optimizer = apply_preset(document).get(role, {}).get("optim", {})
        if optimizer.get("lr_warmup_steps"):
            twin[role]["optim"] = {**twin[role].get("optim", {}), "lr_warmup_steps": 1}
    return twin


def _scaled_section(part: Any, world: int) -> Any:
    if not isinstance(part, Mapping):
        return part
    scaled: dict[str, Any] = {
        key: min(value, 2) if key.endswith("micro_batch_size_per_gpu") and value else value
        for key, value in part.items()
    }
    if scaled.get("megatron"):
        scaled["megatron"] = _scaled_layout(scaled["megatron"], world)
    return scaled


def _scaled_layout(section: Mapping[str, Any], world: int) -> dict[str, Any]:
    kept = {key: value for key, value in section.items() if key not in LAYOUT}
    tensor, pipeline, context, expert = LAYOUT[:4]
    wanted = [key for key in (pipeline, context, tensor) if (section.get(key) or 1) > 1]
    if (section.get(expert) or 1) > 1:
        wanted = [expert, *(key for key in wanted if key != tensor)]
    for key in wanted:
        if world % 2:
            break
        world //= 2
        kept |= {tensor: 2, expert: 2} if key == expert else {key: 2}
    return kept


def _replace_models(twin: dict[str, Any], recipe: Recipe, configs: ModelConfigs) -> None:
    twin["model"].pop("hub", None)
    for name in ("model", "critic", "ref", "reward_model"):
        section = twin.get(name) or {}
        path = section.get("path")
        if not path or path.startswith(BUILTIN_PREFIX):
            continue
        section["path"] = _small_model(path, recipe, configs)
        section.pop("tokenizer_path", None)
    if recipe.reward_model.normalize.mode == "config":
        twin["reward_model"].pop("normalize")  # a small model's config has no mean and deviation


def _small_model(path: str, recipe: Recipe, configs: ModelConfigs) -> str:
    """A small model of the family of a recipe's model; an embedded one if its config is unknown."""
    from mppo.hub.builtin import cached_small_model

    hub = recipe.model.hub
    try:
        folder = configs.fetch(path, hub, False, False) if hub else configs.folder(path)
    except ConfigError:
        if Path(path).expanduser().exists():
            raise
        scores = path == recipe.reward_model.path
        return f"{BUILTIN_PREFIX}tiny-reward" if scores else f"{BUILTIN_PREFIX}tiny"
    return str(cached_small_model(read_json(companion_folder(folder) / "config.json")))


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    old, new = dict(leaves(before)), dict(leaves(after))
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            was, now = old.get(key, "not set"), new.get(key, "not set")
            yield f"scaled down: {key}: {was} -> {now}"
