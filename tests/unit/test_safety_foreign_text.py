"""Text from other hosts is sanitised before it appears in a message."""

from __future__ import annotations

import pytest

from mppo.safety.bounded_http import is_loopback, parse_answer, url_problem
from mppo.safety.foreign_text import SHOWN, quoted


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (b"plain", "plain"),
        (b"\x1b[31mred\x07\r\nnext\x00", "[31mred  next"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        ("right\u202eto left\u200b", "rightto left"),
        ("ses\x00ame1 and sesame1", "*** and ***"),
        ("x" * 500, "x" * (SHOWN - 3) + "..."),
        (("x" * (SHOWN - 5)) + "sesame1", "x" * (SHOWN - 5) + "***"),
    ],
)
def test_text_is_cleaned_then_redacted_then_truncated(text, shown):
    assert quoted(text, ["sesame1"]) == shown


def test_a_secret_at_the_truncation_is_not_shown_in_part():
    assert quoted("sesame-sesame" * 1000, ["sesame-sesame"]).strip("*") == "..."
    assert quoted("\x00" * 4090 + "sesame-sesame", ["sesame-sesame"]) == ""


def test_json_is_read():
    read = parse_answer(b'{"a": [1, -2.5e3, "\xc3\xa4", null]}')
    assert read == {"a": [1, -2500.0, "\u00e4", None]}


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://10.0.0.7:30000/score?a=b", None),
        ("https://[::1]:30000", None),
        ("ftp://host/", "not the URL of an HTTP server"),
        ("http://", "not the URL of an HTTP server"),
        ("http://host:0/", "not the URL of an HTTP server"),
        ("http://host:70000/", "Port out of range"),
        ("http://[::1/", "is not a URL"),
        ("http://host/a b", "blanks"),
        ("http://h\u00f6st/", "outside ASCII"),
        ("http://me@host/", "user or a password"),
    ],
)
def test_a_bad_url_is_explained(url, problem):
    found = url_problem(url)
    assert found is None if problem is None else problem in found


def test_loopback_hosts():
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.9.9.9", "::1")))
    assert not any(map(is_loopback, ("localhost.example.org", "10.0.0.1", "::2", "")))
