"""Inputs of the checks on GPUs that need no download: a model of a shipped config, and questions.

    python tests/gpu/gpu_inputs.py FOLDER MODEL [FIELD=NUMBER ...]

writes ``FOLDER/MODEL``, a model of ``recipes/configs/MODEL`` with random weights and a byte
tokenizer, and ``FOLDER/questions.jsonl``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

CONFIGS = Path(__file__).parents[2] / "recipes" / "configs"
QUESTIONS = "questions.jsonl"
PROMPT_LENGTH = 256
"""Tokens of every prompt, so that sequences have the length that a simulation assumes."""
_TEMPLATE_TOKENS = 2
"""Tokens that the byte tokenizer's chat template adds to a question."""


def write_model(name: str, folder: Path, changed: Mapping[str, int]) -> Path:
    """Write a model with random bfloat16 weights.

    Args:
        name: folder in ``recipes/configs``.
        folder: where the model's folder is made.
        changed: fields of its config to change, such as the number of layers.

    Returns:
        The model's folder.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from mppo.hub.builtin import byte_tokenizer, read_model_config
    from mppo.parallel import device

    config, tokenizer = read_model_config(CONFIGS / name), byte_tokenizer()
    for field, value in changed.items():
        setattr(config, field, value)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    for token in ("bos", "eos", "pad"):
        setattr(config, f"{token}_token_id", getattr(tokenizer, f"{token}_token_id"))
    torch.manual_seed(0)
    with device.device():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / name)
    return folder / name


def write_questions(folder: Path, count: int = 512) -> Path:
    """Write additions in the form of verl's GSM8K rows, each of ``PROMPT_LENGTH`` tokens."""
    rows = []
    for number in range(count):
        question = f"{number} + {number} =".rjust(PROMPT_LENGTH - _TEMPLATE_TOKENS, ".")
        rows.append(
            {
                "prompt": [{"role": "user", "content": question}],
                "reward_model": {"ground_truth": str(2 * number)},
                "data_source": "openai/gsm8k",
            }
        )
    path = folder / QUESTIONS
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def main() -> None:
    """Write a model and the questions."""
    folder, name, *changed = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    numbers = {field: int(value) for field, _, value in (item.partition("=") for item in changed)}
    print(f"wrote {write_model(name, Path(folder), numbers)}")
    print(f"wrote {write_questions(Path(folder))}")


if __name__ == "__main__":
    main()
