"""JSON over HTTP to one server, from any number of threads, with kept-alive connections."""

from __future__ import annotations

import http.client
import json
import select
from collections import deque
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from mppo.safety.bounded_http import bounded, parse_answer, read_body, url_problem
from mppo.safety.foreign_text import quoted
from mppo.safety.input_error import InputError
from mppo.safety.redact import redact_text, remember

MAX_ANSWER_BYTES = 2 << 30
"""The routed experts of a long response take a hundred megabytes."""


class RequestRefused(RuntimeError):
    """The server rejected the request; a repetition would be rejected too. ``status``: of HTTP;
    None if the content of a successful answer gives the reason."""

    def __init__(self, why: str, status: int | None = None) -> None:
        super().__init__(why)
        self.status = status


class ServerLost(ConnectionError):
    """No usable answer: the connection failed, time ran out, or the server reported a failure."""

    def __init__(self, url: str, why: object) -> None:
        super().__init__(f"{url}: {why}")
        self.url, self.why = url, str(why)

    def __reduce__(self) -> tuple:
        return type(self), (self.url, self.why)


class JsonClient:
    """Sends JSON to ``http://host:port`` and reads JSON, with ``api_key`` as a bearer token.
    ``timeout_s``: for connecting, and from the request to the end of the answer."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        if problem := url_problem(url):
            raise InputError(f"{redact_text(url)!r} {problem}: write http://host:port")
        parts = urlsplit(url)
        self.url = url.rstrip("/")
        self._parts, self.timeout_s = parts, timeout_s
        self._headers = {"Content-Type": "application/json"}
        self._secrets = [api_key] if api_key else []
        if api_key:
            remember(api_key)
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._idle: deque[http.client.HTTPConnection] = deque()

    def get(self, path: str, timeout_s: float | None = None) -> Any:
        """Return the answer to a GET; raises as ``post``."""
        return self._call("GET", path, None, timeout_s)

    def post(
        self,
        path: str,
        body: Any = None,
        timeout_s: float | None = None,
        progress_at: Callable[[], float] | None = None,
        parse: Callable[[bytes], Any] = parse_answer,
    ) -> Any:
        """POST ``body`` as JSON and return the answer.

        Args:
            progress_at: returns the time of the server's last progress (monotonic clock), from
                which the limit counts anew.
            parse: parses the JSON text of the answer, or raises ValueError.

        Raises:
            RequestRefused: status 4xx.
            ServerLost: any other failure; the request may be repeated on another server.
        """
        return self._call("POST", path, json.dumps(body or {}), timeout_s, progress_at, parse)

    def _call(
        self,
        method: str,
        path: str,
        text: str | None,
        timeout_s: float | None,
        progress_at: Callable[[], float] | None = None,
        parse: Callable[[bytes], Any] = parse_answer,
    ) -> Any:
        limit = self.timeout_s if timeout_s is None else timeout_s
        for fresh in (False, True):
            connection = None if fresh else self._kept()
            reused = connection is not None
            connection = connection or self._new()
            try:
                bounded(connection, limit, MAX_ANSWER_BYTES, progress_at).timeout = limit
                if connection.sock is not None:
                    connection.sock.settimeout(limit)
                connection.request(method, self._parts.path + path, text, self._headers)
                answer = connection.getresponse()
                content = read_body(answer, MAX_ANSWER_BYTES)
            except (ConnectionResetError, BrokenPipeError) as error:
                # the server may have closed a kept-alive connection: try once with a new one
                connection.close()
                if not reused:
                    raise ServerLost(self.url, f"{path}: {error}") from error
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                late = isinstance(error, TimeoutError)
                since = "" if progress_at is None else " of its last progress"
                why = f"no answer within {limit:.0f} s{since}" if late else quoted(str(error))
                raise ServerLost(self.url, f"{path}: {why}") from error
            else:
                self._idle.append(connection)
                return self._read(path, answer.status, content, parse)
        raise AssertionError("unreachable")

    def _kept(self) -> http.client.HTTPConnection | None:
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread was faster
                return None
            if connection.sock is not None:
                # an idle connection becomes readable only when the server closes it
                watch = select.poll()
                watch.register(connection.sock, select.POLLIN)
                if not watch.poll(0):
                    return connection
            connection.close()
        return None

    def _new(self) -> http.client.HTTPConnection:
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        assert self._parts.hostname is not None, "url_problem refuses a URL without a host"
        return kind(self._parts.hostname, self._parts.port)

    def _read(self, path: str, status: int, text: bytes, parse: Callable[[bytes], Any]) -> Any:
        def shown() -> str:
            return quoted(text, self._secrets)

        if 300 <= status < 400:
            why = f"status {status}: redirects are not followed, give the final address"
            raise RequestRefused(f"{self.url}{path}: {why}", status)
        if 400 <= status < 500 and status not in (408, 429):
            raise RequestRefused(f"{self.url}{path}: status {status}: {shown()}", status)
        if status != 200:
            raise ServerLost(self.url, f"{path}: status {status}: {shown()}")
        if not text or text[:1] not in b'{["ntf-0123456789':
            return None
        try:
            return parse(text)
        except ValueError as error:
            raise ServerLost(
                self.url, f"{path}: the answer is unusable ({error}): {shown()}"
            ) from error
