"""Attacks on checkpoints and run folders."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attacks.attack import Attack, Table, nothing
from attacks.inputs import (
    DEEP,
    LONG,
    RUN,
    TASK,
    Prepare,
    convert,
    fifo,
    instead,
    model,
    steps,
    to_megatron,
    train,
    write,
    zeros,
)

STEP = Path("first/checkpoints/global_step_1")
MADE = ("second*", "recipe.yaml")


class Done:
    """An object whose unpickling creates a file outside the folder."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("../outside/done",)


def change_table(file: Path, change: Callable[[Any], Any]) -> None:
    """Replace a table of contents."""
    contents = pickle.loads(file.read_bytes())
    contents = change(contents) or contents
    file.write_bytes(pickle.dumps(contents))


def _checkpoint(spoil: Callable[[Path], None]) -> Prepare:
    """A checkpoint ``out`` of a model, in its folder ``release``, then changed."""

    def prepare(folder: Path) -> None:
        model()(folder)
        assert to_megatron(folder) == 0
        spoil(folder / "out")

    return prepare


def _inspect(folder: Path) -> int:
    return convert("inspect", "out")


def _to_hf(folder: Path) -> int:
    return convert("megatron-to-hf", "--megatron", "out", "--hf", "back")


def _as_model(folder: Path) -> int:
    return train(*TASK, "model.path=out")


def _table(given: str, change: Callable[[Any], Any], says: str) -> Attack:
    prepare = _checkpoint(lambda out: change_table(out / "release/.metadata", change))
    return Attack(given, _inspect, says, prepare=prepare)


def _file(
    given: str, name: str, make: Callable[[Path], None], says: str, run: Callable = _inspect
) -> Attack:
    return Attack(given, run, says, prepare=_checkpoint(instead(name, make)))


def _text(given: str, name: str, text: str | bytes, says: str, run: Callable = _inspect) -> Attack:
    return Attack(given, run, says, prepare=_checkpoint(lambda out: write(out / name, text)))


def run_and(spoil: Callable[[Path], None]) -> Prepare:
    """The run ``first`` after one step, with a changed checkpoint and correct checksums."""

    def prepare(folder: Path) -> None:
        from mppo.checkpoint.folder import manifest_bytes

        kept = Path(os.environ["MPPO_CACHE"]) / "attacked-run"
        if not kept.exists():
            assert train(*RUN, f"trainer.default_local_dir={kept}.new", *steps(1)) == 0
            Path(f"{kept}.new").rename(kept)
        shutil.copytree(kept, folder / "first")
        step = folder / STEP
        spoil(step)
        manifest = json.loads((step / "manifest.json").read_text())
        for file in step.rglob("*"):
            name = str(file.relative_to(step))
            if name in manifest["files"]:
                data = file.read_bytes() if file.is_file() else b""
                manifest["files"][name] = {"size": len(data), "crc32": zlib.crc32(data)}
        (step / "manifest.json").write_bytes(manifest_bytes(manifest))

    return prepare


def _resume(folder: Path, *options: str) -> int:
    where = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder / STEP}")
    return train(*RUN, "trainer.default_local_dir=second", *steps(1), *where, *options)


def resumed(given: str, spoil: Callable[[Path], None], says: str, code: int = 2) -> Attack:
    return Attack(
        given, _resume, says, code=code, within_s=60.0, prepare=run_and(spoil), writes=MADE
    )


def _start(folder: Path) -> int:
    """Start a tiny run in the folder ``run``."""
    return train(*RUN, f"trainer.default_local_dir={folder}/run")


def _nested(folder: Path) -> None:
    write(folder / "run/recipe.yaml", "[" * 100_000)
    write(folder / "run/status.json", "[" * 100_000)
    write(folder / "run/metrics.jsonl", '{"step": 1}\n')


def _replay(folder: Path) -> int:
    from mppo.replay import main

    return main(["case"])


def _replayed(given: str, spoil: Callable[[Path], None], says: str) -> Attack:
    def prepare(folder: Path) -> None:
        (folder / "case").mkdir()
        spoil(folder / "case")

    return Attack(given, _replay, says, prepare=prepare)


