"""An evaluation: a model's responses to the validation prompts, scored."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mppo.agents.build_agent import build_agent, with_agent
from mppo.agents.episode_program import Program
from mppo.batch.episode import with_scores
from mppo.batch.prompt import Prompt
from mppo.data.loader import check_token_ids
from mppo.data.source import load_prompts
from mppo.hub.builtin import load_tokenizer, read_model_config, resolve_model
from mppo.hub.check_weights import check_weights
from mppo.parallel import device
from mppo.parallel.environment import set_for_training
from mppo.parallel.launch import LaunchInfo, keep_imports
from mppo.parallel.process_group import process_group
from mppo.recipe.errors import ConfigError, ConfigIssue
from mppo.recipe.rules.rule import has_interleaved_role
from mppo.recipe.schema import Recipe
from mppo.rewards.scorer import Scorer, build_run_scorer
from mppo.rollout.build import build_engine
from mppo.rollout.sglang.model_support import engine_issues
from mppo.safety.input_error import InputError
from mppo.supervision import exit_report
from mppo.supervision.first_rank import on_first_rank
from mppo.supervision.heartbeat import CleanupDeadline, Heartbeat
from mppo.supervision.phase import phase
from mppo.supervision.rank_guard import RankGuard
from mppo.trainer.failures import exit_code, report_failure
from mppo.trainer.start.checked_recipe import NO_PROMPTS
from mppo.trainer.validation.pair_judge import Opponent
from mppo.trainer.validation.validation_metrics import metrics_table, validation_metrics
from mppo.trainer.validation.validation_stage import generate_validation, sample_lines, write_lines
from mppo.weights.bucket import WeightBucket
from mppo.weights.model_folder import companion_folder
from mppo.weights.torch_dist.reader import full_tensors


@dataclass(frozen=True)
class Evaluation:
    """What is evaluated, on what; the scorer is without the reward model. ``files`` is the folder
    for the logs of servers, and for the stacks of ranks that hang."""

    recipe: Recipe
    folder: Path
    config: Any
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Prompt]
    scorer: Scorer
    agent: Program | None

    @property
    def files(self) -> Path:
        return self.recipe.trainer.run_dir / "evaluate"


def run_evaluation(
    recipe: Recipe,
    opponent: Opponent | None,
    arguments: argparse.Namespace,
    info: LaunchInfo,
    guard: RankGuard,
) -> int:
    """Evaluate as ``mppo-evaluate`` does; return the exit code: 0, 2 for an invalid recipe or
    input, 1 for another failure. Collective."""
    try:
        device.check()
    except ValueError as error:
        return exit_report.refuse_recipe(error)
    try:
        guard.set_limit(recipe.trainer.heartbeat_timeout_s)
        _check_models(recipe)
        evaluation = prepare_evaluation(recipe, info)
        if opponent is not None:
            opponent.check(evaluation.prompts, recipe.rollout.validation.n)
        _make_folders(arguments)
    except InputError as error:
        return exit_report.refuse_recipe(error, info.rank)
    try:
        _run(evaluation, info, guard, arguments, opponent)
    except BaseException as error:
        return exit_code(error, info, recipe)
    return 0


def _make_folders(arguments: argparse.Namespace) -> None:
    """Make the folders of the files to write before the time of an evaluation is spent; ConfigError
    if one cannot be made."""
    for option, path in (("--out", arguments.out), ("--samples", arguments.samples)):
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why, fix = f"its folder cannot be made ({error.strerror})", "give another path"
            raise ConfigError([ConfigIssue(option, str(path), why, fix)], "arguments") from error


def _check_models(recipe: Recipe) -> None:
    """Raise ConfigError if the evaluated model or the reward model cannot be loaded."""
    for role in recipe.roles():
        if role.name not in ("actor", "reward_model"):
            continue
        try:
            folder = resolve_model(role.path)
            check_weights(role, read_model_config(folder, recipe.model.trust_remote_code))
        except ConfigError:
            raise
        except (ValueError, OSError) as error:
            why, fix = str(error), "give a model folder of a known family"
            raise ConfigError([ConfigIssue(role.path_key, role.path, why, fix)]) from error


def prepare_evaluation(recipe: Recipe, info: LaunchInfo) -> Evaluation:
    """Read everything except weights; ConfigError, ValueError if a part cannot be used."""
    folder = resolve_model(recipe.model.path, seed=recipe.trainer.seed)
    trust = recipe.model.trust_remote_code
    config = read_model_config(folder, trust)
    issues = list(engine_issues(recipe, config, not device.is_cuda()))
    if issues:
        raise ConfigError(issues)
    tokenizer = load_tokenizer(recipe.model.tokenizer_path or folder, trust)
    validation = load_prompts(recipe.data, tokenizer, "val", recipe.rollout.tool_schemas)
    if info.rank == 0:
        exit_report.say(f"validation: {validation.summary()}")
    prompts = validation.prompts
    if not prompts:
        raise ConfigError([NO_PROMPTS])
    check_token_ids(recipe, prompts, {"actor": config})
    agent = build_agent(recipe)
    scorer = build_run_scorer(recipe, tokenizer)
    scorer.check(prompts)
    return Evaluation(recipe, folder, config, tokenizer, prompts, scorer, agent)


def _run(
    evaluation: Evaluation,
    info: LaunchInfo,
    guard: RankGuard,
    arguments: argparse.Namespace,
    opponent: Opponent | None,
) -> None:
    """Evaluate under supervision, print and write results, or raise AlreadyReported. Collective."""
    recipe = evaluation.recipe
    trainer = recipe.trainer
    hang_s = trainer.hang_timeout_s or 0.9 * trainer.collective_timeout_s
    set_for_training(os.environ, recipe.rollout.sync == "distributed", has_interleaved_role(recipe))
    on_failure = partial(report_failure, info=info, recipe=recipe)
    guard.watch_other_nodes()
    watch = (info, trainer.heartbeat_timeout_s, hang_s, evaluation.files / "stacks")
    with (
        CleanupDeadline() as deadline,
        process_group(info, trainer.collective_timeout_s),
        Heartbeat(*watch, deadline, on_failure).running(),
    ):
        guard.met()
        with_samples = arguments.samples is not None or opponent is not None
        metrics, lines = evaluate(evaluation, info, with_samples)
        if opponent is not None:
            metrics |= on_first_rank(partial(_judged, opponent, lines))
        if info.rank:
            return
        if arguments.samples is not None:
            write_lines(arguments.samples, lines)
        counts = Counter(prompt.data_source for prompt in evaluation.prompts)
        for line in metrics_table(metrics, list(counts)):
            exit_report.say(line)
        found = metrics | {f"prompts/{name}": float(count) for name, count in counts.items()}
        found["prompts"] = float(len(evaluation.prompts))
        finite = {name: value if math.isfinite(value) else None for name, value in found.items()}
        text = json.dumps(finite)
        print(text)
        if arguments.out is not None:
            write_lines(arguments.out, [f"{text}\n"])


def _judged(opponent: Opponent, lines: Sequence[str]) -> dict[str, float]:
    with phase("judge"):
        judgements = opponent.judge(lines)
    exit_report.say(judgements.line())
    return judgements.metrics()


def evaluate(
    evaluation: Evaluation, info: LaunchInfo, with_samples: bool
) -> tuple[dict[str, float], list[str]]:
    """Generate and score responses; return the metrics, and on the first rank, if wanted, the lines
    of ``sample_lines``. Collective."""
    recipe, folder = evaluation.recipe, evaluation.folder
    total = len(evaluation.prompts)

    def show(answered: int) -> None:
        if info.rank == 0:
            exit_report.say(f"{answered} of {total} prompts answered")

    engine = build_engine(recipe, companion_folder(folder), evaluation.config, evaluation.files)
    engine = with_agent(engine, evaluation.agent, recipe, evaluation.tokenizer)
    try:
        keep_imports()
        with phase("loading weights"):
            buckets = model_buckets(folder, evaluation.config, recipe.rollout.sync_bucket_mb << 20)
            engine.update_weights(buckets, 0)
        with phase("gen"):
            episodes = generate_validation(engine, recipe, evaluation.prompts, show)
    finally:
        engine.stop()
    with phase("reward"):
        scorer = evaluation.scorer
        if recipe.reward_model.in_use:
            scorer = _with_reward_model(scorer, recipe, evaluation.tokenizer)
        episodes = with_scores(episodes, scorer.score(episodes))
    lines = sample_lines(episodes, evaluation.tokenizer) if with_samples else []
    return on_first_rank(partial(validation_metrics, episodes)), lines


def _with_reward_model(
    scorer: Scorer, recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> Scorer:
    """The scorer with the recipe's reward model, which is built here. Collective."""
    device.prepare_megatron()
    from mppo.parallel.groups import GroupRegistry
    from mppo.rewards.reward_model.model_scorer import (
        RewardModelScale,
        reward_model_texts,
        with_reward_model,
    )
    from mppo.trainer.run_roles import build_role

    path = resolve_model(str(recipe.reward_model.path))
    config = read_model_config(path, recipe.model.trust_remote_code)
    texts = reward_model_texts(recipe, tokenizer, config)
    settings = next(role for role in recipe.roles() if role.name == "reward_model")
    role = build_role(settings, path, config, GroupRegistry(recipe.trainer.seed))
    scale = RewardModelScale(recipe.reward_model.normalize, config)
    return with_reward_model(scorer, recipe, texts, role, scale)


def model_buckets(folder: Path, config, bucket_bytes: int) -> Iterator[WeightBucket]:
    """The tensors of a model folder or checkpoint, in buckets of about ``bucket_bytes`` bytes."""
    tensors: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in full_tensors(folder, config):
        tensors.append((name, tensor.to(device.device())))
        size += tensor.nbytes
        if size >= bucket_bytes:
            yield WeightBucket.pack(tensors)
            tensors, size = [], 0
    if tensors:
        yield WeightBucket.pack(tensors)
