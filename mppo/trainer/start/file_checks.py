"""Checks of this machine before a run: models, data files, run folder, trackers."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from mppo.dumps.step_dump import dumped_steps, stale_dumps
from mppo.hub.local_model import check_model_folder
from mppo.recipe.data_set_name import is_data_set
from mppo.recipe.errors import ConfigIssue, path_issues
from mppo.recipe.extras import CODE_VERIFIER
from mppo.recipe.schema import Recipe
from mppo.recipe.sections.data import DATA_ENDINGS, DATA_FORMS
from mppo.recipe.trackers import tracker_issues
from mppo.safety.input_files import LFS_FIX, LFS_POINTER, is_lfs_pointer

SHARED_FOLDERS = frozenset(
    {
        "/", "/dev", "/dev/shm", "/home", "/media", "/mnt", "/opt", "/root", "/run", "/srv", "/tmp",
        "/usr", "/usr/local", "/usr/share", "/var", "/var/tmp",
    }
)  # fmt: skip
"""Folders that other programs write to: a run needs its own folder below them."""
SYSTEM_FOLDERS = (
    "/bin", "/boot", "/etc", "/lib", "/lib32", "/lib64", "/proc", "/sbin", "/sys", "/usr/bin",
    "/usr/lib", "/usr/lib64", "/usr/sbin",
)  # fmt: skip
"""Folders of the operating system: a run folder must not be there or below."""


def check_files(recipe: Recipe) -> list[ConfigIssue]:
    """Issues of missing, empty or unreadable files. Reads names and sizes, and the metadata of
    Megatron checkpoints."""
    issues: list[ConfigIssue] = []
    for key, path in {role.path_key: role.path for role in recipe.roles()}.items():
        issues += check_model_folder(key, path)
    for key, names in recipe.data.files.items():
        for name in names:
            issues += path_issues(key, name, _data_file)
    if recipe.reward.name == "rule" and recipe.reward.server_format is None:
        issues += _code_verifier(recipe)
    issues += check_code(recipe)
    if recipe.rollout.agent is not None:
        issues += _command("rollout.agent.command", recipe.rollout.agent.command)
    if recipe.trainer.replay is not None:
        issues += path_issues("trainer.replay", recipe.trainer.replay, _dumps)
    issues += tracker_issues(recipe.trainer.logger, os.environ)
    return issues


def check_code(recipe: Recipe) -> list[ConfigIssue]:
    """Issues of missing files of code, which are a part of the recipe."""
    issues: list[ConfigIssue] = []
    if recipe.reward.name == "function":
        issues += _python_file("reward.function", recipe.reward.function)
    agent = recipe.rollout.agent
    if agent is not None:
        issues += _python_file("rollout.agent.path", agent.path)
        issues += _python_file("rollout.agent.run", agent.run)
        for number, tool in enumerate(agent.tools):
            issues += _python_file(f"rollout.agent.tools.{number}.path", tool.path)
    return issues


def _command(key: str, command: str | None) -> Iterator[ConfigIssue]:
    """A command must start with an executable file."""
    if command is None:
        return
    try:
        words = shlex.split(command)
    except ValueError as error:
        yield ConfigIssue(
            key, command, f"cannot be split into words: {error}", "correct the quotes"
        )
        return
    if not words or shutil.which(words[0]) is None:
        why = "names no executable file" if words else "is empty"
        yield ConfigIssue(key, command, why, "give a program, such as: python my_agent.py")


def _code_verifier(recipe: Recipe) -> Iterator[ConfigIssue]:
    named = {"reward.verifier": recipe.reward.verifier}
    named |= {f"data.sources.{i}.verifier": s.verifier for i, s in enumerate(recipe.data.sources)}
    for key, verifier in named.items():
        issue = CODE_VERIFIER.issue(key, verifier) if verifier == "code" else None
        if issue is not None:
            yield issue


def _dumps(key: str, name: str) -> Iterator[ConfigIssue]:
    """A replay needs at least one dumped step."""
    fix = "give the folder of a run with trainer.dump_rollouts: true"
    if not Path(name).is_dir():
        yield ConfigIssue(key, name, "this folder does not exist", fix)
    elif not dumped_steps(Path(name)):
        stale = [why for _, why in stale_dumps(Path(name)).values()]
        why = f"holds only stale dumps, of lost work ({stale[-1]})" if stale else None
        yield ConfigIssue(key, name, why or "holds no complete step_N of dumped rollouts", fix)


def check_run_folder(recipe: Recipe) -> list[ConfigIssue]:
    """Issues of the run folder: it must not be a system folder or a file."""
    trainer = recipe.trainer
    key = "trainer.default_local_dir" if trainer.default_local_dir else "trainer.experiment_name"
    value = trainer.default_local_dir or trainer.experiment_name

    def check(key: str, name: str) -> Iterator[ConfigIssue]:
        folder = trainer.run_dir
        real = Path(os.path.realpath(folder))
        if str(real) in SHARED_FOLDERS or any(real.is_relative_to(p) for p in SYSTEM_FOLDERS):
            why = f"a run would write into the system's folder {real}"
            yield ConfigIssue(key, value, why, "give a folder of the run's own")
        elif folder.exists() and not folder.is_dir():
            yield ConfigIssue(key, value, "is a file", "give a folder")

    return path_issues(key, value, check)


def _data_file(key: str, name: str) -> Iterator[ConfigIssue]:
    path = Path(name)
    if is_data_set(name):
        fix = "download its files, and name them"
        yield ConfigIssue(key, name, "data sets are not downloaded by this program", fix)
    elif not path.exists():
        yield ConfigIssue(key, name, "no such file", "give the path of a readable file")
    elif not path.is_file():
        yield ConfigIssue(key, name, "is not a file", "give the files in it")
    elif path.suffix not in DATA_ENDINGS:
        yield ConfigIssue(key, name, "unknown file type", f"use {DATA_FORMS}")
    elif path.stat().st_size == 0:
        yield ConfigIssue(key, name, "the file is empty", "give a file with rows")
    elif is_lfs_pointer(path):
        yield ConfigIssue(key, name, LFS_POINTER, LFS_FIX)


def _python_file(key: str, name: str | None) -> Iterator[ConfigIssue]:
    source = (name or "").rpartition(":")[0]
    if source.endswith(".py") and not Path(source).is_file():
        yield ConfigIssue(key, name, f"no such file {source}", "correct the path")
