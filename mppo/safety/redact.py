"""Removal of keys, tokens and passwords from everything that a program writes or prints.

Texts come from models, data and servers. No pattern here searches a part of a text again from each
of many starts: one search holds the interpreter, and with it the rank's heartbeat.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO
from urllib.parse import parse_qsl, quote, unquote, urlsplit

HIDDEN = "***"
MIN_SECRET_LENGTH = 8
"""Shorter values are not hidden in texts, because ordinary words contain them."""

_KEY_NAMES = r"(?:api|access|private|secret|auth|signing|encryption|account|master|admin)[_-]?keys?"
_NAME = re.compile(
    rf"(?:^|[_\-.])(?:{_KEY_NAMES}(?:[_-]?id)?|secrets?|pass(?:word|wd|phrase|code)?s?|pwd|pat"
    r"|(?:(?:api|auth|access|hub|refresh|session|bearer)[_-]?tokens|token)|bearer|credentials?"
    r"|auth(?:orization|entication)?|cookies?|sig(?:nature)?)$",
    re.IGNORECASE,
)
_VARIABLE = re.compile(r"(?:^|_)KEY(?:S|_ID)?$", re.IGNORECASE)
"""Names of environment variables that hold secrets, besides those of ``_NAME``."""
_SHELL_VARIABLES = ("PWD", "OLDPWD")
"""Environment variables in which shells keep folders, though ``pwd`` often names a password."""
_ORDINARY = re.compile(
    r"(?:^|[_\-.])(?:bos|eos|pad|unk|sep|cls|mask|stop|image|video|audio|special|start|end|turn|per"
    r"|first|last|next|each|every|new)[_-]token$",
    re.IGNORECASE,
)
"""Names of tokens of a tokenizer, which are not secrets."""
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

_URL = re.compile(r"(?<=://)[^\s\"<>]+")
_QUERY = re.compile(r"(?<=[?&;#])([\w.~%-]+)=([^&;#\s\"'<>]+)")
_QUERY_NAME = re.compile(r"(?:^|[_\-.])(?:(?:key|code|sas)$|x-(?:amz|goog|oss)-\S)", re.IGNORECASE)
_PORT = re.compile(r"[\d\]]*(?:[^\w\]]\W*)?")
"""What may follow the last colon of a URL's host: a port, a bracket, a full stop."""
_HEADER = re.compile(
    r"(?i)\b((?:proxy-)?authorization|(?:set-)?cookie)([\"']?\s*[:=]\s*[\"']?)(?![\s\"'])[^\r\n\"']+"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}")
_NAMED = re.compile(r"(?<![\w.-])([\w.-]+)[\"']?\s*([=:])\s*")
_VALUE = re.compile(r"\"[^\"]*\"?|'[^']*'?|[^\s,;&\"'}\])]+")
_BARE_NAMES = ("token", "auth", "pass", "pat", "sig", "signature", "credentials")
"""Names that are also ordinary words before a colon."""
_LIKE_A_KEY = re.compile(r"(?=\S{0,40}[A-Za-z])(?=\S{0,40}\d)\S{8}")
_FLAG = re.compile(r"(?<!\S)(--?[\w-]+)(\s+)([^\s-]\S*)")
_SHAPES = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}"
    r"|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abeprs]-[\w-]{10,}|AIza[\w-]{35}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9]))",
    re.DOTALL,
)
"""Private keys, and tokens with the prefix of a known issuer: Hugging Face, OpenAI, Anthropic,
GitHub, GitLab, Slack, Google, AWS."""
_WEB_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])eyJ(?:[\w-]{8,}(?P<rest>\.[\w-]{8,}(?:\.[\w-]*)?)?|[\w-]*)"
)
"""A JSON web token if it has a ``rest``. Without one the match is the whole word, which is then not
searched again from each further ``eyJ`` in it."""

_remembered: set[str] = set()


def remember(secret: str) -> None:
    """Hide this value in every text from now on, if it has ``MIN_SECRET_LENGTH``."""
    if len(secret) >= MIN_SECRET_LENGTH:
        _remembered.update(_forms(secret))


def is_secret_name(name: str) -> bool:
    """Whether a value under this name is a secret: ``api_key``, ``password``, ``hubToken``."""
    spelled = _CAMEL.sub("_", name.strip())
    return bool(_NAME.search(spelled)) and not _ORDINARY.search(spelled)


def redact(value: Any) -> Any:
    """Return a copy with every secret replaced by ``***``.

    Secrets are all values under a name such as ``api_key``, ``password`` or ``auth``, also inside
    lists and mappings, and what ``redact_text`` finds in texts and in keys of mappings.
    """
    return _redact(value, {}, _known_secrets())


def redact_text(text: str) -> str:
    """Return a text with every secret replaced by ``***``.

    Secrets are the value of an environment variable with a secret's name; a value passed to
    ``remember``; user and password of a URL; the value of a URL's parameter and of ``name=value``,
    ``name: value`` or ``--name value`` with a secret's name; the text after ``Authorization:`` or
    ``Bearer``; and text in the form of a well-known token or private key.

    The time is linear in the length of the text, whatever its content.
    """
    return _redact_text(text, _known_secrets())


