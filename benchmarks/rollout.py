"""Generation speed of the rollout engines beside what they are built on.

    python benchmarks/rollout.py [--engine local|sglang] [--dtype float32] [--out FILE]

``local``: mppo's engine and ``transformers.generate`` on the same model, prompts and number of
tokens, turn by turn in one process. ``sglang``: one server of our own; the same requests through
mppo's engine and as one plain HTTP request, turn by turn. The smallest of the repetitions counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import transformers

from mppo.batch import Prompt
from mppo.config.schema import RolloutConfig, SamplingConfig
from mppo.rollout.local import LocalEngine

MODEL = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}


def alternate(
    works: dict[str, Callable[[], object]], repeat: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Smallest wall-clock and processor seconds of each, taking turns."""
    wall = {name: float("inf") for name in works}
    processor = dict(wall)
    for round_ in range(repeat + 1):
        for name, work in works.items():
            start, start_processor = time.perf_counter(), time.process_time()
            work()
            if round_:
                wall[name] = min(wall[name], time.perf_counter() - start)
                processor[name] = min(processor[name], time.process_time() - start_processor)
    return wall, processor


def make_prompts(count: int, length: int) -> list[Prompt]:
    """Random prompts of one length."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, MODEL["vocab_size"], (count, length), generator=generator)
    return [Prompt(i, tuple(row), "", "", "") for i, row in enumerate(tokens.tolist())]


def local(arguments: argparse.Namespace) -> dict[str, object]:
    """The embedded engine beside ``transformers.generate``."""
    dtype = getattr(torch, arguments.dtype)
    config = transformers.Qwen2Config(**MODEL)
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(config).to(dtype).eval()
    engine = LocalEngine("", config, dtype, batch_size=arguments.prompts)
    engine.update_weights([list(model.state_dict().items())], 1)
    prompts = make_prompts(arguments.prompts, arguments.prompt_length)
    ids = torch.tensor([p.token_ids for p in prompts])
    mask, length = torch.ones_like(ids), arguments.response_length

    def plain(**options: object) -> object:
        return model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=length,
            pad_token_id=0,
            **options,
        )

    works = {
        "mppo": lambda: engine.generate(prompts, SamplingConfig(), length, seed=0),
        "transformers": plain,
        "transformers_with_logits": lambda: plain(output_logits=True, return_dict_in_generate=True),
    }
    wall, processor = alternate(works, arguments.repeat)
    tokens = arguments.prompts * length
    return {
        "seconds": wall,
        "processor_seconds": processor,
        "tokens_per_s": {name: tokens / value for name, value in wall.items()},
        "transformers_over_mppo": wall["transformers"] / wall["mppo"],
        "transformers_over_mppo_processor": processor["transformers"] / processor["mppo"],
    }


def sglang(arguments: argparse.Namespace) -> dict[str, object]:
    """mppo's engine beside one plain request with all prompts to the same server."""
    from mppo.rollout.sglang import SGLangEngine
    from mppo.rollout.sglang_api import sampling_parameters

    config = transformers.Qwen2Config(**MODEL)
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        rollout = RolloutConfig(name="sglang", start_timeout_s=900.0)
        engine = SGLangEngine(
            folder, config, getattr(torch, arguments.dtype), rollout, run_dir=Path(folder)
        )
        try:
            engine.update_weights([list(model.state_dict().items())], 1)
            prompts = make_prompts(arguments.prompts, arguments.prompt_length)
            length = arguments.response_length
            (api,) = engine._fleet.apis.values()
            parameters = sampling_parameters(SamplingConfig(), length, [])
            works = {
                "mppo": lambda: engine.generate(prompts, SamplingConfig(), length, seed=0),
                "plain_request": lambda: api.generate([p.token_ids for p in prompts], parameters),
            }
            wall, _ = alternate(works, arguments.repeat)
        finally:
            engine.stop()
    tokens = arguments.prompts * length
    return {
        "seconds": wall,
        "tokens_per_s": {name: tokens / value for name, value in wall.items()},
        "mppo_adds": wall["mppo"] / wall["plain_request"] - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("local", "sglang"), default="local")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-length", type=int, default=32)
    parser.add_argument("--response-length", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = {
        "command": " ".join(["python", *sys.argv]),
        "date": date.today().isoformat(),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
        },
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        **{"local": local, "sglang": sglang}[arguments.engine](arguments),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
