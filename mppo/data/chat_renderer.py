"""Rendering of one conversation after the other, in a process with limits that stays.

``chat_template`` starts a process for many conversations at once, which takes seconds. A program
that answers requests renders each of them in milliseconds here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from mppo.config.errors import ConfigError
from mppo.data.chat_template import (
    CHILD,
    CPU_S,
    MAX_CHARACTERS,
    MEMORY_MB,
    rendered_builtin,
    template_error,
    template_job,
    template_of,
)
from mppo.hub.builtin import CHAT_TEMPLATE
from mppo.safety.input_files import parse_json

_START_S, _WALL_S = 60.0, 30.0
"""Seconds in which the process must start, and render a conversation."""


class ChatRenderer:
    """Renders conversations with a tokenizer's chat template; threads may share it.

    Args:
        key: the recipe key that asks for a chat template, for messages.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, key: str) -> None:
        self._tokenizer, self._key = tokenizer, key
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """The conversation's text up to the beginning of a response; ``tools`` are schemas for the
        template. ConfigError if the tokenizer has no chat template, or it fails or exceeds a
        limit."""
        template = template_of(self._tokenizer, self._key)
        if template == CHAT_TEMPLATE:
            return rendered_builtin(self._tokenizer, [messages], True)[0]
        request = json.dumps([list(messages), {"tools": list(tools)} if tools else {}], default=str)
        with self._lock:
            line = self._answer(template, request)
        if not line.endswith("\n"):
            why = f"takes more than {CPU_S:.0f} s, {MEMORY_MB} MB or {MAX_CHARACTERS} characters"
            raise template_error(self._key, why)
        try:
            text = parse_json(line)
        except ValueError as error:
            raise template_error(self._key, f"renders an invalid text: {error}") from error
        if not isinstance(text, str):
            raise template_error(self._key, f"fails: {text['error']}")
        return text

    def render_each(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]]
    ) -> list[str | ConfigError]:
        """The texts, with an error in place of each conversation that cannot be rendered."""
        found: list[str | ConfigError] = []
        for messages in conversations:
            try:
                found.append(self.render(messages))
            except ConfigError as error:
                found.append(error)
        return found

    def close(self) -> None:
        with self._lock:
            self._end()

    def _answer(self, template: str, request: str) -> str:
        """The process's line about a request; not a whole line if it was killed."""
        is_new = self._process is None
        if self._process is None:
            self._process = self._start(template)
        process = self._process
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        timer = threading.Timer(_WALL_S + is_new * _START_S, process.kill)
        timer.start()
        try:
            process.stdin.write(request + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line.endswith("\n"):
            self._end()
        return line

    def _start(self, template: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-I", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        limits = {"conversations": None, "keep_going": True, "cpu_s": CPU_S, "memory_mb": MEMORY_MB}
        job = template_job(template, self._tokenizer.special_tokens_map, True)
        assert process.stdin is not None, "it is a pipe"
        process.stdin.write(json.dumps({**job, **limits}, default=str) + "\n")
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
