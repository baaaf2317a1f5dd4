"""Building a run from a recipe: prompts, models, engine, scorer, reporter and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from mppo.agents.build_agent import build_agent, with_agent
from mppo.agents.episode_program import Program
from mppo.algos.reward_normalization import RewardStats
from mppo.checkpoint.checkpointer import Checkpointer
from mppo.data.examples import load_documents
from mppo.data.loader import PromptLoader, check_batch_size, check_token_ids
from mppo.data.source import PromptSet, load_prompts
from mppo.dumps.step_dump import stale_dumps
from mppo.hub.builtin import load_config, load_tokenizer, resolve_model
from mppo.models.role import Role
from mppo.parallel.collectives import largest_of_ranks
from mppo.parallel.groups import GroupRegistry
from mppo.parallel.launch import LaunchInfo
from mppo.parallel.node import host_memory
from mppo.planning.checkpoint_space import describe_checkpoints, disk_warning, free_bytes
from mppo.planning.fit import own_gpu
from mppo.planning.host import GIVEN, memory_warnings
from mppo.planning.run_plan import RolePlan, plan_roles, with_token_budgets
from mppo.recipe.gpu_types import GIB
from mppo.recipe.schema import Recipe
from mppo.report.reporter import Reporter
from mppo.rewards.reward_model.model_scorer import reward_model_texts, with_reward_model
from mppo.rewards.scorer import build_run_scorer
from mppo.rollout.build import build_engine
from mppo.rollout.engine import RolloutEngine
from mppo.safety.redact import redact
from mppo.supervision import stop_request
from mppo.supervision.exit_report import say
from mppo.supervision.phase import phase
from mppo.supervision.stop_request import StopRequest
from mppo.trainer.advantages import kl_controller
from mppo.trainer.dump import replay_folders
from mppo.trainer.pretraining_mix import PretrainingMix
from mppo.trainer.run import Run, exporting
from mppo.trainer.run_folder import CHECKPOINTS, WARM_START, RunFolder, check_model_folders
from mppo.trainer.run_roles import Roles, trained_models
from mppo.trainer.sft import train_sft
from mppo.trainer.start.user_parts import NO_PARTS, UserParts
from mppo.weights.model_folder import companion_folder


def build_run(
    recipe: Recipe, info: LaunchInfo, stop: StopRequest, parts: UserParts = NO_PARTS
) -> Run | None:
    """Build prompts, models, engine, scorer, reporter and checkpoints of a run; None if it has
    finished already. Collective. StepInterrupted: a stop was requested. ConfigError: the run cannot
    start in its folder."""
    stop_request.expect(math.inf)
    trainer, is_main = recipe.trainer, info.rank == 0
    folder = resolve_model(recipe.model.path, seed=trainer.seed)
    is_trusted = recipe.model.trust_remote_code
    read_config = partial(load_config, trust_remote_code=is_trusted)
    tokenizer = load_tokenizer(recipe.model.tokenizer_path or folder, is_trusted)
    training, validation, prompts = _load_prompts(recipe, tokenizer)
    configs = {role.name: read_config(role.path) for role in recipe.roles()}
    everything = [*training.prompts, *validation.prompts]
    check_token_ids(recipe, everything, configs)
    scorer = build_run_scorer(recipe, tokenizer, parts.reward)
    scorer.check(everything)
    agent = build_agent(recipe, parts.agent)
    replay = trainer.replay
    per_epoch = prompts.steps_per_epoch if replay is None else len(replay_folders(replay))
    total_steps = trainer.total_training_steps or trainer.total_epochs * per_epoch
    plain, run_dir = recipe.model_dump(mode="json"), trainer.run_dir
    reporter = Reporter(run_dir, trainer, plain, total_steps, is_main)
    announce = partial(_announce, reporter, trainer.logger)
    with phase("reading the run folder"):
        models = trained_models(recipe, folder, read_config)
        run_folder = RunFolder(run_dir, recipe, total_steps, models, announce)
        if run_folder.finished:
            return None
        check_model_folders(recipe)
    texts = reward_model_texts(recipe, tokenizer, configs.get("reward_model"))
    _report_plans(reporter, recipe, plan_roles(recipe, info.world_size, configs), total_steps)
    _report_prompts(reporter, replay, training, validation)
    registry = GroupRegistry(trainer.seed)
    with_budgets = with_token_budgets(recipe, info.world_size, configs)
    beside = (tokenizer, registry, reporter, run_folder)
    folder = _starting_model(with_budgets, folder, training, *beside)
    text = _pretraining_mix(recipe, tokenizer) if recipe.actor.ptx_coef else None
    stop_request.sync()
    roles = Roles(recipe, folder, read_config, registry, total_steps, text)
    if roles.critic is not None:
        _report_new_head(reporter, roles.critic)
    scoring = (roles.reward_model, roles.reward_scale, roles.placement.scoring)
    scorer = with_reward_model(scorer, recipe, texts, *scoring)
    stop_request.sync()
    engine = _build_engine(recipe, agent, tokenizer, folder, read_config, run_folder)
    kl, reward_stats = kl_controller(recipe.algorithm.kl_ctrl), RewardStats()
    states = {"prompts": prompts, "kl": kl, "moments": reward_stats, "roles": roles}
    state = (trainer, run_dir / CHECKPOINTS, roles.trained, states, redact(plain), stop)
    saver = Checkpointer(*state, announce, partial(exporting, engine, roles), reporter.flush)
    return Run(
        recipe=recipe,
        tokenizer=tokenizer,
        prompts=prompts,
        validation=validation,
        engine=engine,
        scorer=scorer,
        roles=roles,
        kl=kl,
        reward_stats=reward_stats,
        checkpoints=saver,
        reporter=reporter,
        folder=run_folder,
        total_steps=total_steps,
        callbacks=parts.callbacks,
    )


def _build_engine(
    recipe: Recipe,
    agent: Program | None,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    read_config: Callable[[Path], Any],
    run_folder: RunFolder,
) -> RolloutEngine:
    step = 0 if run_folder.found is None else run_folder.found.manifest.step
    with phase("starting the rollout engine"):
        companion, run_dir = companion_folder(folder), recipe.trainer.run_dir
        engine = build_engine(recipe, companion, read_config(folder), run_dir, step)
        return with_agent(engine, agent, recipe, tokenizer)


def _report_plans(
    reporter: Reporter, recipe: Recipe, plans: list[RolePlan], total_steps: int
) -> None:
    """Print the disk space of checkpoints; warn if the run does not fit the disk, the GPUs or the
    host's memory; ConfigError if what leaves the GPUs does not fit a node. Collective."""
    reporter.line(f"checkpoints: {describe_checkpoints(recipe, plans, total_steps)}")
    if warning := disk_warning(recipe, plans, total_steps, free_bytes(recipe.trainer.run_dir)):
        reporter.line(f"warning: {warning}")
    memory, source = host_memory()
    if recipe.trainer.host_memory_gib is not None:
        memory, source = int(recipe.trainer.host_memory_gib * GIB), GIVEN
    (smallest,) = largest_of_ranks([-memory])
    for line in memory_warnings(recipe, plans, own_gpu(recipe), int(-smallest), source):
        reporter.line(f"warning: {line}")