def _first(contents: Any) -> Any:
    """The place of the first chunk."""
    return next(iter(contents.storage_data.values()))


def _tensor(contents: Any) -> Any:
    """The entry of the first tensor."""
    return next(e for e in contents.state_dict_metadata.values() if hasattr(e, "chunks"))


def _an_object(contents: Any) -> tuple[str, Any]:
    """Key and entry of an object that is not a tensor."""
    entries = contents.state_dict_metadata.items()
    return next((key, entry) for key, entry in entries if not hasattr(entry, "chunks"))


def _inject(step: Path, forge: bool) -> None:
    """Make an object of the actor a pickle that runs code; ``forge`` also declares it a tensor."""
    stream = io.BytesIO()
    import torch

    torch.save([Done()], stream)

    def change(contents: Any) -> None:
        key, entry = _an_object(contents)
        if forge:
            entry.chunks = []
        place = next(p for i, p in contents.storage_data.items() if i.fqn == key)
        file = step / "actor" / place.relative_path
        place.offset, place.length = file.stat().st_size, len(stream.getvalue())
        with file.open("ab") as data:
            data.write(stream.getvalue())

    change_table(step / "actor/.metadata", change)


def _set(**values: Any) -> Callable[[Any], None]:
    """Set attributes of the first chunk's place."""
    return lambda contents: vars(_first(contents)).update(values)


def _class_attribute(file: Path) -> None:
    """A pickle that sets an attribute of a torch class."""
    named = b"ctorch.distributed.checkpoint.metadata\nBytesStorageMetadata\n"
    file.write_bytes(b"\x80\x02" + named + b"N}X\x06\x00\x00\x00chunksNs\x86b.")


def _common(out: Path) -> None:
    import torch

    torch.save(Done(), out / "release/common.pt")
    write(out / "release/metadata.json", '{"sharded_backend": "zarr"}')


