"""Token ids of prompts against the vocabularies of the models that read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mppo.batch.prompt import Prompt
from mppo.config.errors import config_error
from mppo.config.schema import Recipe
from mppo.weights.shape import model_shape


def check_token_ids(
    recipe: Recipe, prompts: Sequence[Prompt], hf_configs: Mapping[str, Any]
) -> None:
    """Check that the models have an embedding of every token; a GPU would only abort.

    A reward model for which texts are tokenised again needs no config.

    Raises:
        ConfigError: the tokenizer is another model's.
    """
    largest = max((int(each.token_ids.max()) for each in prompts if len(each.token_ids)), default=0)
    for role in recipe.roles():
        if role.name == "reward_model" or role.name not in hf_configs:
            continue
        vocabulary = model_shape(hf_configs[role.name]).vocab
        if largest >= vocabulary:
            given, own = recipe.model.tokenizer_path, role.path_key == "model.path"
            key, value = ("model.tokenizer_path", given) if given else (role.path_key, role.path)
            why = f"a prompt has the token id {largest}, the model of {role.name} {vocabulary} ids"
            fix = "leave it out: the model has its own" if given and own else "give a model with it"
            raise config_error(key, value, why, fix)
