"""Host time and memory from SGLang's HTTP answers to micro-batches.

    python benchmarks/batch_path.py [--tokens 1 4 16 64] [--out FILE]

The path of one rank: the text of each answer becomes responses, the responses become a batch, and
the batch is cut into micro-batches. Answers have the form in which SGLang 0.5.21 writes them: 8
responses of 2,048 tokens to a prompt of 512 tokens in one body. Each turn runs in a process of its
own with one thread and Python's default garbage collector.

Times are the processor time of the process, the smallest of the turns, in nanoseconds per token of
prompts and responses. Memory is the growth of the process's resident memory: ``held`` with
responses and batch in memory, ``peak`` at the highest point. Sizes are in millions of tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil
import torch
from record import parser, record

PROMPT, RESPONSE, SAMPLES, BODIES = 512, 2048, 8, 16
MICRO_BATCH_TOKENS = 32_768
STAGES = ("answers", "responses", "batch", "micro_batches")


def body(random: np.random.Generator) -> bytes:
    """The text of one answer, as ``/generate`` returns it."""
    answers = []
    for sample in range(SAMPLES):
        ids = random.integers(1000, 150_000, RESPONSE).tolist()
        logprobs = (-random.exponential(0.7, RESPONSE)).astype(np.float32).tolist()
        meta = {
            "id": f"{sample:032x}",
            "finish_reason": {"type": "length", "length": RESPONSE},
            "prompt_tokens": PROMPT,
            "weight_version": "3",
            "total_retractions": 0,
            "input_token_logprobs": [],
            "output_token_logprobs": [(x, i, None) for x, i in zip(logprobs, ids)],
            "output_token_logprobs_length": RESPONSE,
            "completion_tokens": RESPONSE,
            "cached_tokens": 0,
            "e2e_latency": 12.5,
        }
        answers.append({"text": "word " * RESPONSE, "output_ids": ids, "meta_info": meta})
    return json.dumps(answers, separators=(",", ":")).encode()


def resident() -> int:
    """Resident memory of this process in bytes."""
    return psutil.Process().memory_info().rss


def measure(millions: float) -> dict[str, float]:
    """Run the path once in this process.

    Before, it runs for one prompt: what is loaded or set up once in a training run does not count.
    """
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    bodies = [body(random) for _ in range(BODIES)]
    path(bodies, 1)
    before = resident()
    count = max(1, round(millions * 1e6 / SAMPLES / (PROMPT + RESPONSE)))
    batch, times, held = path(bodies, count)

    tokens = len(batch.tokens_T)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    checked = int(batch.tokens_T.sum()), batch.rollout_logprobs_T.double().sum().item()
    stages = {name: b - a for name, a, b in zip(STAGES, times, times[1:])}
    seconds = {**stages, "sum": times[-1] - times[0]}
    return {
        "tokens": tokens,
        **{f"ns_per_token/{name}": 1e9 * value / tokens for name, value in seconds.items()},
        "bytes_per_token/held": (held - before) / tokens,
        "bytes_per_token/peak": peak / tokens,
        "checksum/tokens": checked[0],
        "checksum/logprobs": checked[1],
    }


def path(bodies: Sequence[bytes], count: int) -> tuple[Any, list[float], int]:
    """From the answers to some prompts to micro-batches.

    Returns:
        The batch; processor time at the beginning and after each stage; and resident memory with
        responses and batch.
    """
    from mppo.algos.token_axis import select_sequences
    from mppo.batch.microbatches import MicroBatchLimits, MicroBatchSpec
    from mppo.batch.packing import pack_episodes
    from mppo.batch.prompt import Prompt
    from mppo.recipe.sections.rollout import SamplingConfig
    from mppo.rollout.engine import GenerationRequest
    from mppo.rollout.sglang.generation import add_answers
    from mppo.rollout.sglang.server_response import parse_responses

    prompts = [Prompt(i, tuple(range(PROMPT)), "", "", "") for i in range(count)]
    request = GenerationRequest(prompts, SamplingConfig(n=SAMPLES), RESPONSE, seed=0)
    spec = MicroBatchSpec(dp=1, count_multiple=1, limits=MicroBatchLimits(1, MICRO_BATCH_TOKENS))
    times = [time.process_time()]

    mine: dict[int, Any] = {}
    for index in range(count):
        answers = parse_responses(bodies[index % BODIES])
        mine.update({index * SAMPLES + sample: answer for sample, answer in enumerate(answers)})
    times.append(time.process_time())
    added = add_answers({}, mine, request, None, 1)
    found = [added[place] for place in sorted(added)]
    del mine, answers  # as the engine, which has received everything
    times.append(time.process_time())
    batch = pack_episodes(found)
    times.append(time.process_time())
    held = resident()
    for micro_batches in spec.plan(batch.lengths_B.tolist()):
        for indices in micro_batches:
            for values_T in (batch.tokens_T, batch.response_mask_T, batch.rollout_logprobs_T):
                select_sequences(values_T, batch.cu_seqlens, indices)
    return batch, [*times, time.process_time()], held


def turn(millions: float) -> dict[str, float]:
    """``measure`` in a new process."""
    command = [sys.executable, __file__, "--measure", str(millions)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def best(turns: list[dict[str, float]]) -> dict[str, float]:
    """The turn with the least time; all turns must have made the same batch."""
    assert len({(t["checksum/tokens"], t["checksum/logprobs"]) for t in turns}) == 1
    return min(turns, key=lambda t: t["ns_per_token/sum"])


def main() -> None:
    arguments = parser(__doc__, repeat=3)
    arguments.add_argument(
        "--tokens", type=float, nargs="+", default=[1, 4, 16, 64], help="millions"
    )
    arguments.add_argument("--measure", type=float, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.measure is not None:
        print(json.dumps(measure(given.measure)))
        return
    turns = {size: [turn(size) for _ in range(given.repeat)] for size in given.tokens}
    record({"by_tokens": {f"{size:g} M": best(found) for size, found in turns.items()}}, given.out)


if __name__ == "__main__":
    main()
