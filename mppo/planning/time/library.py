"""Kernels that NVIDIA measured on its GPUs (``aiconfigurator-core``): the one module that imports
that package."""

from __future__ import annotations

import json
from functools import cache, lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from mppo.config.errors import ConfigError, ConfigIssue
from mppo.config.gpu_types import GPU_TYPES, GpuType
from mppo.planning.time.kernels import Collective, GpuSystem, Kernels
from mppo.planning.time.scaled import Scaled

PACKAGE = "aiconfigurator-core"
ENGINE = "sglang"
LOAD = "power_law_1.2"
"""How the measured experts are loaded: unevenly, as the library's own estimates take it."""

SYSTEMS = {
    "a100-40gb": "a100_sxm",
    "a100-80gb": "a100_sxm",
    "h100-80gb": "h100_sxm",
    "h200-141gb": "h200_sxm",
    "b200-180gb": "b200_sxm",
    "l40s-48gb": "l40s",
}
"""The library's name of each GPU type with data of its own."""
NEAREST = "h100_sxm"
"""The GPU whose data stand for one without."""
WITHOUT_DATA = {"h20-96gb": (148e12, 4.0e12, 450e9)}
"""Peak, memory bandwidth and NVLink bandwidth as published, of types without data."""


def open_library(gpu: GpuType) -> Kernels:
    """The measured kernels of a GPU.

    A type without data has those of the nearest one, each scaled by the ratio of the two GPUs'
    least possible times for it.

    Args:
        gpu: the type of the GPU.

    Raises:
        ConfigError: the library is not installed.
    """
    try:
        number = version(PACKAGE)
    except PackageNotFoundError:
        why = f"it needs the package {PACKAGE} (Python 3.11 or newer), which is not installed"
        raise ConfigError([ConfigIssue("--time", True, why, 'pip install "mppo[plan]"')]) from None
    key = next((key for key, known in GPU_TYPES.items() if known.name == gpu.name), None)
    source = f"{PACKAGE} {number}"
    if key in SYSTEMS:
        return Measured(SYSTEMS[key], source)
    if key in WITHOUT_DATA:
        flops, memory, within = WITHOUT_DATA[key]
        return Scaled(Measured("h200_sxm", source), gpu.name, flops, memory, within)
    why = f"{gpu.name} has no measurements, so these are the times of another GPU"
    return Measured(NEAREST, f"{source}; {why}")


@cache
def _module(name: str) -> ModuleType:
    return import_module(f"aiconfigurator_core{name}")


@cache
def _handle(system: str) -> Any:
    database = _module(".sdk.perf_database").get_database(system, ENGINE, "current")
    return _module(".sdk.engine").EngineHandle.for_database(database)


@cache
def _description(system: str) -> dict[str, Any]:
    folder = Path(str(_module("").__file__)).parent / "systems"
    return yaml.safe_load((folder / f"{system}.yaml").read_text())


class Measured:
    """The library's kernels of one GPU.

    Args:
        system: the library's name of the GPU.
        source: of ``Kernels``.
    """

    def __init__(self, system: str, source: str) -> None:
        self.source = f"{source}, {system}"
        gpu, node = (_description(system)[key] for key in ("gpu", "node"))
        self.system = GpuSystem(
            system,
            float(gpu["bfloat16_tc_flops"]),
            float(gpu["mem_bw"]),
            min(8, int(node["num_gpus_per_node"])),
            float(node["intra_node_bw"]),
            float(node["inter_node_bw"]),
            float(node["pcie_bw"]),
            float(node["p2p_latency"]),
        )
        self._handle = _handle(system)

    def gemm(self, m: int, n: int, k: int) -> float:
        fields = {"n": n, "k": k, "quant_mode": "bfloat16", "scale_num_tokens": 1,
                  "low_precision_input": False, "seq_split": 1, "below_grid_sol": True}  # fmt: skip
        return self._seconds("Gemm", fields, x=m)

    def attention(self, batch: int, length: int, heads: int, kv_heads: int, dim: int) -> float:
        fields = {"n": heads, "n_kv": kv_heads, "head_size": dim, "window_size": 0,
                  "kv_cache_dtype": "bfloat16", "fmha_quant_mode": "bfloat16",
                  "use_qk_norm": False, "cp_size": 1, "lane_order": ["default"]}  # fmt: skip
        return self._seconds("ContextAttention", fields, batch=batch, length=length)

    def decode(self, batch: int, context: int, heads: int, kv_heads: int, dim: int) -> float:
        fields = {"n": heads, "n_kv": kv_heads, "head_size": dim, "window_size": 0,
                  "kv_cache_dtype": "bfloat16", "lane_order": ["default"]}  # fmt: skip
        return self._seconds("GenerationAttention", fields, False, batch, context)

    def latent_decode(self, batch: int, context: int, heads: int) -> float:
        fields = {"num_heads": heads, "kv_cache_dtype": "bfloat16"}
        return self._seconds("GenerationMla", fields, False, batch, context)

    def experts(self, tokens: int, hidden: int, width: int, active: int, experts: int, tp: int,
                ep: int) -> float:  # fmt: skip
        fields = {"hidden_size": hidden, "inter_size": width, "topk": active,
                  "num_experts": experts, "moe_tp_size": tp, "moe_ep_size": ep,
                  "attention_dp_size": 1, "quant_mode": "bfloat16", "workload_distribution": LOAD,
                  "is_gated": True, "moe_backend": None, "enable_eplb": False,
                  "is_context": True}  # fmt: skip
        try:
            return self._seconds("Moe", fields, x=tokens)
        except _module(".sdk.errors").PerfDataNotAvailableError:  # a shape without measurements
            return self._unmeasured_experts(tokens, hidden, width // tp, active, experts, ep)

    def _unmeasured_experts(
        self, tokens: int, hidden: int, width: int, active: int, experts: int, ep: int
    ) -> float:
        """At least the time to read the experts in use, and of products as efficient as a GEMM."""
        used = experts * (1 - (1 - active / experts) ** tokens) / ep
        reading = used * 6 * hidden * width / (0.8 * self.system.memory)
        rows = max(1, tokens * active // ep)
        return max(reading, self.gemm(rows, 2 * width, hidden) + self.gemm(rows, hidden, width))

    def collective(self, kind: Collective, nbytes: float, ranks: int) -> float:
        measured = 1 << (ranks - 1).bit_length()  # 2, 4 and 8 are
        fields = {"hidden_size": nbytes / 2, "num_gpus": measured, "dtype": "half",
                  "operation": kind, "seq_split": 1}  # fmt: skip
        return self._seconds("Nccl", fields, x=1)

    def _seconds(self, operation: str, fields: dict[str, Any], context: bool = True,
                 batch: int = 1, length: int = 1, x: int | None = None) -> float:  # fmt: skip
        text = json.dumps([{operation: {"name": operation, "scale_factor": 1.0, **fields}}])
        return self._evaluate(text, context, batch, length, x)

    @lru_cache(maxsize=100_000)  # noqa: B019 (as many objects as GPU types)
    def _evaluate(self, text: str, context: bool, batch: int, length: int, x: int | None) -> float:
        found = self._handle.evaluate_ops_json(
            text, is_context=context, batch_size=batch, s=length, x=x
        )
        return found[0][1] / 1e3
