"""The recipe of an evaluation, checked before torch is imported."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import partial

from mppo.config.checks import load_checked
from mppo.config.errors import ConfigError, ConfigIssue
from mppo.config.load import Given
from mppo.config.schema import Recipe
from mppo.config.variables import unknown_variables
from mppo.hub.data_sets import fetch_data_set
from mppo.hub.download import fetch_model
from mppo.parallel.launch import LaunchInfo
from mppo.supervision import exit_report
from mppo.trainer.start.user_code import input_issues

_UNUSED = re.compile(
    r"(actor|critic|ref|algorithm)\..*|data\.((sources\.\d+\.)?train_|ptx_files).*|"
    r"trainer\.(nnodes|n_gpus_per_node|logger|replay|total_|save_|schedule).*"
)
"""Keys that an evaluation does not read."""


def concerns_evaluation(key: str) -> bool:
    """Whether an evaluation reads a key: layouts, optimizers, training data, loggers and models of
    other roles may be those of another machine."""
    return _UNUSED.fullmatch(key) is None


NO_PROMPTS = ConfigIssue(
    "data.val_files",
    [],
    "there are no validation prompts",
    "set data.val_files, or a data.task and a data.val_size above 0",
)
"""Of an evaluation that would generate nothing."""


def evaluated_recipe(given: Given, overrides: Sequence[str], info: LaunchInfo) -> Recipe:
    """Load and check a recipe, its code and the rows of its validation files; the first rank prints
    remarks about it. ConfigError, ValueError: it cannot be evaluated."""
    remarks = unknown_variables(os.environ)
    recipe = load_checked(
        given,
        overrides,
        info.world_size,
        remarks=remarks,
        fetch_model=fetch_model,
        fetch_data_set=fetch_data_set,
        check_inputs=partial(input_issues, splits=("val",)),
        concerns=concerns_evaluation,
    )
    for remark in remarks if info.rank == 0 else ():
        exit_report.say(remark)
    sources = recipe.data.prompt_sources.values()
    if not any(x.val_size != 0 and (x.task or x.val_files) for x in sources):
        raise ConfigError([NO_PROMPTS])
    return recipe