def _redact_text(text: str, known: list[str]) -> str:
    for secret in known:
        text = text.replace(secret, HIDDEN)
    text = _WEB_TOKEN.sub(lambda word: HIDDEN if word["rest"] else word[0], text)
    text = _SHAPES.sub(HIDDEN, text)
    text = _URL.sub(_hide_credentials, text)
    text = _QUERY.sub(_hide_parameter, text)
    text = _HEADER.sub(rf"\1\2{HIDDEN}", text)
    text = _BEARER.sub(rf"\1 {HIDDEN}", text)
    text = _hide_named(text)
    return _FLAG.sub(_hide_flag, text)


def query_secrets(url: str) -> set[str]:
    """Return values of a URL's parameters that have a secret's name or the length of a secret."""
    return {
        form
        for name, value in parse_qsl(urlsplit(url).query)
        if len(value) >= (4 if _is_parameter(name) else MIN_SECRET_LENGTH)
        for form in _forms(value)
    }


@contextmanager
def redacted_output() -> Iterator[None]:
    """Pass everything that Python prints inside the context through ``redact_text``: also what no
    writer of ours sees, such as tracebacks, warnings, the logs of libraries and argparse's errors.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _RedactedStream(before[0]), _RedactedStream(before[1])  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _RedactedStream:
    """A text stream that hides secrets; all methods except writing are the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(redact_text(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _redact(value: Any, done: dict[int, Any], known: list[str]) -> Any:
    """Redact a value. ``done`` holds the result of each container by id, so a shared container is
    copied once and a container inside itself becomes ``***``."""
    if isinstance(value, str):
        return _redact_text(value, known)
    if not isinstance(value, (Mapping, list, tuple, set, frozenset)):
        return value
    if id(value) not in done:
        done[id(value)] = HIDDEN
        if isinstance(value, Mapping):
            done[id(value)] = {
                _redact(key, done, known): _entry(key, entry, done, known)
                for key, entry in value.items()
            }
        else:
            done[id(value)] = _redact_arguments(list(value), done, known)
    return done[id(value)]


def _entry(key: Any, entry: Any, done: dict[int, Any], known: list[str]) -> Any:
    if not isinstance(key, str) or not is_secret_name(key):
        return _redact(entry, done, known)
    return _hide_all(entry, numbers=not key.lower().endswith("token"), inside=set())


def _hide_all(value: Any, numbers: bool, inside: set[int]) -> Any:
    if isinstance(value, (Mapping, list, tuple, set, frozenset)):
        if id(value) in inside:
            return HIDDEN
        inside.add(id(value))
        if isinstance(value, Mapping):
            return {key: _hide_all(entry, numbers, inside) for key, entry in value.items()}
        return [_hide_all(entry, numbers, inside) for entry in value]
    hides = (isinstance(value, (str, bytes)) and value) or (
        numbers and isinstance(value, (int, float)) and not isinstance(value, bool)
    )
    return HIDDEN if hides else value


def _redact_arguments(values: list[Any], done: dict[int, Any], known: list[str]) -> list[Any]:
    """Redact the items of a list; the item after a flag such as ``--api-key`` is hidden."""
    hidden: list[Any] = []
    previous: Any = None
    for each in values:
        flag = isinstance(previous, str) and previous.startswith("-")
        is_secret = flag and is_secret_name(previous) and isinstance(each, str)
        hidden.append(HIDDEN if is_secret else _redact(each, done, known))
        previous = each
    return hidden


def _hide_credentials(match: re.Match[str]) -> str:
    """Everything up to the last ``@`` of a URL's part after ``://`` is hidden, because passwords
    can hold an unquoted ``@`` or ``/``."""
    rest = match.group(0)
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    port = authority.rpartition(":")[2] if ":" in authority else ""
    has_user = "@" in authority or not _PORT.fullmatch(port)
    if "@" not in rest or not has_user:
        return rest
    return f"{HIDDEN}@{rest.rpartition('@')[2]}"


def _is_parameter(name: str) -> bool:
    name = unquote(name)
    return is_secret_name(name) or bool(_QUERY_NAME.search(name))


def _hide_parameter(match: re.Match[str]) -> str:
    name = match.group(1)
    return f"{name}={HIDDEN}" if _is_parameter(name) else match.group(0)


def _hide_named(text: str) -> str:
    parts, shown_to = [], 0
    for name in _NAMED.finditer(text):
        if name.start() < shown_to or not is_secret_name(name[1]):
            continue
        bare = name[2] == ":" and name[1].lower() in _BARE_NAMES
        if bare and not _LIKE_A_KEY.match(text, name.end()):
            continue  # a sentence, such as "the token: it ..."
        value = _VALUE.match(text, name.end())
        if value is None:
            continue
        mark = value[0][0] if value[0][0] in "\"'" else ""
        parts += [text[shown_to : name.end()], f"{mark}{HIDDEN}{mark}"]
        shown_to = value.end()
    return "".join([*parts, text[shown_to:]])


def _hide_flag(match: re.Match[str]) -> str:
    name, between = match.group(1, 2)
    return f"{name}{between}{HIDDEN}" if is_secret_name(name) else match.group(0)


def _forms(secret: str) -> set[str]:
    """Return the spellings of a value in texts: unchanged, and quoted for a URL."""
    return {secret, quote(secret), quote(secret, safe="")}


def _known_secrets() -> list[str]:
    """Secrets of the environment and those to remember, the longest first."""
    found = {
        form
        for name, value in os.environ.items()
        if len(value) >= MIN_SECRET_LENGTH
        and name not in _SHELL_VARIABLES
        and (is_secret_name(name) or _VARIABLE.search(name))
        for form in _forms(value)
    }
    return sorted(_remembered | found, key=len, reverse=True)
