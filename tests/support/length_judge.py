"""A judge behind a real HTTP endpoint that prefers the longer answer."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ANSWERS = re.compile(r"\[Answer A\]\n(.*)\n\n\[Answer B\]\n(.*)\n$", re.DOTALL)


class LengthJudge(BaseHTTPRequestHandler):
    """Judges by length; answers to ``mute`` get no verdict, and to ``broken`` an error."""

    seen: list[tuple[str | None, str]] = []  # noqa: RUF012  # one server per test

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"]
        self.seen.append((self.headers["Authorization"], body["model"]))
        first, second = ANSWERS.findall(text)[0]
        verdict = "C" if len(first) == len(second) else "AB"[len(second) > len(first)]
        said = "I cannot say." if "mute" in text else f"Not [[C]]. So: [[{verdict}]]"
        answer = json.dumps({"choices": [{"message": {"content": said}}]}).encode()
        self.send_response(400 if "broken" in text else 200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def length_judge() -> Iterator[str]:
    """The URL of a judge that runs meanwhile; ``LengthJudge.seen`` begins anew."""
    LengthJudge.seen = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), LengthJudge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/chat/completions"
    finally:
        server.shutdown()
        server.server_close()
