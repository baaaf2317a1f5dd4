"""``mppo-inspect``: the dumped sequences of a run, and one of them token by token."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mppo.dumps.step_dump import UNREADABLE, StepDump, dumped_steps, read_header_of, stale_dumps
from mppo.safety.foreign_text import visible
from mppo.safety.redact import redacted_output

_ROWS = 1000
"""Most rows of a table: rich needs milliseconds for each."""


@redacted_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Print a table; exit code 2 for a folder without dumps."""
    parser = argparse.ArgumentParser(
        prog="mppo-inspect",
        description="Show the responses of a run with trainer.dump_rollouts: all of a step, or one "
        "token by token.",
    )
    parser.add_argument("folder", type=Path, help="run folder, its rollouts, or one step_N")
    parser.add_argument("--step", type=int, help="the PPO step (default: the last dumped)")
    parser.add_argument("--sequence", type=int, help="index of a sequence: show its tokens")
    parser.add_argument(
        "--stale", action="store_true", help="show dumps of lost work too, which are marked stale"
    )
    parser.add_argument("--first", type=int, default=0, help="first row of the table (default: 0)")
    most = f"most rows of the table (default: {_ROWS})"
    parser.add_argument("--rows", type=int, default=_ROWS, help=most)
    chosen = parser.parse_args(argv)
    if chosen.first < 0 or chosen.rows < 1:
        given = f"--first {chosen.first} --rows {chosen.rows}"
        parser.error(f"{given}: rows count from 0, show 1 or more")
    shown = slice(chosen.first, chosen.first + chosen.rows)
    step, folder, stale = _chosen_step(parser, chosen.folder, chosen.step, chosen.stale)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    try:
        header = read_header_of(folder)
        if chosen.sequence is None:
            console.print(_sequences(header, stale, shown))
            _say_rest(len(header.rows), shown)
            return 0
        if not 0 <= chosen.sequence < len(header.rows):
            last = len(header.rows) - 1
            parser.error(f"--sequence {chosen.sequence}: step {step} has the sequences 0 to {last}")
        table, count = _tokens(folder, header, chosen.sequence, stale, shown)
        console.print(table)
        _say_rest(count, shown)
    except UNREADABLE as error:
        why = visible(" ".join(str(error).split())) or type(error).__name__
        print(f"mppo: {folder}: the dump cannot be read: {why}", file=sys.stderr)
        return 2
    return 0


def _say_rest(count: int, shown: slice) -> None:
    if count > shown.stop:
        more = f"add --first {shown.stop} to see the next"
        print(f"mppo: {count} rows; {more}", file=sys.stderr)


def _chosen_step(
    parser: argparse.ArgumentParser, path: Path, step: int | None, with_stale: bool
) -> tuple[int, Path, str]:
    """The step to show, its folder, and words for a title if it is stale; exits without a step."""
    steps, stale = dumped_steps(path), stale_dumps(path)
    if with_stale:
        steps = dict(sorted({**steps, **{n: folder for n, (folder, _) in stale.items()}}.items()))
    elif stale:
        (_, why), numbers = stale[max(stale)], ", ".join(map(str, stale))
        print(f"mppo: left out, stale: step {numbers} ({why}); see --stale", file=sys.stderr)
    if not steps and stale:
        parser.error(f"{path} holds only stale dumps; add --stale to see them")
    if not steps:
        parser.error(
            f"{path} holds no dumped step; give the folder of a run with "
            "trainer.dump_rollouts: true"
        )
    step = max(steps) if step is None else step
    if step not in steps:
        fix = "; add --stale to see this step" if step in stale else ""
        parser.error(f"--step {step}: the dumped steps are {_ranges(list(steps))}{fix}")
    return step, steps[step], f", stale: {stale[step][1]}" if step in stale else ""


def _ranges(steps: list[int]) -> str:
    return f"{steps[0]} to {steps[-1]} ({len(steps)} of them)"


def _sequences(header: StepDump, stale: str, shown: slice) -> Table:
    count, recipe = len(header.rows), header.recipe[:12]
    title = Text(f"step {header.step}: {count} sequences, recipe {recipe}{stale}")
    table = Table(title=title, title_justify="left")
    episodes = {row.episode for row in header.rows if row.episode is not None}
    has_branches = 0 < len(episodes) < len(header.rows)
    names = ["sequence", "prompt", "source", "ground truth", "end", "tokens", "score"]
    for name in ["episode", *names] if has_branches else names:
        side = "right" if name in ("episode", "sequence", "tokens", "score") else "left"
        table.add_column(name, overflow="fold", justify=side)
    for index, row in list(enumerate(header.rows))[shown]:
        tokens = str(sum(count for _, count in row.parts))
        cells = (row.prompt, row.data_source, row.ground_truth, row.finish_reason)
        texts = [Text(visible(cell[:200])) for cell in cells]
        numbers = [str(row.episode), str(index)] if has_branches else [str(index)]
        table.add_row(*numbers, *texts, tokens, f"{row.score:.4g}")
    return table


def _tokens(
    folder: Path, header: StepDump, index: int, stale: str, shown: slice
) -> tuple[Table, int]:
    from mppo.dumps.token_table import read_token_tables  # imports torch

    (found,) = read_token_tables(folder, header, [index])
    row = found.row
    title = (
        f"step {header.step}, sequence {index}: score {row.score:.4g}, "
        f"{visible(row.finish_reason)}, ground truth {visible(row.ground_truth)}{stale}"
    )
    table = Table(title=Text(title), title_justify="left")
    for name in ("token", "id", "text", *found.numbers):
        table.add_column(name, justify="left" if name == "text" else "right", overflow="fold")
    tokens = list(enumerate(zip(found.tokens, found.pieces, strict=True)))
    for place, (token, piece) in tokens[shown]:
        after = place - found.prompt_tokens
        numbers = ("" for _ in found.numbers)
        if after >= 0 and not found.by_environment[after]:
            numbers = (f"{values[after]:.4g}" for values in found.numbers.values())
        table.add_row(str(place), str(token), Text(visible(piece)), *numbers)
    return table, len(tokens)


if __name__ == "__main__":
    sys.exit(main())
