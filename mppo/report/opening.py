"""The first lines of a run: device, ranks, models, layouts, engine, data and run folder."""

from __future__ import annotations

from mppo import __version__
from mppo.parallel import device
from mppo.parallel.launch import LaunchInfo
from mppo.recipe.schema import Recipe
from mppo.recipe.sections.data import DataConfig, SourceConfig
from mppo.recipe.sections.rollout import RolloutConfig
from mppo.safety.redact import redact_text


def opening_lines(recipe: Recipe, info: LaunchInfo) -> list[str]:
    """One line each for device, models, layouts, engine, data and run folder; the device is already
    chosen."""
    world = info.world_size
    ranks = "1 rank" if world == 1 else f"{world} ranks"
    roles = recipe.roles()
    estimator, dtype = recipe.algorithm.adv_estimator, recipe.model.dtype
    lines = {
        f"mppo {__version__}": f"PPO with {estimator}, {recipe.trainer.project_name}/"
        f"{recipe.trainer.experiment_name}",
        "device": f"{device.name()}; {ranks}, {info.local_world_size} on this node, by {info.how}",
        "model": ", ".join(dict.fromkeys(role.path for role in roles)) + f" in {dtype}",
        "layout": _layouts(recipe, world),
        "engine": _engine(recipe.rollout),
        "data": _data(recipe.data),
        "run folder": str(recipe.trainer.run_dir.resolve()),
    }
    return [redact_text(f"{name}: {text}") for name, text in lines.items()]


def layout_line(recipe: Recipe, world: int) -> str:
    """Ranks, layouts and engine, for the event of a start."""
    ranks = "1 rank" if world == 1 else f"{world} ranks"
    return f"{ranks}; {_layouts(recipe, world)}; engine {_engine(recipe.rollout)}"


def _layouts(recipe: Recipe, world: int) -> str:
    roles = recipe.roles()
    return ", ".join(f"{r.name} {r.megatron.layout(world).describe()}" for r in roles)


def _engine(rollout: RolloutConfig) -> str:
    if rollout.name == "local":
        return "local, on every rank"
    where = ", ".join(rollout.urls) or rollout.mode
    return f"sglang, TP{rollout.tensor_model_parallel_size}, {where}"


def _data(data: DataConfig) -> str:
    sources = data.prompt_sources.values()
    if not data.sources:
        return ", ".join(map(_source, sources))
    total = sum(source.weight for source in sources)
    return "; ".join(f"{source.weight / total:.1%} {_source(source)}" for source in sources)


def _source(source: SourceConfig) -> str:
    if source.task:
        return f"task {source.task}"
    return f"{', '.join(source.train_files)}; validation: {', '.join(source.val_files) or 'none'}"
