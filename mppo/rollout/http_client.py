"""JSON over HTTP to one server, from any number of threads, with kept-alive connections."""

from __future__ import annotations

import http.client
import json
import select
from collections import deque
from typing import Any
from urllib.parse import urlsplit


class RequestRefused(RuntimeError):
    """The server answered that the request itself is wrong; repeating it would not help.

    Args:
        why: what is wrong with it.
        status: of the HTTP answer; None where an answer's content is what is wrong.
    """

    def __init__(self, why: str, status: int | None = None) -> None:
        super().__init__(why)
        self.status = status


class ServerLost(ConnectionError):
    """No usable answer: connection failed, time ran out, or the server reported its own failure.

    Args:
        url: the server.
        why: what happened.
    """

    def __init__(self, url: str, why: object) -> None:
        super().__init__(f"{url}: {why}")
        self.url, self.why = url, str(why)

    def __reduce__(self) -> tuple:
        return type(self), (self.url, self.why)


class JsonClient:
    """Posts JSON, reads JSON.

    Args:
        url: ``http://host:port``.
        api_key: sent as a bearer token, unless None.
        timeout_s: longest silence of the server.
    """

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no server address: write http://host:port")
        self.url = url.rstrip("/")
        self._parts, self._timeout_s = parts, timeout_s
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._idle: deque[http.client.HTTPConnection] = deque()

    def post(self, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        """Answer to a POST of ``body``.

        Raises:
            RequestRefused: status 4xx.
            ServerLost: everything else that is no answer; safe to repeat elsewhere.
        """
        return self._call("POST", path, json.dumps(body or {}), timeout_s)

    def get(self, path: str, timeout_s: float | None = None) -> Any:
        """Answer to a GET; raises as ``post``."""
        return self._call("GET", path, None, timeout_s)

    def _call(self, method: str, path: str, body: str | None, timeout_s: float | None) -> Any:
        limit = self._timeout_s if timeout_s is None else timeout_s
        for fresh in (False, True):
            connection = None if fresh else self._kept()
            reused = connection is not None
            connection = connection or self._new()
            try:
                connection.timeout = limit
                if connection.sock is not None:
                    connection.sock.settimeout(limit)
                connection.request(method, self._parts.path + path, body, self._headers)
                answer = connection.getresponse()
                text = answer.read()
            except (http.client.RemoteDisconnected, BrokenPipeError) as error:
                # a kept-alive connection the server has closed meanwhile is no failure yet
                connection.close()
                if not reused:
                    raise ServerLost(self.url, f"{path}: {error}") from error
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                why = (
                    f"no answer within {limit:.0f} s" if isinstance(error, TimeoutError) else error
                )
                raise ServerLost(self.url, f"{path}: {why}") from error
            else:
                self._idle.append(connection)
                return self._read(path, answer.status, text)
        raise AssertionError("unreachable")

    def _kept(self) -> http.client.HTTPConnection | None:
        """An open connection nobody uses; those the server has closed meanwhile are dropped."""
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread was faster
                return None
            if connection.sock is not None:
                watch = select.poll()
                watch.register(connection.sock, select.POLLIN)
                if not watch.poll(0):
                    return connection
            connection.close()
        return None

    def _new(self) -> http.client.HTTPConnection:
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        return kind(self._parts.hostname, self._parts.port)

    def _read(self, path: str, status: int, text: bytes) -> Any:
        shown = text[:500].decode(errors="replace")
        if 400 <= status < 500 and status not in (408, 429):
            raise RequestRefused(f"{self.url}{path}: status {status}: {shown}", status)
        if status != 200:
            raise ServerLost(self.url, f"{path}: status {status}: {shown}")
        return json.loads(text) if text[:1] in b'{["ntf-0123456789' and text else None
