"""A reward server that fails: ``python tests/support/faulty_reward_server.py`` prints its port.

It speaks every format of ``reward.format``. ``POST /FORMAT?faults=N`` gets N faulty answers among
the right ones; no item is in more than ``MOST_PER_ITEM`` of them. ``GET /counts`` returns the
number of faults by kind. The true score of a response is a function of its text.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

MOST_PER_ITEM = 4
SLOW_S = 1.5
KINDS = (
    "slow", "status 500", "too short", "too long", "NaN", "closed in mid-body", "swapped",
    "another request's",
)  # fmt: skip


def true_score(text: str) -> float:
    """The score of a response, the same in every process."""
    return sum(index * ord(char) for index, char in enumerate(text, 1)) / 7


class Formats:
    """Reads the responses of a request, and writes an answer to it."""

    def texts(self, name: str, body: dict[str, Any]) -> list[str]:
        """What the request asks about."""
        match name:
            case "mppo":
                return [item["response"] for item in body["items"]]
            case "openrlhf":
                return [
                    query.removeprefix(prompt)
                    for query, prompt in zip(body["query"], body["prompts"])
                ]
            case "sglang":
                return [",".join(map(str, ids)) for ids in body["input_ids"]]
            case "sandbox_fusion":
                return [f"{body['code']}|{body['stdin']}"]
            case "judge":
                return [body["messages"][0]["content"]]
        raise ValueError(name)

    def ids(self, name: str, body: dict[str, Any]) -> list[str]:
        """The request's ids, where the format has them."""
        if name == "mppo":
            return [item["id"] for item in body["items"]]
        return body.get("rid", [])

    def answer(self, name: str, scores: list[float], ids: list[str]) -> Any:
        """An answer with these scores."""
        match name:
            case "mppo":
                return {"scores": scores, "ids": ids}
            case "openrlhf":
                return {"rewards": scores, "extra_logs": {"twice": [2 * each for each in scores]}}
            case "sglang":
                return [
                    {"embedding": [score], "meta_info": {"id": name}}
                    for score, name in zip(scores, ids)
                ]
            case "sandbox_fusion":
                if len(scores) != 1 or scores[0] != scores[0]:
                    return {"status": "SandboxError", "message": "no container"}
                run = {"status": "Finished", "return_code": 0, "stdout": f"{scores[0]}\n"}
                return {"status": "Success", "run_result": run}
            case "judge":
                messages = [{"message": {"content": f"Score: {score}"}} for score in scores]
                return {"choices": messages if len(scores) == 1 else []}
        raise ValueError(name)


class FaultyServer(ThreadingHTTPServer):
    """The plan of faults, shared by all requests."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock, self.random = threading.Lock(), random.Random(0)
        self.counts: Counter[str] = Counter()
        self.given: Counter[str] = Counter()
        self.items: Counter[tuple[str, str]] = Counter()
        self.last: dict[str, tuple[list[float], list[str]]] = {}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The client no longer waits for a slow answer."""

    def choose(self, target: str, most: int, texts: list[str], kinds: list[str]) -> str:
        """The fault of the next answer; empty for none."""
        with self.lock:
            keys = [(target, text) for text in texts]
            if self.given[target] >= most or any(self.items[k] >= MOST_PER_ITEM for k in keys):
                return ""
            kind = self.random.choice(kinds)
            self.given[target] += 1
            self.counts[f"{target.split('?')[0]} {kind}"] += 1
            self.items.update(keys)
            return kind


class Handler(BaseHTTPRequestHandler):
    """Answers, rightly or not."""

    server: FaultyServer

    def do_GET(self) -> None:
        self.reply(200, dict(self.server.counts))

    def do_POST(self) -> None:
        url = urlsplit(self.path)
        name, most = url.path[1:], int(parse_qs(url.query)["faults"][0])
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        formats = Formats()
        texts, ids = formats.texts(name, body), formats.ids(name, body)
        scores = [true_score(text) for text in texts]
        # the formats without ids cannot show an answer to another request
        kinds = [kind for kind in KINDS if ids or kind not in ("swapped", "another request's")]
        if name == "judge":
            kinds.remove("NaN")  # the judge's text is final
        kind = self.server.choose(self.path, most, texts, kinds)
        others = self.server.last.get(name, ([0.0], ["other"]))
        self.server.last[name] = scores, ids
        match kind:
            case "slow":
                time.sleep(SLOW_S)
            case "status 500":
                return self.reply(500, {"error": "out of memory"})
            case "too short":
                scores, ids = scores[:-1], ids[:-1]
            case "too long":
                scores, ids = [*scores, 0.5], [*ids, *ids[:1]]
            case "NaN":
                scores[len(scores) // 2] = float("nan")
            case "swapped":
                scores, ids = scores[::-1], ids[::-1]
            case "another request's":
                scores, ids = others
        self.reply(200, formats.answer(name, scores, ids), kind == "closed in mid-body")

    def reply(self, status: int, content: Any, cut: bool = False) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text[: len(text) // 2] if cut else text)

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def log_error(self, format: str, *arguments: object) -> None:
        pass


if __name__ == "__main__":
    server = FaultyServer()
    print(server.server_port, flush=True)
    server.serve_forever()
