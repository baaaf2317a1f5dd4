"""Whether the weights of a recipe's models can be loaded, found out from the files' headers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mppo.config.errors import ConfigIssue
from mppo.config.rules.files import BUILTIN_PREFIX
from mppo.config.rules.rule import RoleCase
from mppo.weights.hf.folder import HFFolder
from mppo.weights.hf.output_folder import companion_files
from mppo.weights.load import known_extras
from mppo.weights.model_folder import checkpoint_folder, companion_folder, is_megatron_checkpoint
from mppo.weights.shape import model_shape
from mppo.weights.torch_dist.contents import read_checkpoint
from mppo.weights.torch_dist.conversion import model_prefix


def check_weights(role: RoleCase, hf_config: Any) -> tuple[ConfigIssue, ...]:
    """Look at the headers of a role's weights, and at the files that go with them into an export,
    before any model is built.

    Args:
        role: the role; an embedded model has nothing to be looked at.
        hf_config: transformers config of its model.

    Returns:
        Nothing.

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: a file is damaged, or does not belong to this config.
    """
    if not role.path.startswith(BUILTIN_PREFIX):
        folder = Path(role.path).expanduser()
        companion_files(companion_folder(folder))
        if is_megatron_checkpoint(folder):
            model_prefix(read_checkpoint(checkpoint_folder(folder)))
        else:
            known_extras(HFFolder(folder), model_shape(hf_config))
    return ()