def _report_new_head(reporter: Reporter, critic: Role) -> None:
    """Print if the critic has a new value head, which only the last stage knows. Collective."""
    (is_new,) = largest_of_ranks([bool(critic.weights.fresh)])
    if is_new:
        init = critic.settings.value_head_init
        reporter.line(f"the critic starts with a new value head (value_head_init: {init})")


def _report_prompts(
    reporter: Reporter, replay: str | None, training: PromptSet, validation: PromptSet
) -> None:
    reporter.line(f"prompts: {training.summary()}; validation: {validation.summary()}")
    for step, (_, why) in (stale_dumps(Path(replay)) if replay else {}).items():
        reporter.line(f"trainer.replay: step {step} is left out: stale, {why}")


def _load_prompts(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> tuple[PromptSet, PromptSet, PromptLoader]:
    data = recipe.data
    with phase("loading prompts"):
        training = load_prompts(data, tokenizer, "train", recipe.rollout.tool_schemas)
        validation = load_prompts(data, tokenizer, "val", recipe.rollout.tool_schemas)
    if recipe.trainer.replay is None:  # a replay takes the prompts of its dumps
        check_batch_size(training, data.train_batch_size)
    return training, validation, _loader(recipe, training, data.train_batch_size)


def _loader(recipe: Recipe, prompts: PromptSet, batch_size: int) -> PromptLoader:
    accepts = recipe.trainer.on_changed_data == "accept"
    return PromptLoader(prompts, batch_size, recipe.data.shuffle, recipe.data.seed, accepts)


def _starting_model(
    recipe: Recipe,
    folder: Path,
    prompts: PromptSet,
    tokenizer: PreTrainedTokenizerBase,
    registry: GroupRegistry,
    reporter: Reporter,
    run_folder: RunFolder,
) -> Path:
    """Return the folder of the initial weights of all roles without a path of their own, after a
    warm start if the recipe has one. Collective."""
    steps = recipe.trainer.warm_start_steps
    if not steps:
        return folder
    started = run_folder.warm_start()
    if started is not None:
        return started
    if run_folder.found is not None:
        reporter.line(f"{run_folder.path / WARM_START} is missing: repeating the warm start")
    run_folder.begin()
    out, show = run_folder.path / WARM_START, partial(_show_warm_start, reporter, steps)
    config = load_config(folder, trust_remote_code=recipe.model.trust_remote_code)
    kept = train_sft(recipe, folder, config, prompts, tokenizer, registry, out, on_step=show)
    if kept is not None:
        reporter.line(f"kept {kept}")
    return out


def _pretraining_mix(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PretrainingMix:
    data, actor = recipe.data, recipe.actor
    size = data.ptx_batch_size or actor.ppo_mini_batch_size * recipe.rollout.n
    with phase("loading pretraining text"):
        documents = load_documents(data, tokenizer)
    return PretrainingMix(_loader(recipe, documents, size), actor.ptx_coef)


def _show_warm_start(reporter: Reporter, total: int, step: int, loss: float) -> None:
    if step == total or step % max(total // 10, 1) == 0:
        reporter.line(f"warm start {step}/{total}: loss {loss:.3f}")


def _announce(reporter: Reporter, loggers: Sequence[str], text: str) -> None:
    if "console" in loggers:
        reporter.line(text)
    elif reporter.is_main:
        say(text)
