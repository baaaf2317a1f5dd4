"""``mppo-report RUN...``: one HTML file about one or several runs."""

from __future__ import annotations

import argparse
import hmac
import json
import secrets
import sys
from collections.abc import Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from mppo.report.files import METRICS, PAGE, RECIPE, STATUS
from mppo.safety.disk import replace_text
from mppo.safety.input_error import InputError
from mppo.safety.redact import redact_text, redacted_output

HOST = "127.0.0.1"
_NAMES = ("127.0.0.1", "localhost")


class _Handler(BaseHTTPRequestHandler):
    """Answers with the page, and with its data as JSON."""

    def __init__(self, folders: Sequence[Path], key: str, *args) -> None:
        self._folders, self._key = folders, key
        super().__init__(*args)

    def do_GET(self) -> None:
        from mppo.report.html.page import page_data, page_text  # it imports torch

        # a page of another host whose name leads here (DNS rebinding) must not read the run
        if self.headers.get("Host", "").rpartition(":")[0] not in _NAMES:
            return self._answer(403, "text/plain", "this server answers to 127.0.0.1 only\n")
        key, *names = self.path.removeprefix("/").split("/", 1)
        if not hmac.compare_digest(key.encode(), self._key.encode()):
            return self._answer(403, "text/plain", "open the address that mppo-report printed\n")
        if names not in ([""], ["data.json"]):
            return self._answer(404, "text/plain", "no such page\n")
        try:
            data = page_data(self._folders)
        except (OSError, ValueError) as error:
            return self._answer(500, "text/plain", redact_text(f"{error}\n"))
        if names == [""]:
            return self._answer(200, "text/html", page_text(data, live=True))
        return self._answer(200, "application/json", json.dumps(data, allow_nan=False))

    def _answer(self, code: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args) -> None:
        """Print nothing per request."""


class ReportServer(ThreadingHTTPServer):
    """A server on the loopback, not running yet; ``url`` is that of the page. Port 0 is any free
    one; one that is taken raises OSError. Every user of the machine can connect to it, while a
    run's folder is its owner's alone: the address therefore begins with a key."""

    def __init__(self, folders: Sequence[Path], port: int) -> None:
        key = secrets.token_hex(16)
        super().__init__((HOST, port), partial(_Handler, folders, key))
        self.url = f"http://{HOST}:{self.server_port}/{key}/"


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
    from mppo.report.html.page import page_data, page_text  # it imports torch

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
