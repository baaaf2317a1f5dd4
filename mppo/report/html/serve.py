"""A server of the report on this machine's loopback, for a run that is going on.

Every user of the machine can connect to it, while a run's folder is its owner's alone. The address
therefore begins with a key.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from mppo.report.html.page import page_data, page_text
from mppo.safety.redact import redact_text

HOST = "127.0.0.1"
_NAMES = ("127.0.0.1", "localhost")


class _Handler(BaseHTTPRequestHandler):
    """Answers with the page, and with its data as JSON."""

    def __init__(self, folders: Sequence[Path], key: str, *args) -> None:
        self._folders, self._key = folders, key
        super().__init__(*args)

    def do_GET(self) -> None:
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
    """A server on the loopback, not running yet; ``url`` is that of the page, with the key. Port 0
    is any free one; one that is taken raises OSError."""

    def __init__(self, folders: Sequence[Path], port: int) -> None:
        key = secrets.token_hex(16)
        super().__init__((HOST, port), partial(_Handler, folders, key))
        self.url = f"http://{HOST}:{self.server_port}/{key}/"
