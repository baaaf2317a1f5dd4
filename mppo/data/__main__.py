"""``python -m mppo.data prepare NAME --from DIR --out DIR``: data sets in verl's schema."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mppo.data.prepare import DATA_SETS, prepare_rows
from mppo.recipe.errors import ConfigError, config_error
from mppo.safety.foreign_text import json_line
from mppo.safety.temporary import unfinished_folder

FORMATS = ("parquet", "jsonl")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, or 2 with a message if the files cannot be prepared."""
    parser = argparse.ArgumentParser(prog="python -m mppo.data", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("prepare", help="write a known data set in verl's schema")
    command.add_argument("name", choices=tuple(DATA_SETS))
    command.add_argument("--from", dest="source", required=True, help="folder of its files")
    command.add_argument("--out", required=True, help="new or empty folder")
    command.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="of the output")
    options = parser.parse_args(arguments)
    try:
        written = _prepare(options)
    except ConfigError as error:
        print(f"mppo: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"mppo: {error}; give folders that can be read and written", file=sys.stderr)
        return 2
    for line in written:
        print(line)
    return 0


def _prepare(options: argparse.Namespace) -> list[str]:
    out = Path(options.out).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        why, fix = "is not an empty folder", "name a new folder"
        raise config_error("--out", options.out, why, fix, source="prepare")
    write = _write_parquet() if options.format == "parquet" else _write_jsonl
    rows, remarks = prepare_rows(options.name, Path(options.source).expanduser())
    out.parent.mkdir(parents=True, exist_ok=True)
    with unfinished_folder(out.parent) as unfinished:
        for split, content in rows.items():
            write(content, unfinished / f"{split}.{options.format}")
        unfinished.chmod(0o755)
        unfinished.replace(out)
    files = [f"{out / split}.{options.format}: {len(rows[split])} rows" for split in rows]
    return [*files, *remarks]


def _write_jsonl(rows: list[dict[str, Any]], path: Path) -> None:
    with path.open("w") as stream:
        for row in rows:
            stream.write(json_line(row) + "\n")


def _write_parquet() -> Any:
    """Return the function that writes parquet, before anything is read."""
    try:
        pyarrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        why, fix = "needs the package pyarrow", 'pip install "mppo[parquet]", or --format jsonl'
        raise config_error("--format", "parquet", why, fix, source="prepare") from error
    return lambda rows, path: parquet.write_table(pyarrow.Table.from_pylist(rows), path)


if __name__ == "__main__":
    sys.exit(main())
