"""``mppo-report RUN...``: one HTML file about one or several runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mppo.report.files import METRICS, PAGE, RECIPE, STATUS
from mppo.safety.disk import replace_text
from mppo.safety.input_error import InputError
from mppo.safety.redact import redacted_output


@redacted_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Write or serve the report; exit code 2 for a folder without a run."""
    parser = argparse.ArgumentParser(
        prog="mppo-report",
        description="Write one HTML file about one or several runs; it needs no network.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder")
    where = f"file to write (default: RUN/{PAGE}; {PAGE} in this folder for several runs)"
    parser.add_argument("-o", "--output", type=Path, help=where)
    parser.add_argument(
        "--serve",
        action="store_true",
        help="serve the report on 127.0.0.1, updated while the run goes on",
    )
    parser.add_argument("--port", type=int, default=8090, help="for --serve (default: %(default)s)")
    chosen = parser.parse_args(argv)
    for folder in chosen.runs:
        if not any((folder / name).is_file() for name in (METRICS, RECIPE, STATUS)):
            parser.error(f"{folder} is not a run folder: it has no {METRICS} and no {RECIPE}")
    output = chosen.output or (chosen.runs[0] if len(chosen.runs) == 1 else Path()) / PAGE
    if output.is_dir():
        parser.error(f"--output {output} is a folder: name a file, such as {output / PAGE}")
    if not output.absolute().parent.is_dir():
        parser.error(f"--output {output}: the folder {output.parent} does not exist: make it first")
    from mppo.report.html.page import page_data, page_text  # here: it imports torch

    try:
        if chosen.serve:
            return _serve(chosen.runs, chosen.port)
        replace_text(output, page_text(page_data(chosen.runs)))
        print(output)
    except (OSError, ValueError) as error:
        print(f"mppo: the report cannot be made: {error}", file=sys.stderr)
        return 2
    return 0


def _serve(runs: Sequence[Path], port: int) -> int:
    from mppo.report.html.serve import ReportServer

    try:
        server = ReportServer(runs, port)
    except OSError as error:
        why = f"cannot listen on port {port} ({error.strerror})"
        raise InputError(f"{why}; choose another with --port, or 0 for a free one") from error
    with server:
        print(f"{server.url} (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
