"""How far a prompt travels to the policy's loss, in a real run: calls, functions, files, types."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from launched_run import TINY
from ranks import start_ranks

PACKAGE = Path(__file__).parents[2] / "mppo"
DEPTH = 8
FUNCTIONS, FILES = 45, 20
ALL_FUNCTIONS, ALL_FILES = 66, 25
"""Those that only read a container's fields, or only report, included."""
REPORTS = {
    "errors_of", "keeping_nonfinite_step", "mean_numbers", "on_batch", "reward_metrics",
    "show_errors", "unscored", "update_flops",
}  # fmt: skip
"""Metrics, messages, callbacks and the files of a failed step."""
CONTAINERS = {"Prompt", "Episode", "Batch", "Outputs", "Experience", "MiniBatch"}
OVERRIDES = [
    "actor.megatron.tensor_model_parallel_size=1",
    "critic.megatron.pipeline_model_parallel_size=1",
    "trainer.total_training_steps=1",
    "trainer.save_freq=-1",
    "trainer.export_hf=false",
]


def _kind(value: Any) -> str:
    """The type of a value, or of the first one in a list, tuple or mapping."""
    if isinstance(value, Mapping):
        value = next(iter(value.values()), None)
    elif isinstance(value, list | tuple):
        value = next(iter(value), None)
    return type(value).__name__ if type(value).__module__.startswith("mppo.batch.") else ""


def _rank(rank: int, folder: Path) -> None:
    from mppo.train import main

    stack: list[str] = []
    passed: set[tuple[str, str]] = set()
    accessors: set[tuple[str, str]] = set()
    kinds: set[str] = set()

    def look(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if stack or not code.co_filename.startswith(f"{PACKAGE}/"):
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = [frame.f_locals.get(name) for name in names] if event == "call" else [argument]
        found = CONTAINERS.intersection(map(_kind, values))
        if found and code.co_name.isidentifier() and not code.co_name.startswith("_"):
            passed.add((code.co_filename, code.co_name))
            owner = frame.f_locals.get("self", frame.f_locals.get("cls"))
            if getattr(owner, "__name__", type(owner).__name__) in CONTAINERS:
                accessors.add((code.co_filename, code.co_name))
        kinds.update(found)
        if event == "call" and code.co_name == "policy_loss":
            caller: FrameType | None = frame
            while caller is not None:
                if caller.f_code.co_filename.startswith(f"{PACKAGE}/"):
                    stack.append(caller.f_code.co_name)
                caller = caller.f_back

    os.environ["MPPO_CACHE"] = str(folder / "cache")
    sys.setprofile(look)
    code = main([*TINY, *OVERRIDES, f"trainer.default_local_dir={folder / 'run'}"])
    sys.setprofile(None)
    assert code == 0
    found = {
        "stack": stack, "passed": sorted(passed), "kinds": sorted(kinds),
        "accessors": sorted(accessors),
    }  # fmt: skip
    (folder / "path.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> dict[str, list]:
    folder = tmp_path_factory.mktemp("path")
    start_ranks(_rank, (folder,), 1)
    return json.loads((folder / "path.json").read_text())


def test_at_most_eight_functions_between_main_and_the_policy_loss(path):
    assert path["stack"][0] == "policy_loss"
    between = path["stack"][1 : path["stack"].index("main")]
    assert len(between) <= DEPTH, between


def test_few_functions_and_files_take_or_return_the_data(path):
    """Public ones."""
    assert set(path["kinds"]) == CONTAINERS
    everything = {(file, name) for file, name in path["passed"]}
    accessors = {(file, name) for file, name in path["accessors"]}
    way = {(file, name) for file, name in everything - accessors if name not in REPORTS}
    limits = {"way": (way, FUNCTIONS, FILES), "all": (everything, ALL_FUNCTIONS, ALL_FILES)}
    for name, (functions, most, most_files) in limits.items():
        files = {file for file, _ in functions}
        print(f"{name}: {len(functions)} functions in {len(files)} files")
        assert len(functions) <= most, sorted(functions)
        assert len(files) <= most_files, sorted(files)
