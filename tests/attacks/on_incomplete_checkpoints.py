"""Attacks on checkpoints that lack numbers of a model, or hold them twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attacks.attack import Attack, Table
from attacks.inputs import RUN, convert, steps, train, with_tokenizer, write
from attacks.on_checkpoints import change_table, resumed

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
MOMENT = f"optimizer.state.exp_avg.{EMBEDDING}"
Change = Callable[[Any], Any]


def _model(given: str, spoil: Callable[[Path], None], says: str) -> Attack:
    """A run on a checkpoint ``out`` with tokenizer and config.json, changed."""

    def prepare(folder: Path) -> None:
        with_tokenizer()(folder)
        assert convert("hf-to-megatron", "--hf", "model", "--megatron", "out") == 0
        spoil(folder / "out")

    def run(folder: Path) -> int:
        options = ("model.path=out", "trainer.default_local_dir=second", *steps(1))
        return train(*RUN, *options)

    return Attack(given, run, says, prepare=prepare)


def _release(change: Change) -> Callable[[Path], None]:
    return lambda out: change_table(out / "release/.metadata", change)


def _actor(change: Change) -> Callable[[Path], None]:
    return lambda step: change_table(step / "actor/.metadata", change)


def _bigger_vocabulary(out: Path) -> None:
    """More rows in config.json than in the table."""
    file = out / "hf/config.json"
    config = json.loads(file.read_text())
    write(file, json.dumps(config | {"vocab_size": config["vocab_size"] + 40}))


def _no_chunk(key: str) -> Change:
    return lambda contents: contents.state_dict_metadata[key].chunks.clear()


def _overlap(key: str) -> Change:
    """Replace a tensor's chunk by two of half the rows each that share one row."""

    def change(contents: Any) -> None:
        entry = contents.state_dict_metadata[key]
        (chunk,) = entry.chunks
        place = next(p for i, p in contents.storage_data.items() if i.fqn == key)
        size, box, index = type(chunk.sizes), type(chunk), type(next(iter(contents.storage_data)))
        rows, columns = chunk.sizes
        entry.chunks = [
            box(size((first, 0)), size((rows // 2, columns))) for first in (0, rows // 2 - 1)
        ]
        for part in entry.chunks:
            contents.storage_data[index(key, part.offsets)] = place

    return change


TABLE = Table(
    "Incomplete checkpoints",
    "Every number of every tensor that a run reads is in exactly one chunk, for the weights of a "
    "model, for a checkpoint to resume and for its optimizer's state; otherwise the run does not "
    "start.",
    (
        _model("more rows of the vocabulary in config.json than in the checkpoint",
               _bigger_vocabulary, "config.json says"),
        _model("an embedding without its chunk", _release(_no_chunk(EMBEDDING)),
               f"{EMBEDDING}: its chunks hold 0 of"),
        _model("an output layer without its chunk", _release(_no_chunk(OUTPUT)),
               f"{OUTPUT}: its chunks hold 0 of"),
        _model("two chunks that share a row, and so lack one", _release(_overlap(EMBEDDING)),
               f"{EMBEDDING}: its chunks overlap"),
        resumed("a checkpoint to resume whose embedding lacks its chunk",
                _actor(_no_chunk(EMBEDDING)), f"{EMBEDDING}: its chunks hold 0 of"),
        resumed("a checkpoint to resume whose embedding's moment lacks its chunk",
                _actor(_no_chunk(MOMENT)), f"{MOMENT}: its chunks hold 0 of"),
    ),
)  # fmt: skip
