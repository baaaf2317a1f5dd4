"""A training run in separate processes that can receive signals."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

import torch
from ranks import begin_ranks
from safetensors.torch import load_file

from mppo.parallel.addresses import free_port

ROOT = Path(__file__).parents[2]
TRAIN = str(ROOT / "mppo/train.py")
QUIET = {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
NOT_COMPARED = ("timing", "perf/", "eps")
TINY = [
    "model.path=builtin:tiny",
    "model.dtype=float32",
    "data.task=arithmetic",
    "data.train_size=64",
    "data.val_size=4",
    "data.max_prompt_length=16",
    "data.max_response_length=5",
    "data.train_batch_size=8",
    "actor.ppo_mini_batch_size=4",
    "actor.optim.lr=1e-3",
    "actor.megatron.tensor_model_parallel_size=2",
    "critic.megatron.pipeline_model_parallel_size=2",
    "trainer.val_before_train=false",
    "trainer.save_freq=1",
    "trainer.heartbeat_timeout_s=12",
]
ONE_STREAM = [
    "actor.megatron.tensor_model_parallel_size=1",
    "actor.megatron.pipeline_model_parallel_size=2",
    "actor.ppo_micro_batch_size_per_gpu=1",
    "critic.ppo_micro_batch_size_per_gpu=1",
]
"""Actor and critic run through one pipeline, by a flush-free schedule."""


STEPS = 6


def keys(run_dir: Path, overrides: Sequence[str] = (), steps: int = STEPS) -> list[str]:
    """The recipe of a tiny run that writes to ``run_dir``."""
    run_dir.mkdir(parents=True, exist_ok=True)
    total = f"trainer.total_training_steps={steps}"
    return [*TINY, total, f"trainer.default_local_dir={run_dir}", *overrides]


def torchrun(restarts: int = 0) -> list[str]:
    """The torchrun command for two ranks of a script, with this many restarts."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    return [*command, f"--max-restarts={restarts}"]


def mpirun(ranks: int = 2) -> list[str]:
    """The mpirun command for a script; skips the test if mpirun is missing."""
    import pytest  # benchmarks import this module without pytest

    found = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
    if importlib.util.find_spec("mpi4py") is None or found is None:
        pytest.skip('needs mpi4py and mpirun: pip install "mppo[mpi]"')
    return [found, "-n", str(ranks), sys.executable]


def start_under(
    launcher: Sequence[str], run_dir: Path, steps: int = STEPS, overrides: Sequence[str] = ()
) -> subprocess.Popen:
    """Start or resume a tiny run of two ranks; its output is appended to ``output.txt``."""
    arguments = keys(run_dir, overrides, steps)
    with (run_dir / "output.txt").open("a") as stream:
        return subprocess.Popen(
            [*launcher, TRAIN, *arguments],
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | QUIET,
            start_new_session=True,
        )


def _rank(
    rank: int, world: int, port: int, program: str, argv: Sequence[str], folder: Path
) -> None:
    """One rank with a launcher's environment; exits with the program's exit code."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in place.items()})
    warnings.simplefilter("ignore")
    with output(folder, rank).open("w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    sys.exit(import_module(program).main(argv))


def output(folder: Path, rank: int) -> Path:
    """Where a rank's output goes."""
    return folder / f"output_{rank}.txt"


class LaunchedRun:
    """Ranks on this machine with a launcher's environment, but without a launcher.

    Args:
        run_dir: the run's folder.
        overrides: recipe keys beyond ``TINY``.
        program: the module whose ``main`` runs.
        argv: its command line; by default the recipe's keys.
        world: number of ranks.
    """

    def __init__(
        self,
        run_dir: Path,
        overrides: Sequence[str] = (),
        program: str = "mppo.train",
        argv: Sequence[str] = (),
        world: int = 2,
    ) -> None:
        self.run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        argv = list(argv or keys(run_dir, overrides))
        arguments = (world, free_port(), program, argv, run_dir)
        self.processes = begin_ranks(_rank, arguments, world).processes

    def text(self, rank: int) -> str:
        return output(self.run_dir, rank).read_text()

    def texts(self) -> str:
        return "\n".join(self.text(rank) for rank in range(len(self.processes)))

    def until(self, condition: Callable[[], bool], patience_s: float = 500) -> None:
        """Wait until a condition is true while the ranks run."""
        deadline = time.monotonic() + patience_s
        while not condition():
            dead = [p for p in self.processes if p.exitcode is not None]
            assert not dead, f"a rank has ended with {dead[0].exitcode}:\n{self.texts()}"
            assert time.monotonic() < deadline, f"nothing for {patience_s} s:\n{self.texts()}"
            time.sleep(0.05)

    def until_step(self, step: int) -> None:
        self.until(lambda: steps_logged(self.run_dir) >= step)

    def until_saved(self, step: int) -> None:
        self.until((self.run_dir / f"checkpoints/global_step_{step}").is_dir)

    def send(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.processes[rank].pid, number)

    def code(self, rank: int, patience_s: float) -> int | None:
        """The exit code of a rank; None if it has not ended within the time."""
        self.processes[rank].join(patience_s)
        return self.processes[rank].exitcode

    def codes(self, patience_s: float = 500) -> list[int | None]:
        """Exit codes of all ranks; those that do not end are killed."""
        try:
            return [self.code(rank, patience_s) for rank in range(len(self.processes))]
        finally:
            self.kill()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def metrics_logged(run_dir: Path) -> list[dict[str, float]]:
    """The metrics of every step, without those that measure time."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    steps = [json.loads(line) for line in lines if line.endswith("}")]
    return [{k: v for k, v in m.items() if not k.startswith(NOT_COMPARED)} for m in steps]


def steps_logged(run_dir: Path) -> int:
    """The last step in the metrics, 0 before the first."""
    steps = metrics_logged(run_dir)
    return int(steps[-1]["step"]) if steps else 0


def same_weights(a: Path, b: Path) -> bool:
    """Whether two runs exported the same bits."""
    x, y = (load_file(run_dir / "actor/model.safetensors") for run_dir in (a, b))
    return x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)
