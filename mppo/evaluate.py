"""Evaluate a model folder on a recipe's validation prompts.

``torchrun mppo/evaluate.py --config recipe.yaml model.path=runs/demo/actor`` generates with the
recipe's engine and ``rollout.val_kwargs``, scores with its reward, and prints one line of JSON with
means by data source. The prompts are divided among the ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mppo.config.checks import load_checked
from mppo.config.errors import ConfigError, ConfigIssue
from mppo.config.rules.rule import roles_in_use
from mppo.config.schema import Recipe
from mppo.config.variables import unknown_variables
from mppo.data.source import load_prompts
from mppo.hub.builtin import load_tokenizer, read_model_config, resolve_model
from mppo.hub.check_weights import check_weights
from mppo.hub.data_sets import fetch_data_set
from mppo.hub.download import fetch_model
from mppo.parallel import device
from mppo.parallel.environment import set_for_training
from mppo.parallel.launch import LaunchInfo, discover
from mppo.parallel.process_group import process_group
from mppo.rewards.division import ScoringError
from mppo.rewards.scorer import Scorer, build_scorer
from mppo.rollout.build import build_engine
from mppo.rollout.engine import GenerationRequest
from mppo.rollout.sglang.model_support import engine_issues
from mppo.safety.redact import redacted_output
from mppo.supervision.exit_report import refuse_recipe
from mppo.trainer.failures import is_bad_input
from mppo.trainer.metrics import errors_of, mean_numbers, mean_scores, unscored
from mppo.weights.bucket import WeightBucket
from mppo.weights.hf.full_tensors import full_tensors
from mppo.weights.model_folder import companion_folder


@redacted_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate; exit code 0, 2 for an invalid recipe or input, 1 if a response has no score."""
    parser = argparse.ArgumentParser(prog="mppo/evaluate.py", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="recipe (YAML)")
    parser.add_argument(
        "--out", type=Path, help="file to write the JSON to, besides standard output"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args(argv)
    try:
        info = discover()
        device.check()
    except ValueError as error:
        return refuse_recipe(error)
    try:
        remarks = unknown_variables(os.environ)
        settings = arguments.overrides
        recipe = load_checked(
            arguments.config,
            settings,
            info.world_size,
            remarks=remarks,
            fetch_model=fetch_model,
            fetch_data_set=fetch_data_set,
        )
        _check_models(recipe)
        for remark in remarks if info.rank == 0 else ():
            print(f"mppo: {remark}", file=sys.stderr)
        result = evaluate(recipe, info)
    except ConfigError as error:
        return refuse_recipe(error, info.rank)
    except ValueError as error:
        if not is_bad_input(error):
            raise
        return refuse_recipe(error, info.rank)
    except ScoringError as error:
        print(f"mppo: {error}", file=sys.stderr)
        return 1
    if info.rank == 0:
        print(json.dumps(result))
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(result) + "\n")
    return 0


def _check_models(recipe: Recipe) -> None:
    """Raise ConfigError if the evaluated model or the reward model cannot be loaded."""
    for role in roles_in_use(recipe):
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


def evaluate(recipe: Recipe, info: LaunchInfo) -> dict[str, float]:
    """Mean scores and lengths. Collective.

    Args:
        recipe: the recipe; ``model.path`` is the evaluated model.
        info: rank and world size of this process.

    Returns:
        ``reward/<data source>``, ``reward/<data source>/<name>`` (other numbers of the reward
        function), ``reward/mean``, ``reward/errors`` (responses without a valid score),
        ``reward/timeouts``, ``reward/failures`` and ``reward/bad_verdicts`` (responses that scored
        0 for that reason), ``response_length/mean`` (tokens), ``response_length/clip_ratio`` (share
        of responses with the maximal length), ``prompts`` and ``prompts/<data source>``.
    """
    folder = resolve_model(recipe.model.path)
    trust = recipe.model.trust_remote_code
    config = read_model_config(folder, trust)
    issues = list(engine_issues(recipe, config, not device.is_cuda()))
    if issues:
        raise ConfigError(issues)
    tokenizer = load_tokenizer(recipe.model.tokenizer_path or folder, trust)
    validation = load_prompts(recipe.data, tokenizer, "val")
    if info.rank == 0:
        print(f"mppo: validation: {validation.summary()}", file=sys.stderr, flush=True)
    prompts = validation.prompts
    if not prompts:
        fix = "set data.val_files, or a data.task and a data.val_size above 0"
        raise ConfigError(
            [ConfigIssue("data.val_files", [], "there are no validation prompts", fix)]
        )
    scorer = build_scorer(
        recipe.reward, tokenizer, recipe.data.max_response_length, recipe.reward_model.in_use
    )
    scorer.check(prompts)
    set_for_training(os.environ, recipe.rollout.sync == "distributed")
    with process_group(info, recipe.trainer.collective_timeout_s):
        engine = build_engine(recipe, companion_folder(folder), config, Path("runs") / "evaluate")
        try:
            buckets = model_buckets(folder, config, recipe.rollout.sync_bucket_mb << 20)
            engine.update_weights(buckets, 0)
            limit = recipe.data.max_response_length
            responses = engine.generate(
                GenerationRequest(prompts, recipe.rollout.validation, limit, seed=0)
            )
        finally:
            engine.stop()
        if recipe.reward_model.in_use:
            scorer = _with_reward_model(scorer, recipe, tokenizer)
        judgements = scorer.score(responses)
    rows = responses.table
    lengths = [row.length for row in rows]
    truncated = sum(row.finish_reason == "length" for row in rows)
    numbers = mean_numbers(rows, judgements)
    result = {f"reward/{name}": mean for name, mean in mean_scores(rows, judgements).items()}
    result |= {f"reward/{source}/{name}": mean for (source, name), mean in numbers.items()}
    result |= {f"reward/{reason}": count for reason, count in unscored(judgements).items()}
    counts = Counter(prompt.data_source for prompt in prompts)
    result |= {f"prompts/{name}": float(count) for name, count in counts.items()}
    return result | {
        "reward/mean": sum(judgement.score for judgement in judgements) / len(judgements),
        "reward/errors": float(len(errors_of(judgements))),
        "response_length/mean": sum(lengths) / len(lengths),
        "response_length/clip_ratio": truncated / len(lengths),
        "prompts": float(len(prompts)),
    }


def _with_reward_model(
    scorer: Scorer, recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> Scorer:
    """The scorer with the recipe's reward model, which is built here. Collective.

    Args:
        scorer: the scorer of ``reward.*``.
        recipe: a recipe with a reward model.
        tokenizer: the evaluated model's.
    """
    device.prepare_megatron()
    from mppo.parallel.groups import GroupRegistry
    from mppo.rewards.reward_model.scale import RewardModelScale
    from mppo.rewards.reward_model.scorer import with_reward_model
    from mppo.rewards.reward_model.texts import reward_model_texts
    from mppo.trainer.roles import build_reward_model

    path = resolve_model(str(recipe.reward_model.path))
    config = read_model_config(path, recipe.model.trust_remote_code)
    texts = reward_model_texts(recipe, tokenizer, config)
    role = build_reward_model(recipe, config, GroupRegistry(recipe.trainer.seed))
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


if __name__ == "__main__":
    sys.exit(main())
