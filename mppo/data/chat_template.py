"""Rendering of chat templates, which are programs from a tokenizer, in a limited process.

Jinja's sandbox denies a template files and Python, but does not stop an endless loop or the use of
all memory. Only a separate process with limits of time and memory does.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any

from transformers import PreTrainedTokenizerBase

from mppo.hub.builtin import CHAT_TEMPLATE
from mppo.recipe.errors import ConfigError, config_error
from mppo.safety.input_files import parse_json

CPU_S, CPU_S_PER_PROMPT, WALL_S = 3.0, 0.01, 60.0
"""Processor time for a conversation or a data set, processor time that each prompt of a data set
adds, and the constant part of the wall-clock limit, to which ten times the processor time is
added."""
MEMORY_MB, MAX_CHARACTERS = 1024, 4 << 20
"""Memory of the process in MiB, and characters of one rendered prompt."""
_CHILD = Path(__file__).with_name("chat_template_child.py")

Messages = Sequence[Mapping[str, Any]]
"""A conversation: messages with ``role`` and ``content``."""


def render_with(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Messages],
    key: str,
    add_generation_prompt: bool = True,
    tools: Messages = (),
) -> list[str]:
    """Render every conversation with the chat template of a tokenizer.

    Args:
        key: the recipe key that asks for a chat template, for messages.
        add_generation_prompt: end with what comes before a response.
        tools: schemas of tools, for the template.

    Raises:
        ConfigError: the tokenizer has no chat template; or it fails, exceeds a limit of time or
            memory, or renders a text of more than ``MAX_CHARACTERS``.
    """
    renderer = ChatRenderer(tokenizer, key, add_generation_prompt, together=len(conversations))
    with closing(renderer):
        found = renderer.render_some(conversations, tools)
    for text in found:
        if isinstance(text, ConfigError):
            raise text
    return [str(text) for text in found]


class ChatRenderer:
    """Renders conversations with a tokenizer's chat template, in a process that stays, because its
    start takes seconds; threads may share it.

    Args:
        key: the recipe key that asks for a chat template, for messages.
        add_generation_prompt: end with what comes before a response.
        together: number of conversations for which the limit of time holds, and of which the first
            that fails ends the process; 0: for each.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        key: str,
        add_generation_prompt: bool = True,
        together: int = 0,
    ) -> None:
        self._tokenizer, self._key, self._together = tokenizer, key, together
        self._add_generation_prompt = add_generation_prompt
        self._cpu_s = CPU_S + CPU_S_PER_PROMPT * together
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[str] | None = None

    def render(self, messages: Messages, tools: Messages = ()) -> str:
        """The conversation's text; ``tools`` are schemas for the template. ConfigError if the
        tokenizer has no chat template, or it fails or exceeds a limit."""
        (text,) = self.render_some([messages], tools)
        if isinstance(text, ConfigError):
            raise text
        return text

    def render_some(
        self, conversations: Sequence[Messages], tools: Messages = ()
    ) -> list[str | ConfigError]:
        """The texts, with an error in place of each conversation that cannot be rendered, up to the
        one that exceeds a limit of time or memory (with ``together``, up to the first error)."""
        template = _template_of(self._tokenizer, self._key)
        if template == CHAT_TEMPLATE:  # the embedded models' needs no limits
            return self._tokenizer.apply_chat_template(  # type: ignore[return-value]
                [[dict(message) for message in messages] for messages in conversations],
                add_generation_prompt=self._add_generation_prompt,
                tokenize=False,
            )
        more = {"tools": list(tools)} if tools else {}
        requests = [json.dumps([list(each), more], default=str) + "\n" for each in conversations]
        with self._lock:
            lines = self._answers(template, requests)
            if len(lines) == len(requests):
                return [self._text(line) for line in lines]
            return [*map(self._text, lines), self._end()]

    def close(self) -> None:
        with self._lock:
            self._end()

    def _answers(self, template: str, requests: Sequence[str]) -> list[str]:
        """The process's lines about requests; fewer if it was killed."""
        process = self._process = self._process or self._start(template)
        reads, writes = process.stdout, process.stdin
        assert reads is not None, "it is a pipe"
        assert writes is not None, "it is a pipe"

        def write() -> None:
            with suppress(BrokenPipeError):  # it was killed
                writes.writelines(requests)
                writes.flush()

        timer = threading.Timer(WALL_S + 10 * self._cpu_s, process.kill)
        writer = threading.Thread(target=write, daemon=True)
        timer.start()
        writer.start()
        try:
            lines = [line for line in islice(reads, len(requests)) if line.endswith("\n")]
            writer.join()
        finally:
            timer.cancel()
        return lines

    def _start(self, template: str) -> subprocess.Popen[str]:
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (_end closes it)
        process = subprocess.Popen(
            [sys.executable, "-I", str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
        )
        job = {
            "path": sys.path,
            "template": template,
            "variables": dict(self._tokenizer.special_tokens_map),
            "add_generation_prompt": self._add_generation_prompt,
            "cpu_s": self._cpu_s,
            "together": bool(self._together),
            "memory_mb": MEMORY_MB,
            "max_characters": MAX_CHARACTERS,
        }
        assert process.stdin is not None, "it is a pipe"
        process.stdin.write(json.dumps(job, default=str) + "\n")
        return process

    def _text(self, line: str) -> str | ConfigError:
        try:
            text = parse_json(line)
        except ValueError as error:
            return self._error(f"renders an invalid text: {error}")
        return text if isinstance(text, str) else self._error(f"fails: {text['error']}")

    def _end(self) -> ConfigError:
        """End the process, if there is one; the error of a conversation that it did not render."""
        process, self._process, why = self._process, None, ""
        if process is not None:
            process.kill()
            process.communicate()
            assert self._errors is not None, "it is opened with the process"
            with self._errors as errors:
                errors.seek(0)
                last = errors.read().strip().rpartition("\n")[2]
            code = process.returncode
            why = f" ({f'exit code {code}, {last}' if last else f'killed by {-code}'})"
        return self._error(f"takes more than {self._cpu_s:.0f} s or {MEMORY_MB} MB{why}")

    def _error(self, why: str) -> ConfigError:
        fix = f"set {self._key}=false, or use a tokenizer with another template"
        return config_error(
            self._key, True, f"the tokenizer's chat template {why}", fix, source="data"
        )


def _template_of(tokenizer: PreTrainedTokenizerBase, key: str) -> str:
    """The chat template of a tokenizer; ConfigError if it has none, or several without a
    default."""
    if not tokenizer.chat_template:
        fix = f"set {key}=false, or use a tokenizer with one"
        raise config_error(key, True, "the tokenizer has no chat template", fix)
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        fix = "name one of them default in its tokenizer_config.json"
        raise config_error(key, True, str(error), fix) from error
