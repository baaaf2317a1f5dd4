"""A training run as separate processes that can be sent signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
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
    "trainer.total_training_steps=6",
    "trainer.save_freq=1",
    "trainer.heartbeat_timeout_s=12",
]


class LaunchedRun:
    """Two ranks on this machine, started as a launcher would, without one that interferes.

    Args:
        run_dir: the run's folder.
        overrides: recipe keys beyond ``TINY``.
        command: what to run; the training by default.
    """

    def __init__(
        self, run_dir: Path, overrides: Sequence[str] = (), command: Sequence[str] = ()
    ) -> None:
        self.run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        keys = [*TINY, f"trainer.default_local_dir={run_dir}", *overrides]
        command = command or [sys.executable, str(ROOT / "mppo/train.py"), *keys]
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self.processes = []
        for rank in range(2):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONWARNINGS": "ignore"}
            environment = os.environ | {key: str(value) for key, value in place.items()}
            with self.output(rank).open("w") as stream:
                self.processes.append(
                    subprocess.Popen(
                        command, env=environment, stdout=stream, stderr=subprocess.STDOUT, cwd=ROOT
                    )
                )

    def output(self, rank: int) -> Path:
        return self.run_dir / f"output_{rank}.txt"

    def texts(self) -> str:
        return "\n".join(self.output(rank).read_text() for rank in range(2))

    def until(self, condition: Callable[[], bool], patience_s: float = 500) -> None:
        """Wait for something to become true while the ranks run."""
        deadline = time.monotonic() + patience_s
        while not condition():
            dead = [p for p in self.processes if p.poll() is not None]
            assert not dead, f"a rank has ended with {dead[0].returncode}:\n{self.texts()}"
            assert time.monotonic() < deadline, f"nothing for {patience_s} s:\n{self.texts()}"
            time.sleep(0.05)

    def until_step(self, step: int) -> None:
        self.until(lambda: steps_logged(self.run_dir) >= step)

    def until_saved(self, step: int) -> None:
        self.until((self.run_dir / f"checkpoints/global_step_{step}").is_dir)

    def send(self, rank: int, number: signal.Signals) -> None:
        self.processes[rank].send_signal(number)

    def codes(self, patience_s: float = 500) -> list[int]:
        """Exit codes of both ranks; those that do not end are killed."""
        try:
            return [process.wait(timeout=patience_s) for process in self.processes]
        finally:
            self.kill()

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def steps_logged(run_dir: Path) -> int:
    """The last step in the metrics, 0 before the first."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    whole = [line for line in lines if line.endswith("}")]
    return json.loads(whole[-1])["step"] if whole else 0


def final_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "actor/model.safetensors")


def same_weights(a: Path, b: Path) -> bool:
    x, y = final_weights(a), final_weights(b)
    return x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)
