"""Convert Hugging Face folders to Megatron checkpoints and back, and verify the result.

    python -m checkpoints_convert hf-to-megatron --hf DIR --megatron DIR
    python -m checkpoints_convert megatron-to-hf --megatron DIR --hf DIR
    python -m checkpoints_convert verify --hf DIR --megatron DIR [--logits] [--checksums]
    python -m checkpoints_convert inspect DIR

Runs in one process, or in N that share the work: ``torchrun --nproc-per-node N -m
checkpoints_convert ...`` or ``mpirun -n N python -m checkpoints_convert ...``. Needs no GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mppo.parallel.launch import discover, keep_imports, prepare_imports
from mppo.recipe.errors import printable
from mppo.recipe.sections.registered import load_plugin_files
from mppo.safety.redact import redacted_output

if TYPE_CHECKING:
    from checkpoints_convert.job import Ranks

DTYPES = ("bfloat16", "float16", "float32")
_READ = {"hf-to-megatron": ["hf"], "megatron-to-hf": ["megatron"], "verify": ["hf", "megatron"],
         "inspect": ["path"]}  # fmt: skip
"""Folders that a command reads."""
BARRIER_TIMEOUT_S = 24 * 3600.0


@redacted_output()
def main(argv: list[str] | None = None) -> int:
    """Run the tool; exit status 0, 1 if verification found differences, 2 for invalid input or a
    disk error."""
    arguments = _parser().parse_args(argv)
    for folder in (getattr(arguments, name) for name in _READ[arguments.command]):
        if not folder.exists():
            where = printable(str(folder))
            print(f"error: there is no folder {where}: correct the path", file=sys.stderr)
            return 2
    os.environ.setdefault("MPPO_DEVICE", "cpu")
    prepare_imports()
    from checkpoints_convert.job import Ranks  # here: --help does not need torch
    from mppo.parallel.process_group import process_group
    from mppo.supervision.rank_guard import RankGuard

    try:
        load_plugin_files(arguments.plugin)
        info = discover()
        guard = RankGuard(info)
        if info.world_size == 1:
            return _run(arguments, Ranks())
        with process_group(info, BARRIER_TIMEOUT_S):
            guard.met()
            return _run(arguments, Ranks(info.rank, info.world_size))
    except (ValueError, OSError) as error:
        print(f"error: {printable(str(error))}", file=sys.stderr, flush=True)
        return 2


def _run(arguments: argparse.Namespace, ranks: Ranks) -> int:
    import torch

    from checkpoints_convert.commands import hf_to_megatron, inspect, megatron_to_hf

    keep_imports()
    command, dtype_name = arguments.command, getattr(arguments, "dtype", None)
    dtype = None if dtype_name is None else getattr(torch, dtype_name)
    status = 0
    if command == "hf-to-megatron":
        report = hf_to_megatron(
            arguments.hf, arguments.megatron, ranks, dtype, arguments.keep_extra,
            not arguments.no_tokenizer,
        )  # fmt: skip
    elif command == "megatron-to-hf":
        report = megatron_to_hf(
            arguments.megatron, arguments.hf, ranks, arguments.config, dtype,
            int(arguments.max_shard_gb * 1e9),
        )  # fmt: skip
    elif command == "verify":
        from checkpoints_convert.verify import verify

        status, report = verify(
            arguments.hf, arguments.megatron, ranks, arguments.logits, arguments.checksums
        )
    else:
        report = inspect(arguments.path)
    if ranks.rank == 0:
        print(report, flush=True)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mppo-convert", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    to_megatron = commands.add_parser("hf-to-megatron", help="Hugging Face folder to torch_dist")
    to_hf = commands.add_parser("megatron-to-hf", help="torch_dist to Hugging Face folder")
    verify = commands.add_parser("verify", help="compare the two, tensor by tensor")
    for command in (to_megatron, to_hf, verify):
        command.add_argument("--hf", type=Path, required=True, help="Hugging Face folder")
        command.add_argument("--megatron", type=Path, required=True, help="Megatron checkpoint")
    for command in (to_megatron, to_hf):
        command.add_argument(
            "--dtype", choices=DTYPES, help="cast weights to this (default: do not cast)"
        )
    to_megatron.add_argument(
        "--keep-extra", action="store_true",
        help="store multi-token-prediction layers separately, to restore them on the way back",
    )  # fmt: skip
    to_megatron.add_argument(
        "--no-tokenizer", action="store_true", help="accept a folder without a tokenizer"
    )
    to_hf.add_argument(
        "--config", type=Path, help="folder with config.json and tokenizer (default: DIR/hf)"
    )
    to_hf.add_argument(
        "--max-shard-gb", type=float, default=5.0, help="largest safetensors file (default 5)"
    )
    verify.add_argument(
        "--logits", action="store_true", help="also run both models and compare their logits"
    )
    verify.add_argument("--checksums", action="store_true", help="print a checksum per tensor")
    inspect_ = commands.add_parser("inspect", help="list what a folder holds")
    inspect_.add_argument("path", type=Path)
    for command in commands.choices.values():
        command.add_argument(
            "--plugin", action="append", default=[], metavar="FILE",
            help="a Python file that adds the model's family (docs/adding_a_family.md)",
        )  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
