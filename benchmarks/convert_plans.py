"""Planning time and memory of converting the largest models, without copying bytes.

    python benchmarks/convert_plans.py --folder /somewhere/on/the/disk [--out FILE]

The folders contain no weights, but complete safetensors headers and checkpoint archives, in sparse
files of the full size. Both directions are planned completely, as one process does before it
copies. Times are processor seconds; the peak includes Python, torch and transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import time
from datetime import date
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import AutoConfig

from checkpoints_convert.common_state import common_state
from mppo.recipe.model_shape import model_shape
from mppo.weights.hf.input_folder import HFFolder
from mppo.weights.hf.output_folder import create_files, plan_places, write_all
from mppo.weights.table import parameter_table
from mppo.weights.torch_dist.contents import read_checkpoint
from mppo.weights.torch_dist.conversion import plan_hf, plan_megatron
from mppo.weights.torch_dist.format import write_metadata

LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
}  # fmt: skip
CONFIGS = {
    "Moonlight-16B-A3B": {
        **LATENT, "hidden_size": 2048, "intermediate_size": 11264, "moe_intermediate_size": 1408,
        "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
        "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "q_lora_rank": None, "vocab_size": 163840,
        "routed_scaling_factor": 2.446,
    },
    "Qwen3-235B-A22B": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 4096,
        "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94,
        "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "vocab_size": 151936, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    "DeepSeek-V3": {
        **LATENT, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 8,
        "topk_group": 4, "first_k_dense_replace": 3, "q_lora_rank": 1536, "vocab_size": 129280,
        "routed_scaling_factor": 2.5,
    },
}  # fmt: skip
"""The published sizes, in bfloat16 without multi-token-prediction layers."""


def write_headers(config: dict, folder: Path):
    """A Hugging Face folder without data; its model's sizes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    shape = model_shape(AutoConfig.from_pretrained(folder))
    shapes = parameter_table(shape).hf_shapes()
    types = {name: (torch.bfloat16, sizes) for name, sizes in shapes.items()}
    headers, _ = plan_places(folder, types, 5 * 10**9)
    create_files(headers)
    return shape


def spent(started: float) -> float:
    """Processor seconds since ``start``."""
    return round(time.process_time() - started, 2)


def measure(name: str, folder: Path) -> dict[str, object]:
    """One row: planning both ways."""
    hf, megatron = folder / "hf", folder / "megatron"
    shape = write_headers(CONFIGS[name], hf)
    started = time.process_time()
    plan, index = plan_megatron(HFFolder(hf), shape, megatron)
    import_s = spent(started)
    megatron.mkdir()
    create_files(plan.files)
    for task in plan.tasks.values():
        with task.target.file.open("r+b", buffering=0) as stream:
            write_all(stream.fileno(), task.head, task.target.offset - len(task.head))
            write_all(stream.fileno(), task.tail, task.target.offset + task.target.nbytes)
    started = time.process_time()
    common = common_state(AutoConfig.from_pretrained(hf))
    write_metadata(megatron, index.tensors, index.objects, common)
    index_s = spent(started)
    started = time.process_time()
    back, _ = plan_hf(read_checkpoint(megatron), shape, folder / "back")
    return {
        "model": name, "gigabytes": round(plan.total_bytes / 1e9, 1), "hf_tensors": back.count,
        "megatron_tensors": plan.count, "plan_hf_to_megatron_s": import_s, "write_index_s": index_s,
        "plan_megatron_to_hf_s": spent(started),
        "largest_tensor_mb": round(max(t.nbytes for t in plan.tasks.values()) / 1e6),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }  # fmt: skip


def main() -> None:
    """Measure every model, smallest first, and show the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, required=True, help="on a file system with sparse files"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for name in CONFIGS:
        folder = arguments.folder / f"plans-{os.getpid()}"
        try:
            rows.append(measure(name, folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(rows[-1], flush=True)
    result = {
        "date": str(date.today()),
        "command": "python benchmarks/convert_plans.py",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, one process",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "rows": rows,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
