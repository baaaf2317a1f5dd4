"""Parts of the checks that are programs of their own: ``gpu_parts.py NAME FOLDER``.

Each prints its result as a line ``found: ...``.
"""

from __future__ import annotations

import base64
import gzip
import json
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mppo.parallel import device

_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Calls of the CUDA runtime in which the host waits for the GPU."""


def seconds_of(work: Callable[[], Any], repeats: int) -> float:
    """Median seconds of some work on the device, after one repetition that is not counted."""
    work()
    device.synchronize()
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        device.synchronize()
        found.append(time.perf_counter() - begin)
    return sorted(found)[repeats // 2]


def machine(folder: Path) -> str:
    """Bandwidths and products of matrices."""
    place = device.device()
    size, side = (1 << 30, 8192) if place.type == "cuda" else (1 << 24, 512)
    x = torch.empty(size, dtype=torch.uint8, device=place)
    y, host = torch.empty_like(x), device.pinned_memory(size)
    a = torch.randn(side, side, device=place, dtype=torch.bfloat16)
    launches, one = 1000, torch.zeros(1, device=place)

    def many() -> None:
        for _ in range(launches):
            one.add_(1)

    copy = seconds_of(lambda: y.copy_(x), 5)
    down = seconds_of(lambda: host.copy_(x, non_blocking=True), 5)
    up = seconds_of(lambda: x.copy_(host, non_blocking=True), 5)
    product = seconds_of(lambda: a @ a, 5)
    launch = seconds_of(many, 3) / launches
    return (
        f"copy {2 * size / copy / 1e9:.0f} GB/s on the device, {size / down / 1e9:.1f} to pinned "
        f"memory, {size / up / 1e9:.1f} back; product of {side} in bfloat16 "
        f"{2 * side**3 / product / 1e12:.1f} TFLOP/s; {1e6 * launch:.1f} us per small operation"
    )


def rules(folder: Path) -> str:
    """What hardware queues and calls of the host wait for, with several settings."""
    found = {}
    for queues, loading, allocator in (
        ("1", "EAGER", ""),
        ("1", "EAGER", "expandable_segments:True"),
        ("8", "EAGER", ""),
        ("32", "EAGER", ""),
        ("32", "LAZY", ""),
    ):
        setting = {
            "CUDA_DEVICE_MAX_CONNECTIONS": queues,
            "CUDA_MODULE_LOADING": loading,
            "PYTORCH_ALLOC_CONF": allocator,
        }
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("cuda_rules.py"))],
            env={**os.environ, **setting}, stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        name = " ".join(filter(None, (queues, loading, allocator)))
        found[name] = json.loads(done.stdout.splitlines()[-1])
        print(name, found[name], flush=True)
    (folder / "rules.json").write_text(json.dumps(found, indent=1))
    for name, result in found.items():
        assert not result["busy alone"], f"{name}: streams wait for a kernel that runs on another"
    behind = {name: len(result["busy, one behind it"]) for name, result in found.items()}
    calls = [call for call, waits in found["1 EAGER"]["waits"].items() if waits is True]
    return f"streams that wait behind an operation that waits: {behind}; waits: {', '.join(calls)}"


def schedules(folder: Path) -> str:
    """Streamed updates against sequential ones on as many stages as ranks."""
    import tiny_models
    import torch.distributed as dist
    from test_schedules import Update, both, updated

    from mppo.parallel.groups import GroupRegistry
    from mppo.parallel.launch import discover
    from mppo.parallel.process_group import process_group

    info, found = discover(), []
    pp = both(f"megatron.pipeline_model_parallel_size={info.world_size}")
    vpp = both("megatron.virtual_pipeline_model_parallel_size=2")
    deep = f"qwen2_of_{2 * info.world_size}_layers"
    shape = tiny_models.CONFIGS["qwen2"]().to_dict()
    for key in ("layer_types", "num_hidden_layers"):
        del shape[key]
    tiny_models.CONFIGS[deep] = lambda: tiny_models.hf.Qwen2Config(
        **shape, num_hidden_layers=2 * info.world_size
    )
    cases = {
        "flush-free": Update(deep, pp),
        "recorded": Update(deep, pp, recorded="recorded"),
        "interleaved": Update(deep, (*pp, *vpp)),
        "interleaved, recorded": Update(deep, (*pp, *vpp), recorded="interleaved"),
        "offloaded": Update(deep, pp, offloaded=True),
        "fused": Update(deep, pp, kind="fused"),
        "with little memory": Update(deep, pp),
    }
    if info.world_size <= 4:
        cases["experts"] = Update("qwen3_moe", pp)
    with process_group(info, timeout_s=60):
        for model in sorted({case.model for case in cases.values()}):
            if info.rank == 0 and not (folder / model).exists():
                tiny_models.save(model, folder / model)
        dist.barrier()
        registry = GroupRegistry()
        for name, case in cases.items():
            if name == "with little memory" and device.is_cuda():
                # room for the segments of 2 and 20 MiB in use, but for few that are not
                limit = 1.2 * torch.cuda.max_memory_allocated() + (64 << 20)
                total = torch.cuda.mem_get_info()[1]
                torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
            results = updated(case, folder, registry)
            assert not results["shared"], f"{name}: groups with other uses: {results['shared']}"
            states = (results[which]["state"] for which in ("expected", "found"))
            pairs = [
                (there[key], here[key])
                for there, here in zip(*states, strict=True)
                for key in there
            ]
            largest = max(float((a - b).abs().max()) for a, b in pairs)
            assert largest <= 1e-5, f"{name}: weights or gradients differ by {largest}"
            found.append(f"{name} {largest:.1e}")
            print(found[-1], flush=True)
    return "largest differences of weights and gradients: " + ", ".join(found)


def _read_bucket(payload: str, names: list[str], answers: Any) -> None:
    """In another process: the sums of a bucket's tensors."""
    from mppo.rollout.transport.checked_load import BYTES, TABLE
    from mppo.weights.bucket import BucketLayout, WeightBucket

    if device.is_cuda():
        torch.cuda.init()
    received = dict(pickle.loads(base64.b64decode(payload)))
    table = json.loads(received[TABLE].cpu().numpy().tobytes())
    bucket = WeightBucket(BucketLayout.from_json(table["layout"]), received[BYTES])
    answers.put({name: int(tensor.view(torch.int32).long().sum()) for name, tensor in bucket})
    del bucket, received


