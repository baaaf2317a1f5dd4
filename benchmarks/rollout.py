"""Generation speed of the rollout engines compared with the libraries they use.

    python benchmarks/rollout.py [--engine local|sglang] [--dtype float32] [--out FILE]

``local``: mppo's engine and ``transformers.generate`` on the same model, prompts and number of
tokens, alternating in one process; then prompts of many lengths and responses that end early
(``mixed_prompts_ending_early`` in the result).

``sglang``: one server that mppo starts; the same prompts through mppo's engine, as plain HTTP
requests sent at once (one per prompt, as mppo sends them), and as one request with all prompts,
alternating. The overhead of mppo is the median of the turns' ratios. On a busy machine these vary
much: ``mppo_adds_in_the_driver`` is the additional processor time of mppo's driver, as a share of
the plain requests' wall-clock time. Other times are the smallest of the repetitions.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import transformers
from record import alternate, parser, record

from mppo.batch.prompt import Prompt
from mppo.recipe.sections.rollout import RolloutConfig, SamplingConfig
from mppo.rollout.engine import GenerationRequest
from mppo.rollout.local.local_engine import LocalEngine
from mppo.weights.bucket import WeightBucket

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
PADDING = 0
ALL_BUT_GREEDY = 1e-5
"""With this temperature both sample the same tokens in float32, so rows have equal lengths."""


def make_prompts(lengths: Sequence[int]) -> list[Prompt]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, MODEL["vocab_size"], (n,), generator=generator) for n in lengths]
    return [Prompt(i, tuple(row.tolist()), "", "", "") for i, row in enumerate(rows)]


def mixed_lengths(count: int, mean: int) -> list[int]:
    """Lengths evenly distributed over 1 to ``2 * mean - 1``."""
    return torch.linspace(1, 2 * mean - 1, count).round().int().tolist()


def frequent_ends(length: int) -> tuple[int, ...]:
    """So many stop tokens that uniform sampling ends after about half of ``length`` tokens."""
    vocabulary = MODEL["vocab_size"]
    return tuple(range(vocabulary - 2 * vocabulary // (length + 2), vocabulary))


def local(arguments: argparse.Namespace) -> dict[str, object]:
    """The local engine against ``transformers.generate``, prompts of one length and of many."""
    dtype = getattr(torch, arguments.dtype)
    config = transformers.Qwen2Config(**MODEL)
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(config).to(dtype).eval()
    engine = LocalEngine("", config, dtype, batch_size=arguments.prompts)
    engine.update_weights([WeightBucket.pack(model.state_dict().items())], 1)
    count, length = arguments.prompts, arguments.response_length
    even = make_prompts([arguments.prompt_length] * count)
    mixed = make_prompts(mixed_lengths(count, arguments.prompt_length))
    ending = SamplingConfig(temperature=ALL_BUT_GREEDY, stop_token_ids=frequent_ends(length))
    whole, early = (
        GenerationRequest(even, SamplingConfig(), length, seed=0),
        GenerationRequest(mixed, ending, length, seed=0),
    )
    return {
        **beside_transformers(engine, model, whole, arguments.repeat),
        "mixed_prompts_ending_early": beside_transformers(engine, model, early, arguments.repeat),
    }


def beside_transformers(
    engine: LocalEngine,
    model: transformers.PreTrainedModel,
    request: GenerationRequest,
    repeat: int,
) -> dict[str, object]:
    """One batch by the engine and by ``transformers.generate``.

    Ratios are of seconds per generated token; with random draws, rows may end early at
    different tokens in the two.
    """
    ids, mask = _padded(request.prompts)

    def plain(**options: object) -> torch.Tensor:
        torch.manual_seed(request.seed)
        output = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=request.sampling.temperature,
            top_k=0,
            max_new_tokens=request.max_tokens,
            pad_token_id=PADDING,
            eos_token_id=list(request.sampling.stop_token_ids) or None,
            **options,
        )
        return getattr(output, "sequences", output)[:, ids.shape[1] :]

    works = {
        "mppo": lambda: engine.generate(request),
        "transformers": plain,
        "transformers_with_logits": lambda: plain(output_logits=True, return_dict_in_generate=True),
    }
    theirs = _generated(plain(), request.sampling.stop_token_ids)
    tokens = dict.fromkeys(works, theirs)
    tokens["mppo"] = sum(each.length for each in engine.generate(request))
    times = alternate(works, repeat)
    share = tokens["mppo"] / theirs
    return {
        "prompt_tokens": [len(p.token_ids) for p in request.prompts],
        "generated_tokens": tokens,
        "seconds": {name: t.wall for name, t in times.items()},
        "processor_seconds": {name: t.processor for name, t in times.items()},
        "tokens_per_s": {name: tokens[name] / t.wall for name, t in times.items()},
        "transformers_over_mppo": share * times["transformers"].wall / times["mppo"].wall,
        "transformers_over_mppo_processor": share
        * times["transformers"].processor
        / times["mppo"].processor,
    }


def _padded(prompts: Sequence[Prompt]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and attention mask ``[P, longest]``, padded on the left."""
    longest = max(len(p.token_ids) for p in prompts)
    ids = torch.full((len(prompts), longest), PADDING)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt.token_ids) :] = prompt.token_ids
        mask[row, longest - len(prompt.token_ids) :] = 1
    return ids, mask


def _generated(responses: torch.Tensor, stops: Sequence[int]) -> int:
    """Tokens of the responses ``[P, longest]``, each up to its first stop token."""
    ends = torch.isin(responses, torch.tensor(stops, dtype=torch.int64)).int()
    return int((ends.cumsum(-1) - ends == 0).sum())


def sglang(arguments: argparse.Namespace) -> dict[str, object]:
    """mppo's engine against plain requests to the same server: one per prompt, and one for all."""
    from mppo.rollout.sglang.server_api import sampling_parameters
    from mppo.rollout.sglang.sglang_engine import SGLangEngine

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
            engine.update_weights([WeightBucket.pack(model.state_dict().items())], 1)
            prompts = make_prompts([arguments.prompt_length] * arguments.prompts)
            length = arguments.response_length
            (api,) = engine.fleet.apis.values()
            parameters = sampling_parameters(SamplingConfig(), length, [])
            works = {
                "mppo": lambda: engine.generate(
                    GenerationRequest(prompts, SamplingConfig(), length, seed=0)
                ),
                "plain_requests": lambda: list(
                    pool.map(lambda p: api.generate([p.token_ids.tolist()], parameters), prompts)
                ),
                "one_plain_request": lambda: api.generate(
                    [p.token_ids.tolist() for p in prompts], parameters
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
