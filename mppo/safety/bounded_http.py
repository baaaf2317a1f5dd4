"""HTTP client for slow, faulty or hostile servers: every exchange has a limit of time and size.

A socket's timeout limits a single read only; a server that sends a byte per second never exceeds
it. This client counts all bytes of an answer, headers and chunk marks included, and reads them
before one deadline. It does not follow redirects, which would send the request and the key to
another address.
"""

from __future__ import annotations

import http.client
import io
import ipaddress
import json
import queue
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from mppo.safety.input_error import InputError
from mppo.safety.input_files import unique_keys

_PIECE = 1 << 16


class AnswerRefused(http.client.HTTPException):
    """An answer that is too large, or compressed."""


@dataclass(frozen=True)
class Answer:
    """A complete answer, with the server's text for the status and the target of a redirect (empty
    if it names none)."""

    status: int
    reason: str
    location: str
    body: bytes


def url_problem(url: str) -> str | None:
    if not url.isascii() or any(not char.isprintable() or char == " " for char in url):
        return "holds blanks, control characters or letters outside ASCII"
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        return f"is not a URL: {error}"
    if not valid:
        return "is not the URL of an HTTP server"
    if "@" in parts.netloc:
        return "holds a user or a password"
    return None


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def parse_answer(text: bytes) -> Any:
    """Parse a JSON text; NaN and infinities are accepted, because Python's servers send them.
    InputError if it is not JSON, repeats a key, or is nested too deeply."""
    try:
        return json.loads(text.decode(), object_pairs_hook=unique_keys)
    except RecursionError:
        raise InputError("nested too deeply") from None
    except UnicodeDecodeError:
        raise InputError("not UTF-8") from None


def fetch(request: urllib.request.Request, timeout_s: float, max_bytes: int) -> Answer:
    """Send a request and read the answer, through the environment's proxy unless it is on loopback;
    at most ``max_bytes``, headers included.

    The exchange runs in its own thread, because no other timeout covers name resolution, connecting
    to several addresses and sending through TLS.

    Raises:
        TimeoutError: the exchange exceeded the limit.
        OSError, http.client.HTTPException, ValueError: there is no usable answer.
    """
    outcome: queue.SimpleQueue[Answer | Exception] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put(_fetch(request, timeout_s, max_bytes))
        except Exception as error:  # handed to the waiting thread
            outcome.put(error)

    threading.Thread(target=run, name="HTTP exchange", daemon=True).start()
    try:
        found = outcome.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError("timed out") from None
    if isinstance(found, Exception):
        raise found
    return found


def bounded(
    connection: http.client.HTTPConnection,
    timeout_s: float,
    max_bytes: int,
    progress_at: Callable[[], float] | None = None,
) -> http.client.HTTPConnection:
    """Limit time and size of the next answer on a connection.

    Args:
        connection: a connection to a server, open or not.
        timeout_s: seconds from now, or from the server's last progress, to the end of the answer.
        max_bytes: limit of the answer in bytes, headers included.
        progress_at: returns the time of the server's last progress, on the monotonic clock.
    """
    began = time.monotonic()

    def deadline() -> float:
        return timeout_s + (began if progress_at is None else max(began, progress_at()))

    connection.response_class = partial(_BoundedResponse, deadline=deadline, max_bytes=max_bytes)  # type: ignore[assignment]
    return connection


def read_body(answer: http.client.HTTPResponse, max_bytes: int) -> bytes:
    """Read the body of an answer on a bounded connection; http.client.HTTPException if it is too
    large, compressed, cut short or malformed."""
    if answer.getheader("Content-Encoding", "identity").lower() != "identity":
        raise AnswerRefused("its answer is compressed; the request did not accept that")
    if (answer.length or 0) > max_bytes:
        raise AnswerRefused(f"its answer is larger than {max_bytes >> 20} MiB")
    pieces = []
    try:
        while piece := answer.read(_PIECE):
            pieces.append(piece)
    except ValueError as error:  # an invalid length of a chunk
        raise http.client.HTTPException(f"malformed answer: {error}") from error
    if answer.length:
        raise http.client.IncompleteRead(b"".join(pieces), answer.length)
    return b"".join(pieces)


def _fetch(request: urllib.request.Request, timeout_s: float, max_bytes: int) -> Answer:
    opener = urllib.request.OpenerDirector()
    direct = is_loopback(urlsplit(request.full_url).hostname or "")
    opener.add_handler(urllib.request.ProxyHandler({} if direct else None))
    opener.add_handler(_Handler(timeout_s, max_bytes))
    opener.add_handler(urllib.request.UnknownHandler())
    with opener.open(request, timeout=timeout_s) as answer:
        location = answer.getheader("Location", "")
        return Answer(answer.status, answer.msg, location, read_body(answer, max_bytes))


class _Handler(urllib.request.AbstractHTTPHandler):
    """Opens http and https, and follows no redirect."""

    def __init__(self, timeout_s: float, max_bytes: int) -> None:
        super().__init__()
        self._bounds = timeout_s, max_bytes

    def http_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(self._making(http.client.HTTPConnection), request)

    def https_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(self._making(http.client.HTTPSConnection), request)

    http_request = urllib.request.AbstractHTTPHandler.do_request_
    https_request = urllib.request.AbstractHTTPHandler.do_request_

    def _making(self, kind: type[http.client.HTTPConnection]) -> Callable[..., Any]:
        return lambda host, **options: bounded(kind(host, **options), *self._bounds)


class _BoundedResponse(http.client.HTTPResponse):
    def __init__(
        self, sock: Any, *args: Any, deadline: Callable[[], float], max_bytes: int, **options: Any
    ):
        super().__init__(sock, *args, **options)
        self.fp.close()
        self.fp = io.BufferedReader(_BoundedReader(sock, deadline, max_bytes))


class _BoundedReader(io.RawIOBase):
    def __init__(self, sock: Any, deadline: Callable[[], float], max_bytes: int) -> None:
        self._socket, self._raw = sock, sock.makefile("rb", buffering=0)
        self._deadline, self._max_bytes, self._received = deadline, max_bytes, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        count = self._read_before_deadline(buffer)
        self._received += count or 0
        if self._received > self._max_bytes:
            raise AnswerRefused(f"its answer is larger than {self._max_bytes >> 20} MiB")
        return count

    def _read_before_deadline(self, buffer: Any) -> int | None:
        while (left := self._deadline() - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                return self._raw.readinto(buffer)
            except TimeoutError:  # the deadline may have moved; a reader that timed out is unusable
                before, self._raw = self._raw, self._socket.makefile("rb", buffering=0)
                before.close()
        raise TimeoutError("timed out")

    def close(self) -> None:
        self._raw.close()
        super().close()
