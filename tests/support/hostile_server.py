"""HTTP servers with malformed or hostile answers, on the loopback interface."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

Answer = Callable[[socket.socket, bytes], None]
"""A function that sends an answer to a request."""


@contextmanager
def hostile_server(answer: Answer) -> Iterator[str]:
    """Start a server that gives this answer to every complete request; its address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):  # the listener or the client has closed
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=handle, args=(connection,), daemon=True).start()

    def handle(connection: socket.socket) -> None:
        with suppress(OSError), connection:
            answer(connection, request_of(connection))

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()


def request_of(connection: socket.socket) -> bytes:
    """Read a complete request."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(1 << 16)
    head, _, body = received.partition(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    while len(body) < length:
        body += connection.recv(1 << 16)
    return head + b"\r\n\r\n" + body


def says(body: bytes, status: bytes = b"200 OK", headers: bytes = b"") -> Answer:
    """A complete answer, after which the connection closes."""
    head = b"HTTP/1.1 %s\r\nConnection: close\r\nContent-Length: %d\r\n%s\r\n" % (
        status,
        len(body),
        headers,
    )
    return raw(head + body)


def raw(text: bytes) -> Answer:
    """Send these bytes and close the connection."""

    def answer(connection: socket.socket, request: bytes) -> None:
        connection.sendall(text)

    return answer


def endless(head: bytes, piece: bytes, pause_s: float = 0.0) -> Answer:
    """Send a beginning, then repeat the same bytes without end."""

    def answer(connection: socket.socket, request: bytes) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(piece)
            time.sleep(pause_s)

    return answer


def echoes(status: bytes) -> Answer:
    """Send the request back as the reason and body of an error."""

    def answer(connection: socket.socket, request: bytes) -> None:
        lines = request.partition(b"\r\n\r\n")[0].replace(b"\r\n", b" | ")
        body = lines + b"\n" + request
        head = b"HTTP/1.1 %s %s\r\nContent-Length: %d\r\n\r\n" % (status, lines, len(body))
        connection.sendall(head + body)

    return answer
