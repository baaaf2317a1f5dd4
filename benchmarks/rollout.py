"""Generation speed of the rollout engines beside what they are built on.

    python benchmarks/rollout.py [--engine local|sglang] [--dtype float32] [--out FILE]

``local``: mppo's engine and ``transformers.generate`` on the same model, prompts and number of
tokens, turn by turn in one process. ``sglang``: one server of our own; the same prompts through
mppo's engine, as plain HTTP requests sent at once, one for each prompt as mppo sends them, and as
one request with all of them, turn by turn; what mppo adds is the median of the turns' ratios. On a
busy machine these scatter: ``mppo_adds_in_the_driver`` is the processor time its driver takes more
than plain requests do, as a share of their wall-clock time. Other times are the smallest of the
repetitions.
"""

from __future__ import annotations

import argparse
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import transformers
from record import alternate, parser, record

from mppo.batch import Prompt
from mppo.config.schema import RolloutConfig, SamplingConfig
from mppo.rollout.engine import Wish
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
        "mppo": lambda: engine.generate(Wish(prompts, SamplingConfig(), length, seed=0)),
        "transformers": plain,
        "transformers_with_logits": lambda: plain(output_logits=True, return_dict_in_generate=True),
    }
    times = alternate(works, arguments.repeat)
    tokens = arguments.prompts * length
    return {
        "seconds": {name: t.wall for name, t in times.items()},
        "processor_seconds": {name: t.processor for name, t in times.items()},
        "tokens_per_s": {name: tokens / t.wall for name, t in times.items()},
        "transformers_over_mppo": times["transformers"].wall / times["mppo"].wall,
        "transformers_over_mppo_processor": times["transformers"].processor
        / times["mppo"].processor,
    }


def sglang(arguments: argparse.Namespace) -> dict[str, object]:
    """mppo's engine beside plain requests to the same server: one for each prompt, one for all."""
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
                "mppo": lambda: engine.generate(Wish(prompts, SamplingConfig(), length, seed=0)),
                "plain_requests": lambda: list(
                    pool.map(lambda p: api.generate([p.token_ids], parameters), prompts)
                ),
                "one_plain_request": lambda: api.generate(
                    [p.token_ids for p in prompts], parameters
                ),
            }
            with ThreadPoolExecutor(len(prompts)) as pool:
                times = alternate(works, arguments.repeat)
        finally:
            engine.stop()
    tokens = arguments.prompts * length
    return {
        "seconds": {name: t.wall for name, t in times.items()},
        "processor_seconds_of_the_driver": {name: t.processor for name, t in times.items()},
        "tokens_per_s": {name: tokens / t.wall for name, t in times.items()},
        "mppo_adds": times["mppo"].over(times["plain_requests"]) - 1,
        "mppo_adds_to_one_request": times["mppo"].over(times["one_plain_request"]) - 1,
        "mppo_adds_to_the_smallest": times["mppo"].wall / times["plain_requests"].wall - 1,
        "mppo_adds_in_the_driver": (times["mppo"].processor - times["plain_requests"].processor)
        / times["plain_requests"].wall,
        "all_seconds": {name: t.walls for name, t in times.items()},
    }


def main() -> None:
    arguments = parser(__doc__, repeat=10)
    arguments.add_argument("--engine", choices=("local", "sglang"), default="local")
    arguments.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments.add_argument("--prompts", type=int, default=32)
    arguments.add_argument("--prompt-length", type=int, default=32)
    arguments.add_argument("--response-length", type=int, default=32)
    given = arguments.parse_args()
    record({"local": local, "sglang": sglang}[given.engine](given), given.out)


if __name__ == "__main__":
    main()
