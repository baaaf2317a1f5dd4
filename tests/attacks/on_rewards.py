"""Attacks on the client of reward servers."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attacks.attack import Attack, Table
from attacks.on_recipes import train
from hostile_server import Answer, echoes, endless, hostile_server, raw, says

SHORT_S = 2.0
"""Time limit of a request whose answer never ends."""
LONG_S = 3600.0
"""Time limit of all other requests: another limit or the content of the answer ends them."""
KEY = "opensesame-0123456789"
QUERY = "/score?user=alibaba99&sig=ses"
SECRETS = ("opensesame", "alibaba99", "sig=ses", "\x1b", "\x07")
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
ONE_GB = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (1 << 30)
ESCAPES = b"\x1b]0;owned\x07\x1b[2J\x1b[1;31mred\r\n\x9b0m" * 50


def judged(url: str, count: int = 2, limit_s: float = LONG_S, **settings: Any) -> int:
    """Exit code of a run whose responses are scored by a server: 0, 1 for a failure, 2 for settings
    that are refused. Prints the scores or the error."""
    from mppo.batch.prompt import Prompt
    from mppo.recipe.errors import ConfigError
    from mppo.recipe.sections.reward import RewardConfig
    from mppo.rewards.response import Response
    from mppo.rewards.scorer import build_scorer
    from mppo.rewards.scores import read_scores

    os.environ["REWARD_KEY_OF_TEST"] = KEY
    kwargs = {"retries": 0, "batch_size": 1, "api_key_env": "REWARD_KEY_OF_TEST", **settings}
    responses = [Response(Prompt(uid, (1,), "poems", "x", "p"), "r") for uid in range(count)]
    code, shown = 0, ""
    try:
        reward = RewardConfig(name="remote", url=url, timeout_s=limit_s, kwargs=kwargs)
        judge = build_scorer(reward, tokenizer=None).reward_function
        found = read_scores(judge(responses), responses)
        shown = f"scores: {[judgement.score for judgement in found]}"
    except ConfigError as error:
        code, shown = 2, str(error)
    except ValueError as error:
        code, shown = 1, str(error)
    found = [secret for secret in SECRETS if secret in shown]
    print(f"shown: {found}" if found else shown)
    return 99 if found else code


def answered(answer: Answer, **settings: Any) -> Callable[[Path], int]:
    """A run with a reward server that gives this answer."""

    def run(folder: Path) -> int:
        with hostile_server(answer) as url:
            return judged(url + QUERY, **settings)

    return run


def _redirected(folder: Path) -> int:
    """A redirect to a server that would give scores; it must not get a request."""
    asked = []

    def scores(connection, request: bytes) -> None:
        asked.append(request)
        says(b'{"scores": [1, 1]}')(connection, request)

    with hostile_server(scores) as elsewhere:
        location = f"Location: {elsewhere}/?sig=ses&key={KEY}\r\n".encode()
        code = answered(says(b"", b"307 Temporary Redirect", location))(folder)
    if asked:
        print("the other server was asked")
    return 99 if asked else code


def _through_a_proxy_of_files(folder: Path) -> int:
    os.environ |= {"http_proxy": "file:///etc/passwd", "no_proxy": ""}
    return judged("http://reward.invalid/score")


def _with_a_key_of_two_lines(folder: Path) -> int:
    os.environ["TWO_LINES"] = f"{KEY}\r\nX-Admin: yes"
    return judged("http://127.0.0.1:9/", api_key_env="TWO_LINES")


def _recipe(url: str) -> Callable[[Path], int]:
    return lambda folder: train("--dry-run", "reward.name=remote", f"reward.url={url}")


def _row(given: str, answer: Answer, expected: str, **settings: Any) -> Attack:
    return Attack(given, answered(answer, **settings), expected, code=1)


def _endless(given: str, answer: Answer) -> Attack:
    return _row(given, answer, f"no complete answer within {SHORT_S:.0f} s", limit_s=SHORT_S)


def _json(given: str, text: bytes, expected: str) -> Attack:
    return _row(f"the answer {given}", says(text), expected)


TABLE = Table(
    "Reward servers",
    "An answer is limited in time and size, headers included; redirects are not followed. A "
    "message quotes a shortened answer without control characters, without the key and without "
    "the URL's query (every row checks that). The server must send one finite score per response, "
    "under the ids of the request.",
    (
        Attack(
            "a redirect to another server",
            _redirected,
            "redirects are not followed",
            code=1,
        ),
        _row(
            "a redirect to `file:///etc/passwd`",
            says(b"", b"302 Found", b"Location: file:///etc/passwd\r\n"),
            "a redirect to file:///etc/passwd; redirects are not followed",
        ),
        _endless(
            "headers sent a byte at a time, forever",
            endless(b"HTTP/1.1 200 OK\r\nX: ", b"y", 0.2),
        ),
        _endless(
            "a body sent a byte at a time",
            endless(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", b"[", 0.2),
        ),
        _endless(
            "`100 Continue` forever",
            endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.01),
        ),
        _endless("no answer at all", endless(b"", b"", 0.2)),
        _row(
            "an answer of 1 GB", endless(ONE_GB, b"[" * 65536), "its answer is larger than 16 MiB"
        ),
        _row(
            "a length of 31 digits",
            raw(b"HTTP/1.1 200 OK\r\nContent-Length: 1%030d\r\n\r\n" % 0),
            "its answer is larger than 16 MiB",
        ),
        _row(
            "an error whose body never ends",
            endless(b"HTTP/1.1 400 Bad\r\n\r\n", b"x" * 65536),
            "its answer is larger than 16 MiB",
        ),
        _row(
            "chunks forever",
            endless(CHUNKED, b"10000\r\n" + b" " * 65536 + b"\r\n"),
            "its answer is larger than 16 MiB",
        ),
        _row(
            "a chunk of length -1, and bytes forever",
            endless(CHUNKED + b"-1\r\n", b" " * 65536),
            "its answer is larger than 16 MiB",
        ),
        _row("a chunk of 2^62 bytes", raw(CHUNKED + b"4000000000000000\r\n{}"), "IncompleteRead"),
        _row(
            "trailers forever",
            endless(CHUNKED + b"0\r\n", b"X: " + b"y" * 60_000 + b"\r\n"),
            "its answer is larger than 16 MiB",
        ),
        _row(
            "a gzip bomb",
            says(gzip.compress(b" " * (8 << 20)), headers=b"Content-Encoding: gzip\r\n"),
            "compressed; the request did not accept that",
        ),
        _row(
            "a header line of 1 MB",
            raw(b"HTTP/1.1 200 OK\r\nX: " + b"y" * (1 << 20) + b"\r\n\r\n"),
            "LineTooLong",
        ),
        _row(
            "100,000 headers",
            raw(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100_000 + b"\r\n"),
            "got more than 100 headers",
        ),
        _row("terminal escapes, not HTTP", raw(ESCAPES + b"\r\n"), "BadStatusLine: ]0;owned[2J"),
        _row(
            "terminal escapes in an error's reason and body",
            raw(b"HTTP/1.1 503 " + ESCAPES[:20] + b"\r\n\r\n" + ESCAPES),
            "HTTP 503 ]0;owned[2J",
        ),
        _row(
            "an error that echoes the request with its key",
            echoes(b"400"),
            "HTTP 400 POST /score?***",
        ),
        _row(
            "a temporary error that echoes the request",
            echoes(b"500"),
            "failed 2 times, last: HTTP 500 POST /score?***",
            retries=1,
            backoff_s=0.0,
        ),
        _row(
            "an answer that is the key, a thousand times", says(KEY.encode() * 1000), "sent no JSON"
        ),
        _row(
            "an incomplete answer",
            raw(b'HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"scores": [1, 1]}'),
            "IncompleteRead",
        ),
        _json("is HTML", b"<html><body>hello", "sent no JSON"),
        _json("is not UTF-8", b'{"scores": [1], "x": "\xff"}', "sent no JSON (not UTF-8)"),
        _json("is nested 100,000 deep", b"[" * 100_000, "sent no JSON (nested too deeply)"),
        _json(
            "gives the scores twice",
            b'{"scores": [1], "scores": [9]}',
            "the key 'scores' occurs twice",
        ),
        _json("has a score of NaN", b'{"scores": [NaN]}', "is nan, not a finite number"),
        _json("has a score of 1e999", b'{"scores": [1e999]}', "is inf, not a finite number"),
        _json(
            "has a score of 10^400",
            b'{"scores": [1%0400d]}' % 0,
            "..., not a finite number",
        ),
        _json("has a score of 5,000 digits", b'{"scores": [1%05000d]}' % 0, "sent no JSON"),
        _json("has two scores for one response", b'{"scores": [1, 1]}', "it sent a list of 2"),
        _json(
            "has the ids of another request",
            b'{"scores": [1], "ids": ["a-0"]}',
            "does not have the ids of the request",
        ),
        _json(
            "nests the scores",
            b'{"scores": [[1]]}',
            "has 1 token rewards, and the response has 0",
        ),
        _json("has scores as strings", b'{"scores": ["1"]}', "is '1', not a finite number"),
        _json("has a score of null", b'{"scores": [null]}', "is None, not a finite number"),
        _json("has an object without a score", b'{"scores": [{"acc": 1}]}', "is missing"),
        _json("has no scores", b'{"score": [1]}', "it sent no such list"),
        Attack(
            "`reward.url: file:///etc/passwd`",
            _recipe("file:///etc/passwd"),
            "is not the URL of an HTTP server",
        ),
        Attack(
            "a line break and a header in `reward.url`",
            _recipe('"http://127.0.0.1:9/\\r\\nX-Admin: yes"'),
            "holds blanks, control characters",
        ),
        Attack(
            "port 99999 in `reward.url`",
            _recipe("http://127.0.0.1:99999/"),
            "Port out of range",
        ),
        Attack(
            "a line break in the key",
            _with_a_key_of_two_lines,
            "its value holds line breaks",
        ),
        Attack(
            "a proxy that is a file",
            _through_a_proxy_of_files,
            "unknown url type: file",
            code=1,
        ),
        Attack(
            "a batch size of 0",
            answered(says(b'{"scores": []}'), batch_size=0),
            "reward.kwargs.batch_size = 0",
        ),
    ),
)
