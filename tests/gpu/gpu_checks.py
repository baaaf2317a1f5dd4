"""The checks that need GPUs, on one node with 8 of them; called by run_all.sh.

    tests/gpu/run_all.sh [--out DIR] [--only NAME ...] [--commit HASH]

They need no download: models have random weights. Results go into ``DIR/report.md``, which is
written anew after every check, the output of each check into a log beside it. The exit code is 0 if
all checks pass, 1 if one fails, 2 without 8 GPUs, torch or SGLang.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from gpu_inputs import PROMPT_LENGTH, QUESTIONS
from gpu_machine import HERE, NO_GPU, ROOT, TORCHRUN, TRAIN, torch_problem
from gpu_report import Check, Mismatch, parser, report_checks, simulated_peak
from small_checks import Place, schedules, small_checks

GPUS = 8
LARGEST_MISMATCH = 0.1
"""Largest mean difference, in nats, between log-probabilities of server and actor (bfloat16)."""
MEMORY_TOLERANCE = 0.1
"""Largest difference between measured and simulated memory, as a share of the latter."""
SIZES = {
    "dense": ("deepseek-llm-7b-chat", ()),
    "experts": ("Moonlight-16B-A3B-Instruct", ("num_hidden_layers=6",)),
    "routes": ("Qwen2-7B-Instruct", ("num_hidden_layers=4",)),
}
"""By name of the input: the config of its model, and the changed fields."""
CHECKSUM, LOGPROB = (f"rollout.verify_sync={check}" for check in ("checksum", "logprob"))
SHORT = (
    "trainer.total_training_steps=2",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.export_hf=false",
    CHECKSUM,
    f"data.max_prompt_length={PROMPT_LENGTH}",
    "data.max_response_length=256",
    "data.val_files=[]",
)
RECIPES = {
    "dense": (
        "deepseek_llm_7b_gsm8k_math",
        "data.train_batch_size=128",
        "actor.ppo_mini_batch_size=64",
    ),
    "experts": (
        "moonlight_16b_a3b_gsm8k",
        "data.train_batch_size=128",
        "actor.ppo_mini_batch_size=64",
        "trainer.nnodes=1",
        "model.trust_remote_code=false",
        *(
            f"{role}.megatron.{key}"
            for role in ("actor", "critic")
            for key in (
                "tensor_model_parallel_size=4",
                "expert_model_parallel_size=4",
                "num_layers_in_last_pipeline_stage=null",
            )
        ),
    ),
}
"""By input: the recipe, and keys that make its step short and fit it to 8 GPUs."""
ROUTES = {
    "tensor": ("rollout.sync=tensor", CHECKSUM),
    "sliced": ("rollout.sync_mode=sliced", CHECKSUM),
    "delta": (
        "rollout.sync_mode=delta",
        CHECKSUM,
        "rollout.server_args={mem_fraction_static: 0.3, enable_weights_cpu_backup: true}",
    ),
    "disk": ("rollout.sync=disk", LOGPROB),
}
"""Keys of the routes with a server on the training GPUs."""
ROUTE_KEYS = (
    "model.dtype=bfloat16",
    "data.train_batch_size=32",
    "data.task_kwargs={min_length: 3, max_length: 5}",
    "rollout.server_args={mem_fraction_static: 0.3}",
)


def input_check(name: str, folder: Path) -> Check:
    """Write an input's model and questions."""
    model, changed = SIZES[name]
    command = (sys.executable, str(HERE / "gpu_inputs.py"), str(folder / name), model, *changed)
    return Check(f"model {name}", "the model's folder is written", command, 300)


def training_keys(name: str, folder: Path) -> list[str]:
    """The recipe keys of a training run on an input."""
    _, *own = RECIPES[name]
    return [
        f"model.path={folder / name / SIZES[name][0]}",
        f"data.train_files=[{folder / name / QUESTIONS}]",
        f"trainer.default_local_dir={folder / f'run_{name}'}",
        "trainer.gpu=1000",  # the run and its simulation choose the same offload: none
        *SHORT,
        *own,
    ]


def recipe_of(name: str) -> Path:
    """The recipe of a training run."""
    return ROOT / "recipes" / f"{RECIPES[name][0]}.yaml"


def training_check(name: str, folder: Path) -> Check:
    """Two steps of a recipe with SGLang on the training GPUs."""
    command = (
        *TORCHRUN, f"--nproc_per_node={GPUS}", TRAIN, "--config", str(recipe_of(name)),
        *training_keys(name, folder),
    )  # fmt: skip
    run = folder / f"run_{name}"
    judge = partial(judge_training, run=run.name)
    shows = "PPO with SGLang on the same GPUs"
    return Check(f"training {name}", shows, command, 1200, fresh=run, judge=judge)


def simulation_check(name: str, folder: Path) -> Check:
    """The same run, simulated; its peak is compared with the measured one."""
    command = (
        sys.executable, "-m", "mppo_simulate", str(recipe_of(name)), "--quick",
        "--world-size", str(GPUS), *training_keys(name, folder),
    )  # fmt: skip
    judge = partial(judge_memory, name=name)
    shows = "simulated memory agrees with measured memory"
    return Check(f"memory {name}", shows, command, 240, NO_GPU, judge=judge)


def route_check(name: str, folder: Path, gpus: str) -> Check:
    """Two steps on two GPUs; the run compares the weights that the servers got."""
    command = (
        *TORCHRUN, "--nproc_per_node=2", TRAIN, "--config",
        str(ROOT / "recipes" / "tiny_cpu_sglang.yaml"), *route_keys(name, folder), *ROUTES[name],
    )  # fmt: skip
    run, place = folder / f"run_{name}", {"CUDA_VISIBLE_DEVICES": gpus}
    judge = partial(judge_training, run=run.name)
    shows = "weights reach a server on the training GPUs by this route"
    return Check(f"route {name}", shows, command, 900, place, fresh=run, judge=judge)


