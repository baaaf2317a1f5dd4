"""Checks of small models, on one GPU or more; called by one_gpu.sh and run_all.sh.

They need torch, megatron-core, transformers and pytest; no network, SGLang or Transformer Engine.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from gpu_machine import HERE, NO_GPU, ROOT, TORCHRUN, TRAIN
from gpu_report import Check, Mismatch, simulated_counts, simulated_peaks

LIMIT_S = 120.0
"""Seconds after which a check has failed."""
LARGE_LIMIT_S = 180.0
"""The same of the check "large": on a slow host its profiled step alone takes half of the time."""
STEPS = 3
NOT_COMPARED = ("step", "timing", "perf/", "eps", "rollout/", "training/epoch", "val")
"""Prefixes of metrics that differ between two runs of the same responses."""
RELATIVE, ABSOLUTE = 5e-3, 2e-4
"""Largest differences between the metrics of a CPU and those of a GPU, which sums in another order;
both in float32."""
SAME = 1e-4
"""The same between two runs on one GPU, whose kernels may add in different orders."""
FOUR_MODELS = str(ROOT / "recipes" / "tiny_cpu_reward_model.yaml")
SHORT = (
    f"trainer.total_training_steps={STEPS}",
    "trainer.warm_start_steps=0",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.export_hf=false",
    "trainer.gpu=1000",
    "data.train_batch_size=32",
    "actor.ppo_mini_batch_size=16",
    *(f"{role}.ppo_micro_batch_size_per_gpu=8" for role in ("actor", "critic")),
)
OFFLOAD = tuple(
    f"{role}.megatron.offload.{part}=true"
    for role, parts in (
        ("actor", ("parameters", "gradients", "optimizer")),
        ("critic", ("parameters", "gradients", "optimizer")),
        ("ref", ("parameters",)),
        ("reward_model", ("parameters",)),
    )
    for part in parts
)
MEASURED = HERE / "measured.yaml"
"""The recipe of the steps that are measured and simulated."""
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
"""What is changed in a model's config on a CPU."""


@dataclass(frozen=True)
class Step:
    """A step that is measured and simulated.

    Args:
        model: the config of its model.
        changed: what is changed in it on a GPU.
        keys: recipe keys besides those of ``MEASURED``.
        replay: whether it trains on the responses of the check "responses".
    """

    model: str
    changed: Mapping[str, int] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    replay: bool = False


LONG = (
    "data.train_batch_size=64",
    "data.max_response_length=768",
    "actor.ppo_mini_batch_size=32",
    "actor.ppo_max_token_len_per_gpu=16384",
    "critic.ppo_max_token_len_per_gpu=16384",
)
MEASURED_STEPS = {
    "measured": Step("Qwen2.5-0.5B-Instruct", {"num_hidden_layers": 8}),
    "large": Step("SmolLM2-1.7B-sft", keys=LONG, replay=True),
}


@dataclass(frozen=True)
class Place:
    """Where checks run.

    Args:
        folder: of their results.
        device: ``cuda``, or ``cpu`` to test the checks themselves.
        share: whether several ranks may use one GPU.
    """

    folder: Path
    device: str
    share: bool = False

    def environment(
        self, ranks: int, device: str | None = None, allocator: str = ""
    ) -> dict[str, str]:
        """Variables of a check's processes, perhaps on another device.

        One rank has its GPU for itself, and NCCL as on a cluster.
        """
        paths = [str(ROOT / part) for part in ("", "tests/support", "tests/distributed")]
        paths += filter(None, [os.environ.get("PYTHONPATH")])
        found = {
            "MPPO_DEVICE": device or self.device,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
        }
        if self.share and ranks > 1 and found["MPPO_DEVICE"] == "cuda":
            found["MPPO_SHARE_GPU"] = "1"
        if allocator:
            found["PYTORCH_ALLOC_CONF"] = allocator
        return found


def part(
    name: str,
    shows: str,
    place: Place,
    ranks: int = 0,
    allocator: str = "",
    limit_s: float = LIMIT_S,
) -> Check:
    """A function of gpu_parts.py, in one process or under torchrun."""
    start = (*TORCHRUN, f"--nproc_per_node={ranks}") if ranks else (sys.executable,)
    command = (*start, str(HERE / "gpu_parts.py"), name.split()[0], str(place.folder))
    environment = place.environment(ranks or 1, allocator=allocator)
    return Check(name, shows, command, limit_s, environment, judge=partial(judge_found, name=name))


