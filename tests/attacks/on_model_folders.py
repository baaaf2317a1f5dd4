"""Attacks on model folders and data files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attacks.attack import Attack, Table
from attacks.inputs import (
    DEEP,
    LONG,
    MODEL,
    RUN,
    Prepare,
    a_socket,
    config,
    convert,
    dry_run_of_the_model,
    entry,
    evaluate,
    fifo,
    folder_there,
    index,
    instead,
    link,
    model,
    sparse,
    to_megatron,
    train,
    weights,
    with_tokenizer,
    write,
    zeros,
)

OUTSIDE = "../../outside/precious.txt"
MADE = ("recipe.yaml",)
LOOPS = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
DOUBLES = (
    "{% set n = namespace(x='aa') %}{% for i in range(50) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
)


def _config(given: str, says: str, **changes: Any) -> Attack:
    return Attack(given, prepare=config(**changes), run=dry_run_of_the_model, says=says)


def _config_text(given: str, text: str | bytes, says: str) -> Attack:
    def prepare(folder: Path) -> None:
        write(folder / "model/config.json", text)

    return Attack(given, prepare=prepare, run=dry_run_of_the_model, says=says)


def _config_file(given: str, make: Callable[[Path], None], says: str) -> Attack:
    prepare = instead("model/config.json", make)
    return Attack(given, prepare=prepare, run=dry_run_of_the_model, says=says)


def _converted(given: str, prepare: Prepare, says: str) -> Attack:
    return Attack(given, prepare=prepare, run=to_megatron, says=says)


def _beside(name: str, make: Callable[[Path], None]) -> Prepare:
    """A model folder with one file replaced."""

    def prepare(folder: Path) -> None:
        config()(folder)
        instead(f"model/{name}", make)(folder)

    return prepare


def _evaluate_the_model(folder: Path) -> int:
    return evaluate(*MODEL, "data.max_prompt_length=32")


def _train_the_model(folder: Path) -> int:
    return train(*RUN, "model.path=model", f"trainer.default_local_dir={folder}/run")


def _template(given: str, template: str, says: str) -> Attack:
    def spoil(where: Path) -> None:
        write(where / "chat_template.jinja", template)

    prepare = with_tokenizer(spoil)
    return Attack(given, _evaluate_the_model, says, within_s=60.0, prepare=prepare, writes=MADE)


def _tokenizer(given: str, name: str, content: str, says: str) -> Attack:
    def spoil(where: Path) -> None:
        write(where / name, content)

    return Attack(given, _evaluate_the_model, says, prepare=with_tokenizer(spoil), writes=MADE)


def _more_tokens(where: Path) -> None:
    """Tokens such as "1+" behind the model's vocabulary."""
    file = where / "tokenizer.json"
    content = json.loads(file.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    size = len(content["model"]["vocab"])
    for number, digit in enumerate("0123456789"):
        content["added_tokens"].append({"id": size + number, "content": f"{digit}+", **flags})
    write(file, json.dumps(content))


def _stages(given: str, stages: dict[str, Any], says: str) -> Attack:
    """A tokenizer with other stages."""

    def spoil(where: Path) -> None:
        file = where / "tokenizer.json"
        write(file, json.dumps(json.loads(file.read_text()) | stages))

    return Attack(given, _evaluate_the_model, says, prepare=with_tokenizer(spoil), writes=MADE)


def _evaluate_rows(folder: Path) -> int:
    found = next(folder.glob("rows.*"))
    files = (f"data.train_files={found.name}", f"data.val_files={found.name}")
    return evaluate("model.path=builtin:tiny", *files)


def _rows(given: str, line: str | bytes, says: str) -> Attack:
    def prepare(folder: Path) -> None:
        write(folder / "rows.jsonl", line)

    return Attack(given, _evaluate_rows, says, prepare=prepare, writes=MADE)


def _rows_file(given: str, name: str, make: Callable[[Path], None], says: str) -> Attack:
    return Attack(given, _evaluate_rows, says, prepare=instead(name, make), writes=MADE)


def _cut_parquet(file: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1+1="], "answer": ["2"]}), file)
    data = file.read_bytes()
    file.write_bytes(data[:4] + bytes(len(data) - 12) + data[-8:])


def _repeated(file: Path, count: int, in_one_row: bool) -> None:
    import pyarrow
    import pyarrow.parquet

    numbers = pyarrow.array([0] * count, pyarrow.int32())
    texts = pyarrow.DictionaryArray.from_arrays(numbers, ["x" * 1_000_000])
    column = pyarrow.ListArray.from_arrays([0, count], texts) if in_one_row else texts
    table = pyarrow.table({"prompt": column})
    pyarrow.parquet.write_table(table, file, compression="zstd", store_schema=False)


def _repeated_text(file: Path) -> None:
    _repeated(file, 20_000, in_one_row=False)


def _repeated_in_a_list(file: Path) -> None:
    _repeated(file, 100_000, in_one_row=True)


def _serve(folder: Path) -> int:
    from mppo.serve import main

    os.environ["MPPO_ROLLOUT_API_KEY"] = "key"
    write(folder / "recipe.yaml", "")
    address = ("--empty", "--host", "127.0.0.1", "--port", "1")
    return main(["--config", "recipe.yaml", *address, "model.path=model", "model.dtype=float32"])


def _preflight(folder: Path) -> int:
    from mppo.preflight import main

    write(folder / "recipe.yaml", "")
    return main(["recipe", "--config", "recipe.yaml", "--world-size", "1", *MODEL])


def _inspect(folder: Path) -> int:
    return convert("inspect", "model")


CONFIGS = (
    _config("10^9 layers", "num_hidden_layers = 1000000000", num_hidden_layers=10**9),
    _config("a vocabulary of 10^12", "vocab_size = 1000000000000", vocab_size=10**12),
    _config("a negative width", "hidden_size = -1", hidden_size=-1),
    _config("no heads", "num_attention_heads = 0", num_attention_heads=0),
    _config("a width that is a string", "hidden_size = '64'", hidden_size="64"),
    _config("a width that is a fraction", "intermediate_size = 8.5", intermediate_size=8.5),
    _config(
        "8192 experts in each of 1000 layers",
        "too many",
        model_type="qwen3_moe",
        num_hidden_layers=1000,
        num_experts=8192,
    ),
    _config("a model type that is a list", "model_type = ['qwen2']", model_type=["qwen2"]),
    _config("rotary settings that are a string", "rope_parameters", rope_parameters="yarn"),
    _config("an end token that is a string", "eos_token_id", eos_token_id="<eos>"),
    _config(
        "custom code",
        "trust_remote_code",
        model_type="mine",
        auto_map={"AutoConfig": "configuration.Mine"},
    ),
    _config_text("NaN in config.json", '{"rms_norm_eps": NaN}', "NaN is not JSON"),
    _config_text("500 levels in config.json", f'{{"x": {DEEP}}}', "levels deep"),
    _config_text("5000 digits in config.json", f'{{"vocab_size": {LONG}}}', "4300 digits"),
    _config_text("a key twice in config.json", '{"a": 1, "a": 2}', "'a' occurs twice"),
    _config_text("a list as config.json", "[]", "not an object"),
    _config_text("invalid UTF-8 as config.json", b"\xff{}", "not UTF-8"),
    _config_file("a FIFO as config.json", fifo, "no config.json"),
    _config_file("a folder as config.json", folder_there, "no config.json"),
    _config_file("a terabyte as config.json", sparse, "bytes, more than"),
)
"""Rows on the configuration; ``--dry-run`` reads nothing else."""

WEIGHTS = (
    _converted("an index with ..", model(index("../other.safetensors")), "leads out of the folder"),
    _converted("an index with /", model(index("/etc/passwd")), "leads out of the folder"),
    _converted("an index with a number", model(index(7)), "unreadable index"),
    _converted(
        "an index whose file is a link out of the folder",
        model(
            lambda where: (
                index("a.safetensors")(where),
                (where / "a.safetensors").symlink_to("../../outside/a.safetensors"),
            )
        ),
        "outside the folder",
    ),
    _converted("a FIFO as index", _beside("model.safetensors.index.json", fifo), "is a FIFO"),
    _converted("a FIFO as weights", _beside("model.safetensors", fifo), "is a FIFO"),
    _converted("a socket as weights", _beside("model.safetensors", a_socket), "is a socket"),
    _converted(
        "weights that are a link to /dev/zero", _beside("model.safetensors", zeros), "is a device"
    ),
    _converted(
        "a link to a text file outside the folder",
        model(lambda where: link(OUTSIDE)(where / "notes.txt")),
        "outside the folder",
    ),
    _converted("a header longer than its file", weights({}, length=1 << 40), "cut short"),
    _converted("a header that is not JSON", weights(b"{]"), "unreadable safetensors header"),
    _converted("a header that is a list", weights([]), "not an object"),
    _converted("500 levels in a header", weights(f'{{"a": {DEEP}}}'.encode()), "levels deep"),
    _converted(
        "a name twice in a header",
        weights(f'{{"a": {json.dumps(entry())}, "a": {json.dumps(entry(16, 32))}}}'.encode()),
        "'a' occurs twice",
    ),
    _converted("an entry that is a number", weights({"a": 1}), "a has shape None"),
    _converted("an unknown dtype", weights({"a": entry(dtype="F31")}), "has dtype F31"),
    _converted("a dtype that is a list", weights({"a": entry(dtype=["F32"])}), "has dtype"),
    _converted("an offset before the file", weights({"a": entry(-16, 0)}), "not integers"),
    _converted("an offset of 2^64", weights({"a": entry(0, 1 << 64)}), "not integers"),
    _converted("a negative size", weights({"a": entry(shape=(-2, -2))}), "not integers"),
    _converted(
        "a shape of 2^40 times 2^40",
        weights({"a": entry(shape=(1 << 40, 1 << 40))}),
        "has 16 bytes",
    ),
    _converted("a shape of 1000 ones", weights({"a": entry(shape=(1,) * 1000)}), "not integers"),
    _converted("a shape that its bytes do not fit", weights({"a": entry(0, 8)}), "need 16"),
    _converted(
        "two tensors in the same bytes",
        weights({"a": entry(), "b": entry(8, 24)}),
        "overlaps another tensor",
    ),
    _converted("a tensor beyond the file's end", weights({"a": entry(64, 80)}), "cut short"),
    Attack(
        "weights of a different width than in config.json, at the start of a run",
        prepare=model(lambda where: config(hidden_size=16)(where.parent)),
        run=lambda folder: train(*MODEL),
        says="they do not belong together",
    ),
    Attack(
        "the same in mppo.preflight",
        prepare=model(lambda where: config(hidden_size=16)(where.parent)),
        run=_preflight,
        says="they do not belong together",
        writes=MADE,
    ),
    Attack(
        "two tensors in the same bytes, in mppo-convert inspect",
        prepare=weights({"a": entry(), "b": entry(8, 24)}),
        run=_inspect,
        says="overlaps another tensor",
    ),
    Attack(
        "10^9 layers in mppo.serve",
        prepare=config(num_hidden_layers=10**9),
        run=_serve,
        says="num_hidden_layers = 1000000000",
        writes=MADE,
    ),
    Attack(
        "a FIFO among a model's files in mppo/evaluate.py",
        prepare=model(lambda where: fifo(where / "generation_config.json")),
        run=_evaluate_the_model,
        says="is a FIFO",
        writes=MADE,
    ),
)
"""Rows on weights."""

TEXTS = (
    _template("a chat template that loops", LOOPS, "takes more than"),
    _template("a chat template that doubles a text", DOUBLES, "MemoryError"),
    _template("a chat template that calls itself", "{% macro a() %}{{ a() }}{% endmacro %}"
              "{{ a() }}", "RecursionError"),
    _template("a chat template that writes 90 MB", "{{ '%90000000d' % 1 }}", "90000000 characters"),
    _template("a chat template that searches for Python classes",
              "{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    _tokenizer("500 levels in tokenizer.json", "tokenizer.json", f'{{"x": {DEEP}}}', "levels deep"),
    _tokenizer("a list as tokenizer_config.json", "tokenizer_config.json", "[]", "not an object"),
    Attack("a tokenizer with tokens that the model does not have", _evaluate_the_model,
           "a prompt has the token id", prepare=with_tokenizer(_more_tokens), writes=MADE),
    Attack("a tokenizer with tokens that the trained model does not have", _train_the_model,
           "a prompt has the token id", prepare=with_tokenizer(_more_tokens), writes=("run/*",)),
    _stages("normalisers that multiply", {"normalizer": {"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"String": "1"}, "content": "1" * 40}] * 4}}, "of one, "),
    _stages("a post-processor of 200,000 tokens", {"post_processor": {
        "type": "TemplateProcessing", "pair": [], "special_tokens": {},
        "single": [{"SpecialToken": {"id": "<eos>", "type_id": 0}}] * 200_000}},
        "adds 200000 tokens"),
    _rows("500 levels in a row", f'{{"prompt": {DEEP}, "answer": "2"}}', "levels deep"),
    _rows("5000 digits in a row", f'{{"prompt": "1+1=", "answer": {LONG}}}', "4300 digits"),
    _rows("NaN in a row", '{"prompt": "1+1=", "answer": NaN}', "NaN is not JSON"),
    _rows("half a surrogate pair in a row", '{"prompt": "\\ud800", "answer": "2"}', "surrogate"),
    _rows("invalid UTF-8 in a row", b'{"prompt": "\xff"}', "not UTF-8 at byte 13"),
    _rows("numbers as messages", '{"prompt": [1], "answer": "2"}', "a message under"),
    _rows_file("a FIFO as data", "rows.jsonl", fifo, "is not a file"),
    _rows_file("data that are a link to /dev/zero", "rows.jsonl", zeros, "is not a file"),
    _rows_file("a terabyte without a line break", "rows.jsonl", sparse, "line 1 has"),
    _rows_file("a terabyte of a JSON list", "rows.json", sparse, "bytes, more than"),
    _rows_file("a parquet file of a kilobyte with 20 GB of one text", "rows.parquet",
               _repeated_text, "its rows have"),
    _rows_file("a parquet file of a row with 100 GB of one text in a list", "rows.parquet",
               _repeated_in_a_list, "its rows have"),
    _rows_file("a parquet file with its table erased", "rows.parquet", _cut_parquet,
               "not a usable parquet file"),
)  # fmt: skip
"""Rows on tokenizers, chat templates and data; evaluated, since they do not need a model."""

TABLE = Table(
    "Model folders and data",
    "Sizes, headers and paths are checked before anything is read or built from them; no file is "
    "opened that could block its reader; a chat template runs in a process with limits.",
    (*CONFIGS, *WEIGHTS, *TEXTS),
)
