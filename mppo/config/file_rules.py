"""Rules about what must be on this machine before a run: models, data, the place for results,
trackers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from mppo.config.errors import Fault
from mppo.config.schema import Recipe
from mppo.config.trackers import tracker_faults
from mppo.weights.model_folder import (
    checkpoint_folder,
    companion_folder,
    is_megatron_checkpoint,
)

SHARED_FOLDERS = frozenset(
    {
        "/", "/dev", "/dev/shm", "/home", "/media", "/mnt", "/opt", "/root", "/run", "/srv", "/tmp",
        "/usr", "/usr/local", "/usr/share", "/var", "/var/tmp",
    }
)  # fmt: skip
"""Others write there, too: a run needs a folder of its own below."""
SYSTEM_FOLDERS = (
    "/bin", "/boot", "/etc", "/lib", "/lib32", "/lib64", "/proc", "/sbin", "/sys", "/usr/bin",
    "/usr/lib", "/usr/lib64", "/usr/sbin",
)  # fmt: skip
"""Nothing of a run belongs there, nor below."""
BUILTIN_PREFIX = "builtin:"
DATA_ENDINGS = (".jsonl", ".ndjson", ".parquet")
WEIGHT_ENDINGS = (".safetensors",)
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]*\w")


def check_files(recipe: Recipe) -> list[Fault]:
    """Every missing, empty or unreadable file of a recipe. Reads names and sizes, and of Megatron
    checkpoints the table of contents."""
    faults: list[Fault] = []
    faults += check_model_folder("model.path", recipe.model.path)
    if recipe.critic.path and recipe.algorithm.uses_critic:
        faults += check_model_folder("critic.path", recipe.critic.path)
    if recipe.ref.path and recipe.uses_reference:
        faults += check_model_folder("ref.path", recipe.ref.path)
    for key, names in (
        ("data.train_files", recipe.data.train_files),
        ("data.val_files", recipe.data.val_files),
        ("data.ptx_files", recipe.data.ptx_files),
    ):
        for name in names:
            faults += _told(key, name, _data_file)
    faults += _reward_file(recipe)
    faults += tracker_faults(recipe.trainer.logger, os.environ)
    return faults


def check_run_folder(recipe: Recipe) -> list[Fault]:
    """A run must not write among the system's files, nor into a file."""
    trainer = recipe.trainer
    key = "trainer.default_local_dir" if trainer.default_local_dir else "trainer.experiment_name"
    value = trainer.default_local_dir or trainer.experiment_name

    def judge(key: str, name: str) -> Iterator[Fault]:
        folder = trainer.run_dir
        real = Path(os.path.realpath(folder))
        if str(real) in SHARED_FOLDERS or any(real.is_relative_to(p) for p in SYSTEM_FOLDERS):
            why = f"a run would write into the system's folder {real}"
            yield Fault(key, value, why, "name a folder of the run's own")
        elif folder.exists() and not folder.is_dir():
            yield Fault(key, value, "is a file", "give a folder")

    return _told(key, value, judge)


def _told(key: str, name: str, judge: Callable[[str, str], Iterator[Fault]]) -> list[Fault]:
    """What a judge finds; that it may not look, or that no path is written so, is a fault, too."""
    try:
        return list(judge(key, name))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        return [Fault(key, name, why, "give a path that can be read")]


def check_model_folder(key: str, name: str) -> list[Fault]:
    """What is wrong with a model's folder, its weights included."""
    return _told(key, name, _model_faults)


def _model_faults(key: str, name: str) -> Iterator[Fault]:
    if name.startswith(BUILTIN_PREFIX):
        return
    folder = Path(name)
    if not folder.is_dir():
        yield no_model_folder(key, name)
    elif is_megatron_checkpoint(folder):
        yield from _checkpoint(key, folder)
    elif not (folder / "config.json").is_file():
        cure = "give a Hugging Face model folder, or a Megatron torch_dist checkpoint"
        yield Fault(key, name, "holds no config.json", cure)
    elif not any(f.suffix in WEIGHT_ENDINGS for f in folder.iterdir()):
        cure = "download the weights"
        yield Fault(key, name, "holds no *.safetensors", cure)


def no_model_folder(key: str, name: str) -> Fault:
    """What is wrong with a model that is no folder."""
    if is_hub_name(name):
        why = "no such folder; a model of the Hugging Face Hub is not downloaded by itself"
        cure = (
            f"set model.hub: true, or run `hf download {name} --local-dir models/{name}` and name "
            f"that folder"
        )
        return Fault(key, name, why, cure)
    why = "is a file, not a folder" if Path(name).exists() else "no such folder"
    cure = "give a Hugging Face folder (config.json, tokenizer, safetensors) or builtin:tiny"
    return Fault(key, name, why, cure)


def is_hub_name(name: str) -> bool:
    """Whether a model's name has the Hub's form ``owner/model`` and is nothing on this disk."""
    return bool(_HUB_NAME.fullmatch(name)) and not Path(name).exists()


def _checkpoint(key: str, folder: Path) -> Iterator[Fault]:
    from mppo.weights.contents import read_checkpoint  # imports torch

    try:
        companion_folder(folder)
        read_checkpoint(checkpoint_folder(folder))
    except ValueError as error:
        why, _, cure = str(error).removeprefix(f"{folder}: ").partition("; ")
        yield Fault(key, str(folder), why, cure or "name a folder Megatron saved")


def _data_file(key: str, name: str) -> Iterator[Fault]:
    path = Path(name)
    if not path.exists():
        yield Fault(key, name, "no such file", "give the path of a readable file")
    elif not path.is_file():
        yield Fault(key, name, "is no file", "name the files in it")
    elif path.suffix not in DATA_ENDINGS:
        cure = "use .jsonl (one JSON object per line) or .parquet"
        yield Fault(key, name, "unknown kind of file", cure)
    elif path.stat().st_size == 0:
        yield Fault(key, name, "the file is empty", "give a file with rows")


def _reward_file(recipe: Recipe) -> Iterator[Fault]:
    source = (recipe.reward.function or "").rpartition(":")[0]
    if recipe.reward.name == "function" and source.endswith(".py") and not Path(source).is_file():
        yield Fault(
            "reward.function", recipe.reward.function, f"no such file {source}", "correct it"
        )