def ipc(folder: Path) -> str:
    """A bucket that a second process opens by its handle."""
    from mppo.rollout.transport.buckets import SharedBuffer
    from mppo.weights.bucket import WeightBucket

    place = device.device()
    torch.manual_seed(0)
    held = [torch.randn(1 << 22, device=place) for _ in range(8)]
    del held  # blocks that are free in the allocator
    named = [(f"w{i}", torch.randn(1 << 20, device=place)) for i in range(8)]
    buffer = SharedBuffer(place)
    begin = time.perf_counter()
    buffer.fill(WeightBucket.pack(named))
    filled = time.perf_counter() - begin
    payload = buffer.own_payload(folder / "ipc_report", single_rank=True, checked=True)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    reader = context.Process(target=_read_bucket, args=(payload, [n for n, _ in named], answers))
    reader.start()
    found = answers.get(timeout=100)
    reader.join(20)
    wanted = {name: int(tensor.view(torch.int32).long().sum()) for name, tensor in named}
    assert found == wanted, f"the other process read {found} instead of {wanted}"
    return f"{buffer.layout.nbytes / 2**20:.0f} MiB filled in {1e3 * filled:.1f} ms, read equal"


def model(folder: Path) -> str:
    """The model and the questions of the measured step."""
    from gpu_inputs import write_model, write_questions
    from small_checks import CHANGED, MODEL

    (folder / "inputs").mkdir(exist_ok=True)
    write_questions(folder / "inputs", 64)
    changed = CHANGED[device.device().type]
    return f"wrote {write_model(MODEL, folder / 'inputs', changed).name}"


def measured(folder: Path) -> str:
    """Two steps of one rank, the second under the profiler."""
    from small_checks import MEASURED, measured_keys, steps_of

    from mppo.train import main

    keys = [*measured_keys(folder), "trainer.profile={steps: [2], ranks: [0]}"]
    run = folder / "run_measured"
    shutil.rmtree(run, ignore_errors=True)  # a finished run does nothing when it is started again
    code = main(["--config", str(MEASURED), *keys])
    assert code == 0, f"training ended with {code}"
    steps = steps_of(run)
    with gzip.open(run / "profile" / "step_2_rank_0.json.gz", "rt") as stream:
        events = json.load(stream)["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    calls = Counter(event["name"] for event in events if event.get("cat") == "cuda_runtime")
    by_name: Counter[str] = Counter()
    for kernel in kernels:
        by_name[kernel["name"][:50]] += kernel["dur"]
    result = {
        "peak_gib": steps[2]["perf/max_memory_allocated_gb"],
        "kernels": len(kernels),
        "waits": sum(calls[name] for name in _WAITS),
        "calls": dict(calls.most_common(12)),
        "microseconds": dict(by_name.most_common(12)),
        "timing_s": {k: v for k, v in steps[1].items() if k.startswith("timing_s/")},
    }
    (folder / "measured.json").write_text(json.dumps(result, indent=1))
    busy = sum(kernel["dur"] for kernel in kernels) / 1e6
    return (
        f"{result['timing_s']['timing_s/step']:.2f} s per step, peak {result['peak_gib']:.2f} GiB, "
        f"{result['kernels']} kernels, {busy:.2f} s of them, {result['waits']} waits (profiled)"
    )


PARTS = {part.__name__: part for part in (machine, rules, schedules, ipc, model, measured)}


def main() -> int:
    """Run a part."""
    warnings.simplefilter("ignore")
    name, folder = sys.argv[1], Path(sys.argv[2])
    if name not in ("rules", "measured"):  # which are programs that do this themselves
        device.prepare_megatron()
        if name != "schedules":
            device.select(0, 1)
    print(f"found: {PARTS[name](folder)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
