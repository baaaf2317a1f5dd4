"""The number of functions between the entry point and the policy loss, in a real run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from launched_run import TINY
from ranks import start_ranks

PACKAGE = Path(__file__).parents[2] / "mppo"
HOPS = 8
OVERRIDES = [
    "actor.megatron.tensor_model_parallel_size=1",
    "critic.megatron.pipeline_model_parallel_size=1",
    "trainer.total_training_steps=1",
    "trainer.save_freq=-1",
    "trainer.export_hf=false",
]


def _rank(rank: int, folder: Path) -> None:
    from mppo.train import main

    stack: list[str] = []

    def look(frame, event, argument) -> None:
        if event == "call" and frame.f_code.co_name == "policy_loss" and not stack:
            while frame is not None:
                if Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
                    stack.append(frame.f_code.co_name)
                frame = frame.f_back

    os.environ["MPPO_CACHE"] = str(folder / "cache")
    sys.setprofile(look)
    code = main([*TINY, *OVERRIDES, f"trainer.default_local_dir={folder / 'run'}"])
    sys.setprofile(None)
    assert code == 0
    (folder / "stack.json").write_text(json.dumps(stack))


def test_at_most_eight_functions_between_main_and_the_policy_loss(tmp_path):
    start_ranks(_rank, (tmp_path,), 1)
    stack = json.loads((tmp_path / "stack.json").read_text())
    assert stack[0] == "policy_loss"
    between = stack[1 : stack.index("main")]
    assert len(between) <= HOPS, between
