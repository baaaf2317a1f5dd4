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

from mppo.planning.time.kernels import Collective, GpuSystem, Kernels, Scaled
from mppo.planning.time.layer import STREAMED
from mppo.recipe.errors import ConfigError, ConfigIssue
from mppo.recipe.gpu_types import GPU_TYPES, GpuType

PACKAGE = "aiconfigurator-core"
_DATABASE = ".sdk.perf_database"
ENGINE = "sglang"
LOAD = "power_law_1.2"
"""How the measured experts are loaded: unevenly, as the library's own estimates take it."""

_UNMEASURED = 0.5
"""Share of the peak that attention without measurements reaches."""
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

    Raises:
        ConfigError: the library is not installed, or cannot be imported.
    """
    try:
        number = version(PACKAGE)
        _module(_DATABASE)
    except PackageNotFoundError:
        why = f"it needs the package {PACKAGE} (Python 3.11 or newer), which is not installed"
        raise ConfigError([ConfigIssue("--time", True, why, 'pip install "mppo[plan]"')]) from None
    except ImportError as error:
        why = f"the package {PACKAGE} cannot be imported: {error}"
        fix = f"pip install --force-reinstall {PACKAGE}, or leave out --time"
        raise ConfigError([ConfigIssue("--time", True, why, fix)]) from error
    key = next((key for key, known in GPU_TYPES.items() if known.name == gpu.name), None)
    source = f"{PACKAGE} {number}"
    if key in SYSTEMS:
        return Measured(SYSTEMS[key], source)
    if key in WITHOUT_DATA:
        flops, memory, within = WITHOUT_DATA[key]
        return Scaled(Measured("h200_sxm", source), gpu.name, flops, memory, within)
    why = f"{gpu.name} has no measurements, so seconds and MFU are those of the nearest known GPU"
    return Measured(NEAREST, f"{source}; {why}")


@cache
def _module(name: str) -> ModuleType:
    return import_module(f"aiconfigurator_core{name}")


@cache
def _handle(system: str) -> Any:
    database = _module(_DATABASE).get_database(system, ENGINE, "current")
    return _module(".sdk.engine").EngineHandle.for_database(database)


@cache
def _description(system: str) -> dict[str, Any]:
    folder = Path(str(_module("").__file__)).parent / "systems"
    return yaml.safe_load((folder / f"{system}.yaml").read_text())


class Measured:
    """The library's kernels of one GPU."""

    def __init__(self, system: str, source: str) -> None:
        self._source = f"{source}, {system}"
        self._unmeasured: set[str] = set()
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

    @property
    def source(self) -> str:
        return "; ".join([self._source, *sorted(self._unmeasured)])

    def gemm(self, m: int, n: int, k: int) -> float:
        fields = {"n": n, "k": k, "quant_mode": "bfloat16", "scale_num_tokens": 1,
                  "low_precision_input": False, "seq_split": 1, "below_grid_sol": True}  # fmt: skip
        return self._seconds("Gemm", fields, x=m)

    def attention(self, batch: int, length: int, heads: int, kv_heads: int, dim: int) -> float:
        fields = {"n": heads, "n_kv": kv_heads, "head_size": dim, "window_size": 0,
                  "kv_cache_dtype": "bfloat16", "fmha_quant_mode": "bfloat16",
                  "use_qk_norm": False, "cp_size": 1, "lane_order": ["default"]}  # fmt: skip
        flops = 2 * batch * length**2 * heads * dim
        nbytes = 4 * batch * length * (heads + kv_heads) * dim
        try:
            return self._seconds("ContextAttention", fields, batch=batch, length=length)
        except _module(".sdk.errors").PerfDataNotAvailableError:
            return self._least(f"attention with heads of {dim}", flops, nbytes)

    def decode(self, batch: int, context: int, heads: int, kv_heads: int, dim: int) -> float:
        fields = {"n": heads, "n_kv": kv_heads, "head_size": dim, "window_size": 0,
                  "kv_cache_dtype": "bfloat16", "lane_order": ["default"]}  # fmt: skip
        pairs = 4 * batch * context * dim
        try:
            return self._seconds("GenerationAttention", fields, False, batch, context)
        except _module(".sdk.errors").PerfDataNotAvailableError:
            what = f"decoding with heads of {dim}"
            return self._least(what, pairs * heads, pairs * kv_heads)

    def latent_decode(self, batch: int, context: int, heads: int) -> float:
        fields = {"num_heads": heads, "kv_cache_dtype": "bfloat16"}
        try:
            return self._seconds("GenerationMla", fields, False, batch, context)
        except _module(".sdk.errors").PerfDataNotAvailableError:
            # 512 + 64 elements of a token's cache (DeepSeek-V2)
            pairs = 2 * batch * context
            return self._least("decoding with latent attention", pairs * heads * 1088, pairs * 576)

    def _least(self, what: str, flops: float, nbytes: float) -> float:
        """Seconds of attention without measurements, by operations and bytes."""
        self._unmeasured.add(f"{what} has no measurements, so its time is by operations and bytes")
        system = self.system
        return max(flops / (_UNMEASURED * system.flops), nbytes / (STREAMED * system.memory))

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
            self._unmeasured.add(
                f"experts of {hidden} x {width} ({active} of {experts}) have no measurements in an "
                "engine, so generation has at least the time to read them"
            )
            return self._unmeasured_experts(tokens, hidden, width // tp, active, experts, ep)

    def _unmeasured_experts(
        self, tokens: int, hidden: int, width: int, active: int, experts: int, ep: int
    ) -> float:
        """At least the time to read the experts in use, and of products as efficient as a GEMM."""
        used = experts * (1 - (1 - active / experts) ** tokens) / ep
        reading = used * 6 * hidden * width / (STREAMED * self.system.memory)
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