def schedules(place: Place, ranks: int) -> Check:
    """Updates of a pipeline of that many stages."""
    shows = "schedules stream and give the sequential update, recorded or not, with little memory"
    return part(f"schedules pp{ranks}", shows, place, ranks)


def numbers(kind: str, place: Place) -> Check:
    """Tiny models in float32 on 4 ranks: the CPU's numbers, or the GPU's."""
    where = str(place.folder / "numbers")
    command = (*TORCHRUN, "--nproc_per_node=4", str(HERE / "gpu_numbers.py"), where)
    shows, judge = "4 ranks on GPUs compute the numbers of CPUs", judge_numbers
    if kind == "cpu":
        shows, judge = "reference for the next check", None
    return Check(
        f"numbers {kind}", shows, command, LIMIT_S, place.environment(4, kind), judge=judge
    )


def training(
    name: str,
    shows: str,
    place: Place,
    keys: Sequence[str] = (),
    device: str | None = None,
    begun: Path | None = None,
    **judged: Any,
) -> Check:
    """Steps of four models on two ranks: actor TP2, critic PP2, reference DP2, reward model CP2.

    ``begun`` is the folder of an earlier check's run, which goes on.
    """
    run = begun or run_folder(place, name)
    command = (
        *TORCHRUN, "--nproc_per_node=2", TRAIN, "--config", FOUR_MODELS,
        f"trainer.default_local_dir={run}", *SHORT, *keys,
    )  # fmt: skip
    judge = partial(judge_training, run=run, **judged)
    fresh = None if begun else run
    return Check(
        name, shows, command, LIMIT_S, place.environment(2, device), fresh=fresh, judge=judge
    )


def run_folder(place: Place, name: str) -> Path:
    """The run folder of a check."""
    return place.folder / f"run_{name.replace(' ', '_')}"


def small_checks(place: Place) -> list[list[Check]]:
    """The checks in stages, in the order in which a first run on a GPU most likely fails.

    Checks of a stage run at the same time if ranks share a GPU; measurements are alone.
    """
    reference, replayed = run_folder(place, "train cpu"), run_folder(place, "replay")
    replay = f"trainer.replay={reference}"
    seam = (sys.executable, "-m", "pytest", "-o", "addopts=", "-rs", str(HERE))
    cuda = place.device == "cuda"
    stages = [
        [part("machine", "versions, bandwidths and products of matrices", place)],
        [
            Check("device seam", "tests/gpu pass", seam, LIMIT_S, place.environment(1),
                  judge=judge_pytest),
            schedules(place, 2),
            part("ipc plain", "another process reads a bucket by CUDA IPC", place),
            part("ipc segments", "also beside expandable segments", place,
                 allocator="expandable_segments:True"),
            numbers("cpu", place),
            training("train cpu", "reference for the next checks", place,
                     ["trainer.dump_rollouts=true"], device="cpu"),
            part("models", "inputs of the next checks", place),
            responses(place),
        ],
        [part("measured", "memory, operations and waits of a step", place)],
        [part("large", "the same of a 1.7B model that fills the GPU", place,
              limit_s=LARGE_LIMIT_S)],
        [
            *([numbers("cuda", place)] if cuda else []),
            training("train", "four models generate and train", place),
            training("replay", "the GPU repeats the CPU's steps", place, [replay],
                     like=reference, relative=RELATIVE),
            simulated(place, "measured"),
            simulated(place, "large"),
        ],
        [
            training("offload", "parts on the host between phases change nothing", place,
                     [replay, *OFFLOAD], like=replayed),
            training("half", "two steps, saved", place,
                     [replay, "trainer.save_freq=2", "trainer.total_training_steps=2"], steps=2),
        ],
        [
            training("resume", "a resumed run repeats the third step", place, [replay],
                     begun=run_folder(place, "half"), like=replayed),
        ],
        *([[part("rules", "what streams and calls of the host wait for", place)]] if cuda else []),
    ]  # fmt: skip
    return stages if place.share else [[check] for stage in stages for check in stage]


def measured_keys(folder: Path, name: str) -> list[str]:
    """Recipe keys of a step that is measured and simulated, besides those in its recipe."""
    from gpu_inputs import QUESTIONS

    step = MEASURED_STEPS[name]
    return [
        f"model.path={folder / 'inputs' / step.model}",
        f"data.train_files=[{folder / 'inputs' / QUESTIONS}]",
        f"trainer.default_local_dir={folder / f'run_{name}'}",
        *step.keys,
    ]


