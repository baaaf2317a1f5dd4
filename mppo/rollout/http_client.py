"""JSON over HTTP to one server, with kept-alive connections (one per thread)."""

from __future__ import annotations

import http.client
import json
import threading
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
        self._local = threading.local()

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
            connection = self._connection(limit, fresh)
            reused = getattr(self._local, "used", False)
            try:
                connection.request(method, self._parts.path + path, body, self._headers)
                answer = connection.getresponse()
                text = answer.read()
                self._local.used = True
                return self._read(path, answer.status, text)
            except (http.client.RemoteDisconnected, BrokenPipeError) as error:
                # a kept-alive connection the server has closed meanwhile is no failure yet
                self._drop()
                if fresh or not reused:
                    raise ServerLost(self.url, f"{path}: {error}") from error
            except (OSError, http.client.HTTPException) as error:
                self._drop()
                why = (
                    f"no answer within {limit:.0f} s" if isinstance(error, TimeoutError) else error
                )
                raise ServerLost(self.url, f"{path}: {why}") from error
        raise AssertionError("unreachable")

    def _connection(self, timeout_s: float, fresh: bool) -> http.client.HTTPConnection:
        connection = getattr(self._local, "connection", None)
        if connection is None or fresh:
            secure = self._parts.scheme == "https"
            kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
            connection = kind(self._parts.hostname, self._parts.port, timeout=timeout_s)
            self._local.connection, self._local.used = connection, False
        connection.timeout = timeout_s
        if connection.sock is not None:
            connection.sock.settimeout(timeout_s)
        return connection

    def _drop(self) -> None:
        self._local.connection.close()
        self._local.connection = None
        self._local.used = False

    def _read(self, path: str, status: int, text: bytes) -> Any:
        shown = text[:500].decode(errors="replace")
        if 400 <= status < 500 and status not in (408, 429):
            raise RequestRefused(f"{self.url}{path}: status {status}: {shown}", status)
        if status != 200:
            raise ServerLost(self.url, f"{path}: status {status}: {shown}")
        return json.loads(text) if text[:1] in b'{["ntf-0123456789' and text else None
