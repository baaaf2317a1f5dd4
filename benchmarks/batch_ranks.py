"""Host time and bytes per rank from HTTP answers to micro-batches, on 1, 2, 4 and 8 ranks.

    python benchmarks/batch_ranks.py [--ranks 1 2 4 8] [--tensor-parallel N] [--context-parallel N]
        [--tokens MILLIONS]

The batch stays the same: the bodies of ``batch_path.py`` are dealt out to the ranks, gloo processes
of this machine. Each rank parses its answers, all exchange what every rank must know of each
response, pack the batch where the responses arrived, give each other the sequences of their
micro-batches and cut them. The ranks are data-parallel, or with ``--tensor-parallel`` or
``--context-parallel`` N groups of N that work on the same sequences.

``cpu_s`` is the processor time of a rank's process; waiting for others takes none. Bytes are
counted: ``held`` in the tensors of responses and batch, ``share`` in those of a pass, where what a
rank maps of another's memory counts for that one only. The largest rank counts.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from batch_path import BODIES, MICRO_BATCH_TOKENS, PROMPT, RESPONSE, SAMPLES, body
from record import parser, record

EXPERTS = (8, 8)
"""Layers with experts and chosen experts, replayed from the engine (R3)."""


def token_bytes(batch: Any) -> int:
    """Bytes of the tensors of a batch that have a row for every token."""
    names = [f.name for f in fields(batch) if f.name.endswith("_T")]
    return sum(getattr(batch, name).nbytes for name in names)


def receive(request: Any, rank: int, world: int) -> dict[int, Any]:
    """Parse the answers to this rank's prompts."""
    from mppo.rollout.sglang.server_response import parse_responses

    random = np.random.default_rng(0)
    bodies = [body(random) for _ in range(min(BODIES, len(request.prompts)))]
    start = time.process_time()
    mine: dict[int, Any] = {}
    for index in range(rank, len(request.prompts), world):
        answers = enumerate(parse_responses(bodies[index % len(bodies)]))
        mine.update({index * SAMPLES + sample: answer for sample, answer in answers})
    mine[-1] = time.process_time() - start
    return mine


def with_experts(episodes: dict[int, Any]) -> list[Any]:
    """The responses with routed experts, as an engine reports them for R3."""
    from dataclasses import replace

    shape = PROMPT + RESPONSE - 1, *EXPERTS
    experts = torch.arange(np.prod(shape)).remainder(64).to(torch.int16).view(shape)
    return [
        replace(each, routed=shape) if each.tokens is None else each.with_experts(experts)
        for _, each in sorted(episodes.items())
    ]


def path(
    rank: int,
    world: int,
    folder: Path,
    prompts: int,
    tensor_parallel: int,
    context_parallel: int = 1,
) -> None:
    """One rank of the path; writes its numbers to a file."""
    from mppo.algos.token_axis import select_sequences
    from mppo.batch.microbatches import MicroBatchLimits, MicroBatchSpec
    from mppo.batch.mini_batch import TOKENS_ONLY
    from mppo.batch.prompt import Prompt
    from mppo.batch.shares import pack_at_home, share_out
    from mppo.models.work_share import PassMoves, fetch_share
    from mppo.parallel.layout import Layout
    from mppo.recipe.sections.rollout import SamplingConfig
    from mppo.rollout.engine import GenerationRequest
    from mppo.rollout.sglang.generation import add_answers

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
    some = [Prompt(i, range(PROMPT), "", "", "") for i in range(prompts)]
    request = GenerationRequest(some, SamplingConfig(n=SAMPLES), RESPONSE, seed=0)
    mine = receive(request, rank, world)
    parsing = mine.pop(-1)
    layout = Layout(world, tp=tensor_parallel, cp=context_parallel)
    spec = MicroBatchSpec(layout.dp, 1, MicroBatchLimits(1, MICRO_BATCH_TOKENS))
    dist.barrier()
    start = time.process_time()
    episodes = with_experts(add_answers({}, mine, request, None, world))
    batch = share_out(pack_at_home(episodes), 64)
    plan = spec.plan(batch.lengths_B.tolist())
    moves = PassMoves(layout, plan, batch)
    share, _ = fetch_share(batch, moves, TOKENS_ONLY, [list(range(EXPERTS[0]))] * layout.pp)
    for indices in plan[layout.coordinates(rank).dp]:
        places = share.places(indices)
        for values_T in (share.tokens_T, share.response_mask_T):
            select_sequences(values_T, share.cu_seqlens, places)
    seconds = time.process_time() - start
    responses = sum(8 * each.length for each in episodes if each.tokens is not None)
    place = layout.coordinates(rank)
    shared = share.routed_experts_T.nbytes if place.tp or place.cp else 0
    numbers = {
        "cpu_s/answers": parsing,
        "cpu_s/batch": seconds,
        "cpu_s/sum": parsing + seconds,
        "bytes/held": responses + token_bytes(batch),
        "bytes/share": token_bytes(share) - shared,
    }
    (folder / f"{rank}.json").write_text(json.dumps(numbers))
    dist.barrier()
    dist.destroy_process_group()


def measure(world: int, prompts: int, *parallel: int) -> dict[str, float]:
    """The largest numbers of all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world, Path(folder), prompts, *parallel)
        mp.start_processes(path, arguments, world, start_method="spawn")
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world)]
    return {name: max(numbers[name] for numbers in ranks) for name in ranks[0]}


def main() -> None:
    arguments: argparse.ArgumentParser = parser(__doc__, repeat=1)
    arguments.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    arguments.add_argument("--tokens", type=float, default=2, help="millions")
    arguments.add_argument("--tensor-parallel", type=int, default=1, metavar="N")
    arguments.add_argument("--context-parallel", type=int, default=1, metavar="N")
    given = arguments.parse_args()
    parallel = given.tensor_parallel, given.context_parallel
    prompts = max(1, round(given.tokens * 1e6 / SAMPLES / (PROMPT + RESPONSE)))
    results: dict[str, dict[str, float]] = {}
    for world in given.ranks:
        turns = [measure(world, prompts, *parallel) for _ in range(given.repeat)]
        results[str(world)] = min(turns, key=lambda numbers: numbers["cpu_s/sum"])
    tokens = prompts * SAMPLES * (PROMPT + RESPONSE)
    sizes = dict(zip(("tensor_parallel", "context_parallel"), parallel))
    record({"tokens": tokens, **sizes, "by_ranks": results}, given.out)


if __name__ == "__main__":
    main()
