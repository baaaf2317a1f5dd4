"""Numbers of tiny models in float32, to compare a GPU run with a CPU run.

    MPPO_DEVICE=cpu torchrun --nproc_per_node=4 tests/gpu/gpu_numbers.py FOLDER [CASE ...]

trains each of ``CASES``, or the named ones, for two steps on the launched ranks and writes
``FOLDER/DEVICE.json``: log-probabilities or values, losses and gradient norms.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from layout_case import Case, run_case
from tiny_models import save

from mppo.parallel import device
from mppo.parallel.launch import discover
from mppo.parallel.process_group import process_group

TP2_PP2 = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
CASES = {
    "qwen2": Case("qwen2", TP2_PP2),
    "qwen2 critic": Case("qwen2", TP2_PP2, head="value"),
    "gemma2": Case("gemma2", {"tensor_model_parallel_size": 2}),
    "qwen3_moe": Case("qwen3_moe", {**TP2_PP2, "expert_model_parallel_size": 2}),
    "moonlight": Case("moonlight", {"pipeline_model_parallel_size": 2}),
}
"""Cases whose layout divides 4 ranks."""
RELATIVE, ABSOLUTE = 1e-3, 1e-4
"""Largest differences: kernels sum in another order, and the steps are large (``build_role``)."""


def numbers_of(case: Case, folder: Path, registry: Any) -> dict[str, list[float]]:
    """Outputs, losses and gradient norms of a case."""
    found = run_case(case, folder, registry)
    return {
        "outputs": [float(x) for output in found.outputs for x in output.flatten().tolist()],
        "losses": [float(loss) for loss in found.losses],
        "gradient norms": [float(norm) for norm in found.norms],
    }


def differences(here: dict[str, Any], there: dict[str, Any]) -> tuple[float, list[str]]:
    """Compare two results.

    Returns:
        The largest difference relative to the tolerance (1: just accepted), and a line for every
        kind of number that exceeds it.
    """
    largest, lines = 0.0, []
    for case, kinds in there.items():
        for kind, wanted in kinds.items():
            found = here[case][kind]
            if len(found) != len(wanted):
                lines.append(f"{case}: {len(found)} {kind} instead of {len(wanted)}")
                continue
            by = [
                abs(a - b) / (ABSOLUTE + RELATIVE * abs(b))
                for a, b in zip(found, wanted, strict=True)
            ]
            wrong = [index for index, ratio in enumerate(by) if not ratio <= 1]  # also no number
            worst = wrong[0] if wrong else max(range(len(by)), key=lambda index: by[index])
            if wrong:
                lines.append(f"{case}: {kind}[{worst}] {found[worst]} instead of {wanted[worst]}")
            largest = max(largest, by[worst])
    return largest, lines


def main(argv: Sequence[str] | None = None) -> int:
    """Compute on the launched ranks; the first writes the file."""
    warnings.simplefilter("ignore")
    name, *chosen = sys.argv[1:] if argv is None else argv
    folder, info = Path(name), discover()
    cases = {name: CASES[name] for name in chosen or CASES}
    device.prepare_megatron()
    from mppo.parallel.groups import GroupRegistry

    with process_group(info, timeout_s=300):
        if info.rank == 0:
            for model in sorted({case.model for case in cases.values()}):
                if not (folder / model).exists():
                    save(model, folder / model)
        dist.barrier()
        registry = GroupRegistry()
        found = {name: numbers_of(case, folder, registry) for name, case in cases.items()}
    if info.rank == 0:
        (folder / f"{device.device().type}.json").write_text(json.dumps(found))
        print(f"wrote {folder / device.device().type}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
