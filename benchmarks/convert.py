"""Conversion speed and memory in both directions, for a synthetic dense model or one with experts.

    python benchmarks/convert.py --model experts --gb 2 --folder /somewhere/on/the/disk

Prints, and writes to ``benchmarks/results/``, the tool's bandwidth in each direction with one
process and with two, its peak memory, and the disk's copy bandwidth: read, write and flush of the
same files directly before and after, because the speed of a shared disk varies. With a folder in
memory (``/dev/shm``) the result is the cost of the tool itself.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
COPY_BUFFER = 32 << 20
SHARD_BYTES = 5 * 10**8


def dense(gigabytes: float, hidden: int) -> dict:
    """A Llama config of about this size in bfloat16."""
    ffn, vocab = hidden * 43 // 16, 32000
    layer = hidden * hidden * 5 // 2 + 3 * hidden * ffn
    layers = max(1, round((gigabytes * 1e9 / 2 - 2 * vocab * hidden) / layer))
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": hidden,
        "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": 16,
        "num_key_value_heads": 4, "vocab_size": vocab, "rms_norm_eps": 1e-6, "dtype": "bfloat16",
        "hidden_act": "silu", "max_position_embeddings": 4096, "tie_word_embeddings": False,
    }  # fmt: skip


def experts(gigabytes: float, hidden: int) -> dict:
    """A Qwen3-MoE config of about this size with 64 experts in each layer."""
    ffn, count = hidden // 4, 64
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


def write_model(config: dict, folder: Path) -> tuple[int, int]:
    """Write a folder with random weights; returns bytes and tensors."""
    from mppo.recipe.model_shape import model_shape
    from mppo.weights.hf.output_folder import create_files, plan_places, write_index
    from mppo.weights.table import parameter_table

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    shapes = parameter_table(model_shape(SimpleNamespace(**config))).hf_shapes()
    types = {name: (torch.bfloat16, shape) for name, shape in shapes.items()}
    headers, places = plan_places(folder, types, SHARD_BYTES)
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
    return sum(place.nbytes for place in places.values()), len(places)


def forget(folder: Path) -> None:
    """Drop a folder's pages from the page cache, so that the next read is from the disk."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def copy_seconds(source: Path, target: Path) -> float:
    """Seconds of a plain copy, flushed to disk."""
    forget(source)
    target.mkdir()
    started = time.monotonic()
    buffer = bytearray(COPY_BUFFER)
    for file in sorted(f for f in source.rglob("*") if f.suffix in (".safetensors", ".distcp")):
        with file.open("rb", buffering=0) as reader, (target / file.name).open("wb") as writer:
            while count := reader.readinto(buffer):
                writer.write(memoryview(buffer)[:count])
            writer.flush()
            os.fsync(writer.fileno())
    seconds = time.monotonic() - started
    shutil.rmtree(target)
    return seconds


def run_tool(arguments: list[str], processes: int) -> dict[str, float]:
    """One run of the tool.

    Returns:
        ``seconds`` from the command's start to the flushed output as the tool reports them, with
        the import of transformers; seconds of the complete process; processor seconds; peak MB of
        the largest process; and GB/s of all processes while they copy.
    """
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={processes}"]
    command += ["-m", "checkpoints_convert", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started = time.monotonic()
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        said = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, said
    rank_0 = re.findall(r"\] 100\.0%.* ([0-9.]+) GB/s", said)[-1]
    return {
        "seconds": float(said.partition(" GB in ")[2].partition(" s ")[0]),
        "with_start_s": round(time.monotonic() - started, 2),
        "processor_s_with_start": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_mb": round(usage.ru_maxrss / 1024),
        "copying_gb_per_s": round(processes * float(rank_0), 2),
    }


def measure(
    source: Path, nbytes: int, folder: Path, rounds: int, processes_tried: list[int]
) -> list[dict]:
    """One row per round, number of processes and direction."""
    megatron, back = folder / "megatron", folder / "back"
    rows = []
    for turn, processes in itertools.product(range(rounds), processes_tried):
        before = copy_seconds(source, folder / "copy")
        for direction in ("hf-to-megatron", "megatron-to-hf"):
            origin, hf = (source, source) if direction == "hf-to-megatron" else (megatron, back)
            forget(origin)
            command = [direction, "--hf", str(hf), "--megatron", str(megatron)]
            if direction == "megatron-to-hf":
                command += ["--max-shard-gb", str(SHARD_BYTES / 1e9)]
            run = run_tool(command, processes)
            after = copy_seconds(source, folder / "copy")
            rate, plain = nbytes / 1e9 / run["seconds"], 2 * nbytes / 1e9 / (before + after)
            before = after
            rows.append({
                "round": turn, "direction": direction, "processes": processes, **run,
                "gb_per_s": round(rate, 3), "copy_gb_per_s": round(plain, 3),
                "of_copy": round(rate / plain, 2),
            })  # fmt: skip
            print(rows[-1], flush=True)
        shutil.rmtree(megatron)
        shutil.rmtree(back)
    return rows


def summary(rows: list[dict]) -> list[dict]:
    """Medians over rounds, and the speed-up of each number of processes over the first."""
    keys = ("seconds", "gb_per_s", "copying_gb_per_s", "copy_gb_per_s", "of_copy", "peak_mb")
    median = {
        case: {
            key: statistics.median(
                row[key] for row in rows if (row["direction"], row["processes"]) == case
            )
            for key in keys
        }
        for case in ((row["direction"], row["processes"]) for row in rows)
    }
    first = rows[0]["processes"]
    return [
        {
            "direction": direction, "processes": processes, **medians,
            "times_as_fast": round(median[direction, first]["seconds"] / medians["seconds"], 2),
        }
        for (direction, processes), medians in median.items()
    ]  # fmt: skip


def main() -> None:
    """Run and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("dense", "experts"), required=True)
    parser.add_argument("--gb", type=float, default=2.0, help="size of the synthetic model")
    parser.add_argument("--hidden", type=int, help="its width (default: 2048 or, experts, 1024)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="in alternation")
    parser.add_argument(
        "--folder", type=Path, required=True, help="a folder on the disk to measure"
    )
    parser.add_argument("--out", type=Path, help="result file (default: in benchmarks/results/)")
    arguments = parser.parse_args()
    folder = arguments.folder / f"convert-{os.getpid()}"
    folder.mkdir(parents=True)
    try:
        make, hidden = {"dense": (dense, 2048), "experts": (experts, 1024)}[arguments.model]
        config = make(arguments.gb, arguments.hidden or hidden)
        nbytes, count = write_model(config, folder / "hf")
        rows = measure(folder / "hf", nbytes, folder, arguments.rounds, arguments.processes)
    finally:
        shutil.rmtree(folder)
    result = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average": [round(x, 1) for x in os.getloadavg()],
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "model": {"kind": arguments.model, "gigabytes": round(nbytes / 1e9, 3), "tensors": count},
        "median": summary(rows),
        "rows": rows,
    }
    file = arguments.out or RESULTS / f"{result['date']}-convert-{arguments.model}.json"
    file.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["median"], indent=2), file, sep="\n")


if __name__ == "__main__":
    main()