def route_keys(name: str, folder: Path) -> list[str]:
    """The recipe keys that all routes share."""
    return [
        f"model.path={folder / 'routes' / SIZES['routes'][0]}",
        f"trainer.default_local_dir={folder / f'run_{name}'}",
        "trainer.total_training_steps=2",
        "trainer.export_hf=false",
        *ROUTE_KEYS,
    ]


def distributed_check(folder: Path, port: int, secret: str) -> Check:
    """Two steps on two GPUs with a server on a third, which gets the weights by broadcast."""
    config = str(ROOT / "recipes" / "tiny_cpu_sglang_disaggregated.yaml")
    keys = [*route_keys("distributed", folder), LOGPROB]
    urls = f"rollout.urls=[http://127.0.0.1:{port}]"
    shared = {"MPPO_ROLLOUT_API_KEY": secret}
    return Check(
        "route distributed",
        "weights reach a server on another GPU by broadcast",
        (*TORCHRUN, "--nproc_per_node=2", TRAIN, "--config", config, *keys, urls),
        900,
        {"CUDA_VISIBLE_DEVICES": "0,1", **shared},
        beside=(
            sys.executable, "-m", "mppo.serve", "--empty", "--config", config,
            "--host", "127.0.0.1", "--port", str(port), *keys,
        ),
        beside_environment={"CUDA_VISIBLE_DEVICES": "2", **shared},
        fresh=folder / "run_distributed",
        judge=partial(judge_training, run="run_distributed"),
    )  # fmt: skip


def all_stages(folder: Path, port: int, secret: str) -> list[list[Check]]:
    """All checks, the most likely hang first; those of a stage run at the same time, on different
    GPUs or on CPUs."""
    reduce = (*TORCHRUN, f"--nproc_per_node={GPUS}", str(ROOT / "slurm" / "allreduce.py"))
    place = Place(folder, "cuda")
    pairs = [f"{2 * index},{2 * index + 1}" for index in range(len(ROUTES))]
    return [
        [Check("all-reduce", "NCCL joins all GPUs", reduce, 180, judge=judge_all_reduce)],
        [schedules(place, 4)],
        [schedules(place, GPUS)],
        *small_checks(place),
        [input_check("routes", folder)],
        [route_check(name, folder, gpus) for name, gpus in zip(ROUTES, pairs, strict=True)],
        [distributed_check(folder, port, secret)],
        *(
            [check(name, folder)]
            for name in RECIPES
            for check in (input_check, training_check, simulation_check)
        ),
    ]


def judge_all_reduce(folder: Path) -> str:
    """The line with time and bandwidth."""
    lines = (folder / "all-reduce.log").read_text().splitlines()
    return next(line for line in lines if line.startswith("preflight:"))


def steps_of(folder: Path, run: str) -> list[dict[str, float]]:
    """The metrics of a run's steps."""
    lines = (folder / run / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "actor/grad_norm" in row]


def judge_training(folder: Path, run: str) -> str:
    """Check that two steps ran and that server and actor compute the same log-probabilities."""
    steps = steps_of(folder, run)
    if len(steps) != 2:
        raise Mismatch(f"{len(steps)} steps instead of 2")
    apart = [abs(row["training/rollout_logprob_diff_mean"]) for row in steps]
    last = steps[-1]
    found = (
        f"log-probabilities of server and actor differ by {max(apart):.4f} on average, "
        f"gradient norm {last['actor/grad_norm']:.3g}, {last['timing_s/step']:.1f} s per step, "
        f"{last['perf/tokens_per_second']:.0f} tokens/s"
    )
    if not all(difference <= LARGEST_MISMATCH for difference in apart):  # also if not a number
        raise Mismatch(f"{found}; at most {LARGEST_MISMATCH} expected")
    return found


def judge_memory(folder: Path, name: str) -> str:
    """Compare the peak that torch measured on rank 0 with the simulated one."""
    measured = steps_of(folder, f"run_{name}")[-1]["perf/max_memory_allocated_gb"]
    text = (folder / f"memory_{name}.log").read_text()
    simulated, phase = simulated_peak(text)
    found = f"measured {measured:.2f} GiB, simulated {simulated:.2f} GiB ({phase})"
    if abs(measured - simulated) > MEMORY_TOLERANCE * simulated:
        raise Mismatch(f"{found}: they differ by more than {MEMORY_TOLERANCE:.0%}")
    return found


def missing() -> str | None:
    """Why the checks cannot run on this machine; None: they can."""
    why = torch_problem()
    if why is not None:
        return why
    import torch

    if os.environ.get("MPPO_DEVICE") == "cpu":
        return "MPPO_DEVICE=cpu: unset the variable, these checks are for GPUs"
    if not torch.version.cuda:
        return f"torch {torch.__version__} is built for the CPU: install torch for CUDA"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < GPUS:
        return f"torch sees {count} GPUs, but {GPUS} on one node are needed (see nvidia-smi)"
    for package, fix in (("sglang", 'pip install "mppo[gpu]"'), ("pytest", "pip install pytest")):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed: {fix}"
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks; see the module's text."""
    arguments = parser("tests/gpu/run_all.sh", __doc__ or "").parse_args(argv)
    why = missing()
    if why is not None:
        print(f"mppo: {why}", file=sys.stderr)
        return 2
    from mppo.parallel.addresses import free_port

    folder = arguments.out.absolute()
    checks = all_stages(folder, free_port(), os.urandom(16).hex())
    return report_checks(checks, folder, arguments.only, arguments.commit)


if __name__ == "__main__":
    sys.exit(main())
