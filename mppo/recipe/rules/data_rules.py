"""Rules of the ``data`` section's sources of prompts."""

from __future__ import annotations

from collections.abc import Iterator

from mppo.recipe.data_set_name import FORM, is_data_set, parse_data_set
from mppo.recipe.errors import ConfigIssue
from mppo.recipe.rules.rule import RuleContext, rule


@rule("data.task", "data.train_files", "data.val_files", "data.task_kwargs", "data.sources")
def prompts_have_one_source(context: RuleContext) -> Iterator[ConfigIssue]:
    """Every source has a procedural task or files, not both or neither."""
    data = context.recipe.data
    for key in ("task", "train_files", "val_files"):
        if data.sources and (value := getattr(data, key)):
            why, fix = "data.sources is given too", "move it into one of data.sources"
            yield ConfigIssue(f"data.{key}", value, why, fix)
    for key, source in data.prompt_sources.items():
        if source.task and source.train_files:
            fix = f"leave out {key}.task or {key}.train_files"
            yield ConfigIssue(f"{key}.task", source.task, f"{key}.train_files is given too", fix)
        if not source.task and not source.train_files:
            fix = f"set {key}.task (arithmetic, ...) or {key}.train_files ([train.jsonl])"
            yield ConfigIssue(f"{key}.task", None, "there are no training prompts", fix)
        if source.task_kwargs and not source.task:
            why, fix = f"has no effect without {key}.task", f"set {key}.task, or leave it out"
            yield ConfigIssue(f"{key}.task_kwargs", source.task_kwargs, why, fix)


@rule("data")
def data_sets_have_names(context: RuleContext) -> Iterator[ConfigIssue]:
    """A name that begins with ``hf:`` has the form of a data set's name."""
    for key, names in context.recipe.data.files.items():
        for name in filter(is_data_set, names):
            try:
                parse_data_set(name, "train")
            except ValueError as error:
                yield ConfigIssue(key, name, str(error), f"write {FORM}")


@rule("data.sources", "data.answer_key", "reward.name", "reward.weight", "reward_model")
def verifiers_have_answers(context: RuleContext) -> Iterator[ConfigIssue]:
    """Rules need a ground truth, and only they use the verifier of a source."""
    reward, data = context.recipe.reward, context.recipe.data
    by_rule = reward.name == "rule" and context.recipe.uses_reward_section
    for key, source in data.prompt_sources.items():
        if source.verifier and reward.name != "rule":
            why = f"has no effect with reward.name = {reward.name}"
            fix = "leave it out, or set reward.name to rule"
            yield ConfigIssue(f"{key}.verifier", source.verifier, why, fix)
        if source.answer_key is None and source.train_files and by_rule:
            why = "reward.name = rule compares responses with the ground truth"
            fix = "name its column, set reward.name to function or remote, or set reward_model.path"
            yield ConfigIssue(f"{key}.answer_key", None, why, fix)


@rule("trainer.test_freq", "data")
def validation_has_prompts(context: RuleContext) -> Iterator[ConfigIssue]:
    """Validation every n steps needs validation prompts."""
    freq = context.recipe.trainer.test_freq
    why = f"trainer.test_freq = {freq} needs validation prompts"
    sources = context.recipe.data.prompt_sources
    has_prompts = [
        source.val_size != 0 and bool(source.task or source.val_files)
        for source in sources.values()
    ]
    if freq <= 0 or any(has_prompts):
        return
    key, source = next(iter(sources.items()))
    if source.val_size == 0:
        yield ConfigIssue(f"{key}.val_size", 0, why, "set it to at least 1, or test_freq to -1")
    elif source.train_files:
        yield ConfigIssue(f"{key}.val_files", [], why, "give a file, or set test_freq to -1")