def _manifest(step: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = step / "manifest.json"
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_text(json.dumps(manifest))


def _with_another_digit(folder: Path) -> None:
    run_and(nothing)(folder)
    file = folder / STEP / "manifest.json"
    file.write_text(file.read_text().replace('"step": 1', '"step": 0'))


def _lose_parts(step: Path) -> None:
    file = step / "run.json"
    state = json.loads(file.read_text())
    del state["parts"]
    file.write_text(json.dumps(state))


def _case_with_code(case: Path) -> None:
    write(case / "case.json", "{}")
    write(case / "models/actor/.metadata", pickle.dumps(Done()))


TABLES = (
    Attack(
        "code as table of contents of a model",
        _as_model,
        "it names posix.mkdir",
        prepare=_checkpoint(lambda out: change_table(out / "release/.metadata", lambda _: Done())),
    ),
    _table("an attribute that is code", lambda c: vars(c).update(version=Done()), "posix.mkdir"),
    _table("an object with chunks", lambda c: vars(_an_object(c)[1]).update(chunks=[]), "'chunks'"),
    _table("a list as table of contents", lambda c: [1], "it holds a list"),
    _table("a key that is a number", lambda c: c.state_dict_metadata.update({1: 2}), "not a text"),
    _table("a size below 0", lambda c: vars(_tensor(c)).update(size=(-1, 2)), "no shape and"),
    _table("an offset below 0", _set(offset=-1), "has no valid byte range"),
    _table("a length beyond the file", _set(length=1 << 40), "cut short"),
    _table("a data file with ..", _set(relative_path="../../x"), "leads out of the folder"),
    _table("/etc/passwd as data file", _set(relative_path="/etc/passwd"), "leads out of the"),
    _table("a compressed chunk", _set(transform_descriptors=["x"]), "is compressed"),
    _file("a change of a torch class", "release/.metadata", _class_attribute, "it sets"),
    _file("a FIFO as table of contents", "release/.metadata", fifo, "is a FIFO"),
    _file("/dev/zero as table of contents", "release/.metadata", zeros, "is a device"),
    _text("an empty table of contents", "release/.metadata", b"", "it is cut short"),
    _text(
        "a tuple nested 300,000 times as key of a table",
        "release/.metadata",
        b"\x80\x02})" + b"\x85" * 300_000 + b"Ns.",
        "no plain keys",
    ),
    _text("an iteration with ..", "latest_checkpointed_iteration.txt", "../x", "leads out of"),
    _text("an iteration of 5000 digits", "latest_checkpointed_iteration.txt", LONG, "more than"),
    _file("a FIFO as iteration", "latest_checkpointed_iteration.txt", fifo, "is a FIFO"),
    _text("10^9 layers beside a checkpoint", "hf/config.json",
          '{"model_type": "qwen2", "num_hidden_layers": 1000000000}', "num_hidden_layers", _to_hf),
    Attack(
        "chunks that are not archives",
        _to_hf,
        "unreadable chunk",
        prepare=_checkpoint(
            lambda out: [
                file.write_bytes(bytes(file.stat().st_size))
                for file in (out / "release").glob("*.distcp")
            ] and None
        ),
    ),
    Attack(
        "another backend, and code in common.pt",
        lambda folder: convert("verify", "--hf", "model", "--megatron", "out", "--logits"),
        "not of a torch_dist checkpoint",
        prepare=_checkpoint(_common),
    ),
)  # fmt: skip

RUNS = (
    resumed("code in an object that is declared a tensor", lambda s: _inject(s, True), "'chunks'"),
    resumed("code in an object that nothing reads", lambda s: _inject(s, False), "resumed from",
             code=0),
    resumed("a checkpoint without its parts", _lose_parts, "it lacks 'parts'"),
    resumed("500 levels in run.json", lambda s: write(s / "run.json", f'{{"x": {DEEP}}}'),
             "levels deep"),
    resumed("a FIFO in a checkpoint", instead("run.json", fifo), "is a FIFO"),
    resumed(
        "a manifest that lists a file outside",
        lambda s: _manifest(s, lambda m: m["files"].update({"../x": {"size": 1, "crc32": 1}})),
        "leads out of the folder",
    ),
    resumed(
        "a step that is a string",
        lambda s: _manifest(s, lambda m: m.update(step="1")),
        "step, world_size or a size in files: wrong type or out of range",
    ),
    Attack(
        "a digit of a manifest changed, which would repeat a step",
        _resume,
        "its checksum differs",
        within_s=60.0,
        prepare=_with_another_digit,
        writes=MADE,
    ),
    Attack(
        "as many other prompts as the checkpoint was trained on",
        lambda folder: _resume(folder, "data.task_kwargs.max_operand=7"),
        "not those that the checkpoint was trained on",
        within_s=60.0,
        prepare=run_and(nothing),
        writes=MADE,
    ),
    _replayed("code in a case to replay", _case_with_code, "it names posix.mkdir"),
    _replayed("a case that is a list", lambda c: write(c / "case.json", "[]"), "not an object"),
    _replayed("500 levels in a case", lambda c: write(c / "case.json", f'{{"x": {DEEP}}}'),
              "levels deep"),
    _replayed("a case without a recipe", lambda c: write(c / "case.json", "{}"), "cannot be"),
)  # fmt: skip

RUN_FOLDERS = (
    Attack(
        "a FIFO as a run's metrics file",
        prepare=instead("run/metrics.jsonl", fifo),
        run=_start,
        says="run/metrics.jsonl is not a file",
        within_s=60.0,
        writes=("run/.lock",),
    ),
    Attack(
        "results beside a recipe and a status of 100,000 brackets",
        prepare=_nested,
        run=_start,
        says="recipe.yaml is missing or cannot be read",
        within_s=60.0,
        writes=("run/.lock",),
    ),
)

TABLE = Table(
    "Checkpoints and run folders",
    "No part of a checkpoint is unpickled: its table of contents is parsed as data and checked "
    "entry by entry before torch gets it. A start checks the complete run folder before it writes; "
    "a refused start does not change the folder.",
    (*TABLES, *RUNS, *RUN_FOLDERS),
)
