"""Parts of the checks that are programs of their own: ``gpu_parts.py NAME FOLDER``.

Each prints its result as a line ``found: ...``.
"""

from __future__ import annotations

import base64
import json
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import reductions

from mppo.parallel import device


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
        ("1", "EAGER", "expandable_segments:True"),
        ("8", "EAGER", ""),
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
    waits = {
        name: [call for call, waits in result["waits"].items() if waits is not False]
        for name, result in found.items()
    }
    return f"streams that wait behind an operation that waits: {behind}; calls that wait: {waits}"


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
            if device.is_cuda():
                torch.cuda.set_per_process_memory_fraction(1.0)
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
        plain = reductions.rebuild_cuda_tensor

        def rebuild(*arguments: Any) -> torch.Tensor:  # as SGLang's receiver does
            assert arguments[6].removeprefix("GPU-") == device.gpu_uuid()
            return plain(*arguments[:6], torch.cuda.current_device(), *arguments[7:])

        reductions.rebuild_cuda_tensor = rebuild
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


def models(folder: Path) -> str:
    """The models and the questions of the measured steps."""
    from gpu_inputs import write_model, write_questions
    from small_checks import MEASURED_STEPS, SMALL

    inputs = folder / "inputs"
    inputs.mkdir(exist_ok=True)
    write_questions(inputs, 256)
    for step in MEASURED_STEPS.values():
        write_model(step.model, inputs, step.changed if device.is_cuda() else SMALL)
    return f"wrote {', '.join(step.model for step in MEASURED_STEPS.values())}"


def responses(folder: Path) -> str:
    """A step of a small model, whose dump another one replays."""
    from gpu_inputs import QUESTIONS, write_model, write_questions
    from small_checks import LONG, MEASURED, SMALL

    from mppo.train import main

    inputs, run = folder / "small", folder / "run_responses"
    inputs.mkdir(exist_ok=True)
    write_questions(inputs, 256)
    path = write_model("Qwen2.5-0.5B-Instruct", inputs, SMALL)
    keys = [
        f"model.path={path}", f"data.train_files=[{inputs / QUESTIONS}]",
        f"trainer.default_local_dir={run}", *LONG,
        "trainer.total_training_steps=1", "trainer.dump_rollouts=true",
    ]  # fmt: skip
    code = main(["--config", str(MEASURED), *keys])
    assert code == 0, f"it ended with {code}"
    return f"wrote {run}"


def measured(folder: Path) -> str:
    """Three steps of one rank with generation, the second under the profiler."""
    return _measured(folder, "measured")


def large(folder: Path) -> str:
    """The same for a model that fills a GPU, with given responses."""
    return _measured(folder, "large")


def _measured(folder: Path, name: str) -> str:
    from gpu_memory import PhasePeaks
    from gpu_trace import summary
    from small_checks import MEASURED, MEASURED_STEPS, measured_keys, steps_of

    from mppo.train import main

    run = folder / f"run_{name}"
    shutil.rmtree(run, ignore_errors=True)  # a finished run does nothing when it is started again
    keys = [*measured_keys(folder, name), "trainer.profile={steps: [2], ranks: [0]}"]
    if MEASURED_STEPS[name].replay:
        keys.append(f"trainer.replay={folder / 'run_responses'}")
    peaks = PhasePeaks()
    with peaks:
        code = main(["--config", str(MEASURED), *keys])
    assert code == 0, f"training ended with {code}"
    steps = steps_of(run)
    result = {
        "peaks_gib": peaks.gib,
        "reserved_gib": max(step["perf/max_memory_reserved_gb"] for step in steps.values()),
        "steps": steps,
        "stages": summary(run / "profile" / "step_2_rank_0.json.gz"),
    }
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1))
    stages = ", ".join(
        f"{stage} {found['kernel_s']:.2f} of {found['seconds']:.2f} s in {found['kernels']} "
        f"kernels ({1e6 * found['kernel_s'] / found['kernels']:.0f} us each), "
        f"{found['waits']} waits"
        for stage, found in result["stages"].items()
        if found["kernels"]
    )
    last = steps[max(steps)]
    mfu = [f"{key[9:]} {value:.0%}" for key, value in last.items() if key.startswith("perf/mfu/")]
    return (
        f"{last['timing_s/step']:.2f} s per step (first {steps[1]['timing_s/step']:.2f}), "
        f"peak {max(peaks.gib.values(), default=0.0):.2f} GiB, MFU {', '.join(mfu)}; "
        f"profiled: {stages}"
    )


PARTS = {
    part.__name__: part
    for part in (
        machine,
        rules,
        schedules,
        ipc,
        models,
        responses,
        measured,
        large,
    )
}


def main() -> int:
    """Run a part."""
    warnings.simplefilter("ignore")
    name, folder = sys.argv[1], Path(sys.argv[2])
    if name not in ("rules", "responses", "measured", "large"):  # programs that do this themselves
        device.prepare_megatron()
        if name != "schedules":
            device.select(0, 1)
    print(f"found: {PARTS[name](folder)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
