"""Turn the command of another system into a recipe.

    mppo-migrate verl|trl|openrlhf|deepspeed-chat [ARGUMENT ...] < command.sh > recipe.yaml

The command is read, never run. If it shards weights by FSDP or DeepSpeed, tensor and pipeline
parallelism are chosen that fit its GPUs; the models' config.json must be on this machine, or in
./configs/NAME. ARGUMENTs are the script's own: $1, $2 and $@ in it. The recipe says
in comments which flags have no counterpart, and why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mppo.safety.foreign_text import visible
from mppo.safety.input_files import read_text
from mppo.safety.redact import redacted_output
from mppo_migrate import deepspeed_chat, openrlhf, trl
from mppo_migrate.layout import choose_layout
from mppo_migrate.migration import complete, migrate_flags
from mppo_migrate.shell import read_commands
from mppo_migrate.verl import migrate_settings
from mppo_migrate.versions import explained
from mppo_migrate.writer import recipe_text

MAX_SCRIPT_BYTES = 1 << 18
SYSTEMS = {
    "trl": trl.SYSTEM,
    "openrlhf": openrlhf.SYSTEM,
    "deepspeed-chat": deepspeed_chat.SYSTEM,
}
"""Systems whose commands have ``--flags``."""


@redacted_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Read a command from stdin and print a recipe; exit code 2 if there is no such command."""
    arguments = _parser().parse_args(argv)
    try:
        text = _read_input()
        recipe, remarks = migrate(
            arguments.system, text, arguments.arguments, arguments.ranks, arguments.gpu
        )
    except ValueError as error:
        print(f"mppo-migrate {arguments.system}: {visible(str(error))}", file=sys.stderr)
        return 2
    for line in recipe.splitlines(keepends=True):  # redacted by line, as it was compared
        sys.stdout.write(line)
    for remark in remarks:
        print(f"mppo-migrate: {visible(remark)}", file=sys.stderr)
    return 0


def migrate(
    system: str,
    text: str,
    arguments: Sequence[str] = (),
    ranks: int | None = None,
    gpu: str | None = None,
) -> tuple[str, list[str]]:
    """The recipe for a command.

    Args:
        system: ``verl``, ``trl``, ``openrlhf`` or ``deepspeed-chat``.
        text: the command, or a script with it.
        arguments: of the script.
        ranks: processes of the command; None: what it says itself.
        gpu: the GPU for which a layout is chosen; None: that of the dry run.

    Returns:
        The recipe's text, and lines for the user: flags that are not known, things to check.

    Raises:
        ValueError: the text is not a script, or has no command of the system.
    """
    remarks: list[str] = []
    commands = read_commands(text, arguments, _read_script, remarks)
    if system == "verl":
        result = migrate_settings(commands)
    else:
        result = migrate_flags(SYSTEMS[system], commands, ranks)
    complete(result)
    choose_layout(result, gpu)
    title = "verl" if system == "verl" else SYSTEMS[system].title
    if result.foreign:
        remarks.append(explained(title, result.names, result.foreign))
    result.checks = [*remarks, *result.checks]
    return recipe_text(result, title), [*result.checks, *result.unknown]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mppo-migrate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("system", choices=("verl", *SYSTEMS))
    ranks = "processes (GPUs) of the command; default: what it says itself"
    parser.add_argument("--ranks", type=int, help=ranks)
    gpu = "GPU whose memory the layout fits, by name or GiB; default: that of mppo-plan"
    parser.add_argument("--gpu", help=gpu)
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="of the script: $1, $2")
    return parser


def _read_input() -> str:
    """The text on stdin. Raises ValueError if it is not text, or too long."""
    data = sys.stdin.buffer.read(MAX_SCRIPT_BYTES + 1)
    if len(data) > MAX_SCRIPT_BYTES:
        raise ValueError(f"stdin has more than {MAX_SCRIPT_BYTES} bytes; give only the command")
    if b"\0" in data:
        raise ValueError("stdin is not text: it has a NUL character")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"stdin is not UTF-8 text ({error.reason})") from error


def _read_script(name: str) -> str | None:
    try:
        return read_text(Path(name), MAX_SCRIPT_BYTES)
    except (OSError, ValueError):
        return None


if __name__ == "__main__":
    sys.exit(main())
