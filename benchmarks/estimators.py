"""Time from rewards to advantages, on one core.

    python benchmarks/estimators.py [--sequences 1024] [--tokens 8192] [--out FILE]

Times GAE and whitening over packed tokens, the padded time loop that other systems use, on the same
numbers (with the largest difference between the two), and a complete ``estimate`` per estimator.
The smallest of several repetitions counts. The result has wall-clock and processor seconds; on a
shared machine only the latter are comparable. Large arrays use huge pages
(``THP_MEM_ALLOC_ENABLE=1``, a setting of PyTorch), because page faults would otherwise take most of
the time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
from torch import Tensor

from mppo import register
from mppo.algos.gae import gae
from mppo.algos.masked import masked_whiten
from mppo.batch.batch import Batch
from mppo.batch.outputs import Outputs
from mppo.parallel import device
from mppo.recipe.sections.algorithm import AlgorithmConfig
from mppo.trainer.advantages import estimate

GAMMA, LAM = 1.0, 0.95
ESTIMATORS = register.estimator.own


def fastest(work: Callable[[], object], repeat: int) -> dict[str, float]:
    """Milliseconds of the fastest repetition, by wall clock and by processor time."""
    wall, processor = [], []
    for _ in range(repeat + 1):
        start, start_processor = time.perf_counter(), time.process_time()
        work()
        wall.append(time.perf_counter() - start)
        processor.append(time.process_time() - start_processor)
    return {"wall_ms": 1e3 * min(wall[1:]), "processor_ms": 1e3 * min(processor[1:])}


def loop_gae(rewards_BR: Tensor, values_BR: Tensor) -> Tensor:
    """The recursion as a loop over time on padded rows."""
    running = torch.zeros(len(values_BR))
    columns = []
    width = values_BR.shape[1]
    for t in reversed(range(width)):
        following = values_BR[:, t + 1] if t + 1 < width else 0.0
        running = rewards_BR[:, t] + GAMMA * following - values_BR[:, t] + GAMMA * LAM * running
        columns.append(running)
    return torch.stack(columns[::-1], dim=1)


def outputs_of(sequences: int, tokens: int) -> Outputs:
    """A batch of equally long responses with prompts of an eighth of the tokens."""
    generator = torch.Generator().manual_seed(0)
    total = sequences * tokens
    mask_T = torch.ones(sequences, tokens)
    mask_T[:, : tokens // 8] = 0.0
    mask_T = mask_T.view(-1)

    def random() -> Tensor:
        return torch.randn(total, generator=generator).mul_(mask_T)

    batch = Batch(
        tokens_T=torch.zeros(total, dtype=torch.int64),
        cu_seqlens=torch.arange(sequences + 1) * tokens,
        response_mask_T=mask_T,
        rollout_logprobs_T=-random().abs(),
        group_B=torch.arange(sequences) // 4,
        scores_B=torch.randn(sequences, generator=generator),
        truncated_B=torch.zeros(sequences, dtype=torch.bool),
        weight_version_T=torch.zeros(total, dtype=torch.int64),
        parts_B=torch.randn(sequences, 2, generator=generator),
    )
    return Outputs(batch, -random().abs(), -random().abs(), random())


def run(sequences: int, tokens: int, repeat: int) -> dict[str, object]:
    """All timings, by name."""
    generator = torch.Generator().manual_seed(0)
    shape = (sequences, tokens)
    rewards_BR = torch.randn(shape, generator=generator)
    values_BR = torch.randn(shape, generator=generator)
    rewards_T, values_T = rewards_BR.view(-1), values_BR.view(-1)
    mask_T, cu_seqlens = torch.ones(sequences * tokens), torch.arange(sequences + 1) * tokens

    def advantages() -> Tensor:
        return gae(rewards_T, values_T, mask_T, cu_seqlens, GAMMA, LAM)

    def whitened() -> Tensor:
        return masked_whiten(advantages(), mask_T)

    difference = (advantages().view(shape) - loop_gae(rewards_BR, values_BR)).abs().max().item()
    results: dict[str, object] = {
        "gae": fastest(advantages, repeat),
        "gae_and_whitening": fastest(whitened, repeat),
        "time_loop_gae": fastest(lambda: loop_gae(rewards_BR, values_BR), 1),
        "largest_difference_to_time_loop": difference,
    }
    outputs = outputs_of(sequences, tokens)
    baseline_B = torch.zeros(sequences)

    def estimation(name: str) -> Callable[[], object]:
        options = {"gdpo_reward_keys": ("right", "short")} if name == "gdpo" else {}
        algorithm = AlgorithmConfig(adv_estimator=name, use_kl_in_reward=True, **options)
        return lambda: estimate(outputs, algorithm, 0.1, baseline_scores_B=baseline_B)

    for name in ESTIMATORS:
        results[f"estimate {name}"] = fastest(estimation(name), 2)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sequences", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of each sequence")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device.keep_freed_memory()  # as a training run does
    results = run(arguments.sequences, arguments.tokens, arguments.repeat)
    print(f"{arguments.sequences} x {arguments.tokens} tokens, float32, one core")
    for name, value in results.items():
        if isinstance(value, dict):
            wall, processor = value["wall_ms"], value["processor_ms"]
            print(f"  {name:40s} {wall:10.1f} ms wall {processor:10.1f} ms processor")
        else:
            print(f"  {name:40s} {value:10.2e}")
    if arguments.out:
        report = {
            "date": date.today().isoformat(),
            "command": " ".join(["python", *sys.argv]),
            "processor": platform.processor() or platform.machine(),
            "load_average": os.getloadavg(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "huge_pages": os.environ["THP_MEM_ALLOC_ENABLE"],
            "sequences": arguments.sequences,
            "tokens": arguments.tokens,
            "results": results,
        }
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
