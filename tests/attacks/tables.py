"""All tables of attacks."""

from __future__ import annotations

from attacks import (
    on_checkpoints,
    on_dumps,
    on_incomplete_checkpoints,
    on_model_folders,
    on_programs,
    on_recipes,
    on_rewards,
    on_secrets,
    on_verifiers,
)

TABLES = {
    module.__name__.rpartition(".")[2]: module.TABLE
    for module in (
        on_recipes,
        on_model_folders,
        on_checkpoints,
        on_incomplete_checkpoints,
        on_dumps,
        on_programs,
        on_verifiers,
        on_rewards,
        on_secrets,
    )
}