def responses(place: Place) -> Check:
    """Responses of a small model on the CPU, for a step whose time is the training's."""
    run = run_folder(place, "responses")
    command = (
        sys.executable, str(HERE / "gpu_parts.py"), "responses", str(place.folder),
    )  # fmt: skip
    shows = "responses for the check 'large'"
    return Check("responses", shows, command, LIMIT_S, place.environment(1, "cpu"), fresh=run)


def simulated(place: Place, name: str) -> Check:
    """A measured step, simulated."""
    command = (
        sys.executable, "-m", "mppo_simulate", str(MEASURED), "--world-size", "1",
        *measured_keys(place.folder, name),
    )  # fmt: skip
    paths = {"PYTHONPATH": place.environment(1)["PYTHONPATH"]}
    judge = partial(judge_simulated, step=name, compare=place.device == "cuda")
    shows = "the simulation has the measured memory; operations and waits of both"
    return Check(f"simulated {name}", shows, command, LIMIT_S, {**NO_GPU, **paths}, judge=judge)


def judge_pytest(folder: Path) -> str:
    """The summary of pytest's output."""
    lines = (folder / "device_seam.log").read_text().splitlines()
    summary = [line.strip("= ") for line in lines if " passed" in line or " skipped" in line]
    if not summary:
        raise Mismatch("pytest printed no summary")
    return summary[-1]


def judge_numbers(folder: Path) -> str:
    """Compare the numbers of CPUs and GPUs."""
    from gpu_numbers import differences

    files = [folder / "numbers" / f"{kind}.json" for kind in ("cuda", "cpu")]
    largest, lines = differences(*(json.loads(file.read_text()) for file in files))
    if lines:
        raise Mismatch("; ".join(lines))
    return f"largest difference {largest:.2f} of the tolerance"


def judge_found(folder: Path, name: str) -> str:
    """What a part printed last after ``found: ``."""
    lines = (folder / f"{name.replace(' ', '_')}.log").read_text().splitlines()
    found = [line.removeprefix("found: ") for line in lines if line.startswith("found: ")]
    if not found:
        raise Mismatch("the part printed no result")
    return found[-1]


def steps_of(run: Path) -> dict[int, dict[str, float]]:
    """The metrics of a run by step."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row for row in rows if "actor/grad_norm" in row}


def judge_training(
    folder: Path,
    run: Path,
    like: Path | None = None,
    relative: float = SAME,
    steps: int = STEPS,
) -> str:
    """Check that all steps ran, and compare their metrics.

    Args:
        folder: of the results.
        run: the run's folder.
        like: the folder of a run with the same metrics; None: nothing is compared.
        relative: largest difference.
        steps: steps expected.
    """
    here = steps_of(run)
    if steps not in here:
        raise Mismatch(f"steps {sorted(here)} instead of 1 to {steps}")
    last = here[steps]
    seconds = f"{last['timing_s/step']:.2f} s per step"
    if like is None:
        return f"{seconds}, gradient norm {last['actor/grad_norm']:.4g}"
    largest, names, there = 0.0, 0, steps_of(like)
    for step, row in here.items():
        for name, value in row.items():
            wanted = there[step].get(name)
            if name.startswith(NOT_COMPARED) or not isinstance(wanted, (int, float)):
                continue
            difference = abs(value - wanted) / (ABSOLUTE + relative * abs(wanted))
            names += 1
            if not difference <= 1:
                raise Mismatch(f"step {step}: {name} is {value} instead of {wanted}")
            largest = max(largest, difference)
    return f"{names} numbers, largest difference {largest:.2f} of the tolerance; {seconds}"


def judge_simulated(folder: Path, step: str, compare: bool) -> str:
    """Compare the memory's peak, of the run and by phase; show operations and waits of both."""
    text = (folder / f"simulated_{step}.log").read_text()
    simulated = simulated_peaks(text)
    measured = json.loads((folder / f"{step}.json").read_text())
    peaks = measured["peaks_gib"]
    found = "peaks in GiB, simulated and measured: " + ", ".join(
        f"{phase} {peak:.2f} {peaks[phase]:.2f}"
        for phase, peak in simulated.items()
        if phase in peaks
    )
    for stage, begins in (("log_probs", "computing "), ("update", "updating ")):
        operations, waits = simulated_counts(text, begins)
        there = measured["stages"].get(stage, {"kernels": 0, "waits": 0})
        found += f"; {stage}: operations simulated {operations}, kernels {there['kernels']}"
        found += f", waits simulated {waits}, measured {there['waits']}"
    if compare:
        here, there = max(simulated.values()), max(peaks.values())
        if abs(there - here) > 0.1 * here:
            raise Mismatch(f"{found}: the highest differ by more than 10%")
    return found
