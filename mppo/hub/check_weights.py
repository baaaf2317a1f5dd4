"""Check, from the files' headers, that the weights of a recipe's models can be loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mppo.hub.builtin import REWARD_MODELS
from mppo.hub.local_model import BUILTIN_PREFIX
from mppo.recipe.errors import ConfigIssue
from mppo.recipe.model_shape import model_shape, with_value_bins
from mppo.recipe.sections.role_config import RoleConfig
from mppo.recipe.sections.roles import CriticConfig
from mppo.safety.input_error import InputError
from mppo.weights.hf.input_folder import HFFolder
from mppo.weights.hf.output_folder import companion_files
from mppo.weights.load_stages import known_extras
from mppo.weights.model_folder import checkpoint_folder, companion_folder, is_megatron_checkpoint
from mppo.weights.table import parameter_table
from mppo.weights.torch_dist.contents import read_checkpoint
from mppo.weights.torch_dist.reader import CheckpointReader


def check_weights(role: RoleConfig, hf_config: Any) -> tuple[ConfigIssue, ...]:
    """Check the headers of a role's weights and the files that an export copies, before any model
    is built; an embedded model's need no check.

    Returns an issue if ``critic.value_head_init`` is not the default and the critic's model has a
    value head; every other problem is raised.

    Raises:
        OSError: a file is missing or cannot be read.
        InputError: a file is damaged, or does not match the config.
    """
    if role.path.startswith(BUILTIN_PREFIX):
        has_head = role.path.removeprefix(BUILTIN_PREFIX) in REWARD_MODELS
    else:
        folder = Path(role.path).expanduser()
        companion_files(companion_folder(folder))
        shape = model_shape(with_value_bins(hf_config, role.value_bins))
        table = parameter_table(shape)
        head = table.value_entry()
        if is_megatron_checkpoint(folder):
            checkpoint = read_checkpoint(checkpoint_folder(folder))
            reader = CheckpointReader(checkpoint, table)
            for entry in reader.entries():
                reader.check(entry)
            has_head = reader.prefix + head.name in checkpoint
        else:
            source = HFFolder(folder)
            known_extras(source, shape)
            has_head = head.hf[0] in source.tensors
        if role.name == "reward_model" and not has_head:
            raise InputError(f"{folder}: has no score head ({head.hf[0]}, {head.name})")
    critic = role.batching
    if (
        isinstance(critic, CriticConfig)
        and has_head
        and critic.value_head_init != CriticConfig().value_head_init
    ):
        key, why = "critic.value_head_init", "has no effect: the critic's model has a value head"
        return (ConfigIssue(key, critic.value_head_init, why, "leave it out"),)
    return ()
