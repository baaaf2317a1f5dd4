"""Conversion speed and memory: a synthetic dense model and one of many experts, both ways.

    python benchmarks/convert.py --gb 1 --folder /somewhere/on/the/disk

Prints, and writes to ``benchmarks/results/``, the disk's own copy bandwidth (read, write, flush)
and the tool's in each direction with one process and with two, with its peak memory.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
COPY_BUFFER = 32 << 20


def dense(gigabytes: float) -> dict:
    """A Llama config of about this size in bfloat16."""
    hidden, ffn, vocab = 2048, 5504, 32000
    layer = hidden * hidden * 5 // 2 + 3 * hidden * ffn
    layers = max(1, round((gigabytes * 1e9 / 2 - 2 * vocab * hidden) / layer))
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": hidden,
        "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": 16,
        "num_key_value_heads": 4, "vocab_size": vocab, "rms_norm_eps": 1e-6, "dtype": "bfloat16",
        "hidden_act": "silu", "max_position_embeddings": 4096, "tie_word_embeddings": False,
    }  # fmt: skip


def experts(gigabytes: float) -> dict:
    """A Qwen3-MoE config of about this size with 64 experts in each layer."""
    hidden, ffn, count = 1024, 256, 64
    layer = 3 * hidden * ffn * count + hidden * 1024 * 5 // 2
    layers = max(1, round(gigabytes * 1e9 / 2 / layer))
    return {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": hidden, "intermediate_size": 2816, "moe_intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 128, "num_experts": count, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 16000, "dtype": "bfloat16",
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }  # fmt: skip


def write_model(config: dict, folder: Path) -> int:
    """Write a folder with random weights; returns bytes."""
    from transformers import AutoConfig

    from mppo.weights.output_folder import create_files, plan_places, write_index
    from mppo.weights.shape import model_shape
    from mppo.weights.table import parameter_table

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    shapes = parameter_table(model_shape(AutoConfig.from_pretrained(folder))).hf_shapes()
    types = {name: (torch.bfloat16, shape) for name, shape in shapes.items()}
    headers, places = plan_places(folder, types, 5 * 10**8)
    create_files(headers)
    noise = os.urandom(16 << 20)
    for file, (head, size) in headers.items():
        with file.open("r+b") as stream:
            stream.seek(len(head))
            while (left := size - stream.tell()) > 0:
                stream.write(noise[: min(left, len(noise))])
            stream.flush()
            os.fsync(stream.fileno())
    write_index(folder, places)
    return sum(place.nbytes for place in places.values())


def forget(folder: Path) -> None:
    """Drop a folder's pages from memory, so that the next read is the disk's."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def copy_seconds(source: Path, target: Path) -> float:
    """Seconds a plain copy takes, flushed to disk."""
    forget(source)
    target.mkdir()
    started = time.monotonic()
    buffer = bytearray(COPY_BUFFER)
    for file in sorted(source.glob("*.safetensors")):
        with file.open("rb", buffering=0) as reader, (target / file.name).open("wb") as writer:
            while count := reader.readinto(buffer):
                writer.write(memoryview(buffer)[:count])
            writer.flush()
            os.fsync(writer.fileno())
    seconds = time.monotonic() - started
    shutil.rmtree(target)
    return seconds


def run_tool(arguments: list[str], processes: int) -> tuple[float, float]:
    """Seconds of wall clock and peak MB of the largest process of a run."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={processes}"]
    command += ["-m", "checkpoints_convert", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    started = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    seconds = time.monotonic() - started
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    said = done.stdout.strip().splitlines()[0]
    inside = float(said.partition(" GB in ")[2].partition(" s ")[0])
    assert peak >= before
    return min(inside, seconds), peak / 1024


def measure(name: str, config: dict, folder: Path) -> list[dict]:
    """One row per direction and number of processes."""
    source, megatron, back = folder / name, folder / f"{name}_megatron", folder / f"{name}_back"
    nbytes = write_model(config, source)
    rows = []
    for processes in (1, 2):
        for direction in ("hf-to-megatron", "megatron-to-hf"):
            origin = source if direction == "hf-to-megatron" else megatron
            copy = copy_seconds(source, folder / "copy")
            forget(origin)
            out = ["--hf", str(source if direction == "hf-to-megatron" else back)]
            seconds, peak = run_tool([direction, *out, "--megatron", str(megatron)], processes)
            rate, plain = nbytes / 1e9 / seconds, nbytes / 1e9 / copy
            rows.append({
                "model": name, "direction": direction, "processes": processes,
                "gigabytes": round(nbytes / 1e9, 3), "seconds": round(seconds, 2),
                "gb_per_s": round(rate, 3), "copy_gb_per_s": round(plain, 3),
                "of_copy": round(rate / plain, 2), "peak_mb_of_any_run_so_far": round(peak),
            })  # fmt: skip
            print(rows[-1], flush=True)
        shutil.rmtree(megatron)
        shutil.rmtree(back)
    shutil.rmtree(source)
    return rows


def main() -> None:
    """Run and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=2.0, help="size of each synthetic model")
    parser.add_argument(
        "--folder", type=Path, required=True, help="a folder on the disk to measure"
    )
    arguments = parser.parse_args()
    folder = arguments.folder / f"convert-{os.getpid()}"
    folder.mkdir(parents=True)
    try:
        rows = measure("dense", dense(arguments.gb), folder)
        rows += measure("experts", experts(arguments.gb), folder)
    finally:
        shutil.rmtree(folder)
    result = {
        "command": " ".join(["python", "benchmarks/convert.py", "--gb", str(arguments.gb)]),
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average": [round(x, 1) for x in os.getloadavg()],
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "rows": rows,
    }
    file = RESULTS / f"convert-{result['date']}.json"
    file.write_text(json.dumps(result, indent=2) + "\n")
    print(file)


if __name__ == "__main__":
    main()
