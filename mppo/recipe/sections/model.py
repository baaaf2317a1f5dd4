"""The recipe's ``model`` section: the model that the roles start from."""

from __future__ import annotations

from typing import Literal

from mppo.recipe.sections.section import Section

Hub = Literal[False, True, "modelscope"]
"""Where models are downloaded from: false nowhere, true the Hugging Face Hub."""


class ModelConfig(Section):
    """The model that actor, critic and reference start from."""

    path: str = "builtin:tiny"
    """A Hugging Face folder (config.json, tokenizer, safetensors), a Megatron ``torch_dist``
    checkpoint with those files in its subfolder ``hf/``, or a built-in model with random weights
    and a byte tokenizer (``builtin:tiny``). With ``hub``, also ``owner/model`` on the Hugging Face
    Hub."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the parameters and activations of every role. Gradients and optimizer states are
    float32 either way."""
    tokenizer_path: str | None = None
    """Folder of the tokenizer. null: ``path``."""
    hub: Hub = False
    """Download ``owner/model`` paths that are not local folders: true, from the Hugging Face Hub
    into its cache; ``modelscope``, from ModelScope into its cache. false: no model is
    downloaded."""
    trust_remote_code: bool = False
    """Run Python code that comes with a model or tokenizer."""
