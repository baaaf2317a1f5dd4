"""A test server: it answers as SGLang does, and books the GPU memory that SGLang would hold.

No GPU and no model: tokens are constant, and memory is numbers in a ledger, a file that training
ranks and servers share. A server that would run out of memory, or that SGLang would stop with an
assertion, writes an event and exits.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil

WEIGHTS_GIB, GRAPHS_GIB, CONTEXT_GIB, STATIC_FRACTION = 15.0, 2.0, 0.5, 0.9
BUSY_POLLS = 2
"""The scheduler still holds a batch when it is asked so often after the batch's request."""
RELEASE_S = 0.4
TAGS = ("weights", "kv_cache", "cuda_graph")


class OutOfMemory(RuntimeError):
    """A GPU has less memory than is taken."""


class Ledger:
    """Who holds how many GiB of each GPU, and what happened in which order.

    Args:
        path: the file; it exists after ``create``.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def create(self, gpus: int, capacity: float) -> Ledger:
        """Begin with empty GPUs of some GiB."""
        self._path.write_text(
            json.dumps({"capacity": capacity, "held": [{} for _ in range(gpus)], "events": []})
        )
        return self

    @contextmanager
    def _open(self) -> Iterator[dict[str, Any]]:
        with self._path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            content = json.load(file)
            for held in content["held"]:  # the driver frees what ended processes held
                for owner in [o for o in held if not _runs(int(o.split()[0]))]:
                    del held[owner]
            yield content
            file.seek(0)
            file.truncate()
            json.dump(content, file)

    def hold(self, gpu: int, what: str, gib: float) -> None:
        """Make this process hold ``gib`` of a GPU for ``what``, instead of what it held before.

        Raises:
            OutOfMemory: the GPU has less.
        """
        with self._open() as content:
            held, owner = content["held"][gpu], f"{os.getpid()} {what}"
            others = sum(amount for other, amount in held.items() if other != owner)
            if others + gib > content["capacity"]:
                raise OutOfMemory(f"{what}: {gib} GiB of GPU {gpu}, which holds {held}")
            held[owner] = gib

    def free(self, gpu: int) -> float:
        """Free GiB of a GPU."""
        with self._open() as content:
            return content["capacity"] - sum(content["held"][gpu].values())

    def note(self, event: str) -> None:
        """Append an event."""
        with self._open() as content:
            content["events"].append(event)

    def events(self) -> list[str]:
        """The events since the last call."""
        with self._open() as content:
            events, content["events"] = content["events"], []
            return events


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class LedgerServer:
    """The state of one server on some GPUs.

    Args:
        ledger: the ledger.
        gpus: the server's GPUs.
    """

    def __init__(self, ledger: Ledger, gpus: range) -> None:
        self.ledger, self._gpus = ledger, gpus
        self._busy_polls, self._version = 0, ""
        free = min(ledger.free(gpu) for gpu in gpus)
        # SGLang: what is free, less the weights and a share of what was free for everything else
        cache = free * STATIC_FRACTION - WEIGHTS_GIB
        self._sizes = dict(zip(TAGS, (WEIGHTS_GIB, cache, GRAPHS_GIB)))
        ledger.note(f"start with {cache:.1f} GiB of KV cache")
        if cache <= 0:
            sys.exit(1)
        self._hold("context", CONTEXT_GIB)
        self._awake = set(TAGS)
        for tag in TAGS:
            self._hold(tag, self._sizes[tag])

    def _hold(self, what: str, gib: float) -> None:
        for gpu in self._gpus:
            try:
                self.ledger.hold(gpu, what, gib)
            except OutOfMemory as error:
                self._stop(f"out of memory: {error}")

    def _stop(self, why: str) -> None:
        self.ledger.note(why)
        os._exit(1)

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and JSON of the answer to a POST."""
        busy = self._busy_polls > 0
        match path:
            case "/flush_cache":
                self.ledger.note("busy" if busy else "idle")
                self._busy_polls = max(self._busy_polls - 1, 0)
                return (400, "pending requests") if busy else (200, None)
            case "/release_memory_occupation":
                if busy:
                    self._stop("assertion: released while busy")
                time.sleep(RELEASE_S)
                self._release(body["tags"])
            case "/resume_memory_occupation":
                self._resume(body["tags"])
            case "/update_weights_from_tensor":
                if "weights" not in self._awake:
                    self._stop("illegal access: weights loaded into released memory")
                self.ledger.note("load")
                self._version = body["weight_version"]
            case "/generate":
                return 200, self._generate(body["input_ids"])
        return 200, {"success": True}

    def _release(self, tags: list[str]) -> None:
        for tag in tags:
            if tag not in self._awake:
                self._stop(f"{tag} was released twice")
            self._hold(tag, 0.0)
            self._awake.remove(tag)
        self.ledger.note("release " + " ".join(tags))

    def _resume(self, tags: list[str]) -> None:
        for tag in tags:
            if tag in self._awake:
                self._stop(f"{tag} was resumed twice")
            self._hold(tag, self._sizes[tag])
            self._awake.add(tag)
        self.ledger.note("resume " + " ".join(tags))

    def _generate(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        if self._awake != set(TAGS):
            self._stop(f"illegal access: generation with {sorted(self._awake)}")
        self.ledger.note("generate")
        self._busy_polls = BUSY_POLLS
        meta = {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-0.5, 5], [-0.5, 2]],
            "weight_version": self._version,
        }
        return [{"output_ids": [5, 2], "meta_info": meta} for _ in prompts]


def serve(server: LedgerServer, port: int) -> None:
    """Answer requests until the process is killed."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(200, None)

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            self._send(*server.answer(self.path, json.loads(self.rfile.read(length) or b"{}")))

        def _send(self, status: int, content: Any) -> None:
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    path, gpus, port = sys.argv[1:]
    serve(LedgerServer(Ledger(Path(path)), range(int(gpus))), int(port))
