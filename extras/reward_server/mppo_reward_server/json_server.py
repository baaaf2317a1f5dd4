"""A small HTTP server whose requests and answers are JSON."""

from __future__ import annotations

import hmac
import json
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mppo.safety.foreign_text import quoted
from mppo.safety.input_files import parse_json

MAX_REQUEST_BYTES = 64 << 20
IDLE_S = 60.0
"""Seconds in which a client must send the next part of a request."""
HEALTH = "/health"

Route = Callable[[dict[str, Any]], Any]
"""From the content of a request to that of the answer; raises ValueError for a bad request."""


class JsonServer(ThreadingHTTPServer):
    """Answers POST requests by their path, each in a thread; ``GET /health`` needs no key.

    Args:
        host, port: where to listen; port 0: any free one.
        routes: functions by path.
        key: clients must send it as ``Authorization: Bearer``; empty: they need none.

    Raises:
        OSError: it cannot listen there.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, host: str, port: int, routes: Mapping[str, Route], key: str = "") -> None:
        self.routes, self._key = dict(routes), key
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        super().__init__((host, port), _Handler)

    def accepts(self, header: str) -> bool:
        """Whether a request with this ``Authorization`` header may be answered."""
        expected = f"Bearer {self._key}"
        return not self._key or hmac.compare_digest(header.encode(), expected.encode())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that go away; report anything else."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: JsonServer
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    disable_nagle_algorithm = True  # the body of an answer waits for no acknowledgement

    def do_GET(self) -> None:
        """Answer whether the server is up."""
        found = self.path == HEALTH
        self._send(200 if found else 404, {"status": "ok"} if found else {"error": "not found"})

    def do_POST(self) -> None:
        """Answer a request."""
        try:
            self._send(200, self._answer())
        except _Refused as error:
            self.close_connection = True  # the rest of the request was not read
            self._send(error.status, {"error": str(error)})

    def _answer(self) -> Any:
        if not self.server.accepts(self.headers.get("Authorization", "")):
            raise _Refused(401, "the key is missing or wrong: send Authorization: Bearer KEY")
        route = self.server.routes.get(self.path.partition("?")[0])
        if route is None:
            raise _Refused(404, f"not found; the paths are {', '.join(self.server.routes)}")
        content = self._content()
        try:
            return route(content)
        except ValueError as error:
            raise _Refused(400, quoted(str(error))) from None
        except Exception as error:  # the server goes on with the next request
            traceback.print_exc()
            raise _Refused(500, f"internal error: {type(error).__name__}") from error

    def _content(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or len(length) > 12:
            raise _Refused(411, "the request has no Content-Length")
        if int(length) > MAX_REQUEST_BYTES:
            raise _Refused(413, f"the request is larger than {MAX_REQUEST_BYTES >> 20} MiB")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise ConnectionError("the client closed the connection")
        try:
            content = parse_json(body, nan=True)
        except ValueError as error:
            raise _Refused(400, f"the request is not JSON: {quoted(str(error))}") from None
        if not isinstance(content, dict):
            raise _Refused(400, "the request is not a JSON object")
        return content

    def _send(self, status: int, content: Any) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Print no line per request."""
