"""Chat templates are programs that come with a tokenizer: run where they can be stopped.

Jinja's sandbox keeps them from files and Python, not from looping or filling memory; nothing but a
process of its own, with limits, ends that.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mppo.config.errors import ConfigError, ConfigIssue
from mppo.safety.input_files import parse_json

CPU_S, CPU_S_PER_PROMPT, WALL_S = 3.0, 0.01, 60.0
"""Limits of a whole data set; the last is waited for beyond the first two, times ten."""
MEMORY_MB, MAX_CHARACTERS = 1024, 4 << 20
"""Limits of the process, besides the prompts it is given, and of one rendered prompt."""
_CHILD = Path(__file__).with_name("chat_template_child.py")


def render(
    template: str, variables: Mapping[str, Any], conversations: Sequence[Sequence[Mapping]]
) -> list[str]:
    """The text of every conversation, with the prompt for an answer at its end.

    Args:
        template: in Jinja, as a tokenizer's ``chat_template``.
        variables: what it may use besides the messages: the tokenizer's special tokens.
        conversations: messages of ``role`` and ``content``.

    Raises:
        ConfigError: the template fails, takes too long or too much memory, or makes too long a
            text.
    """
    cpu_s = CPU_S + CPU_S_PER_PROMPT * len(conversations)
    job = {
        "path": sys.path,
        "template": template,
        "variables": dict(variables),
        "conversations": conversations,
        "cpu_s": cpu_s,
        "most": MAX_CHARACTERS,
    }
    given = json.dumps(job, default=str)
    memory_mb = MEMORY_MB + (20 * len(given) >> 20)
    given = json.dumps({**job, "memory_mb": memory_mb}, default=str)
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            ended = subprocess.run(
                [sys.executable, "-I", str(_CHILD)],
                input=given.encode(),
                stdout=output,
                stderr=errors,
                timeout=WALL_S + 10 * cpu_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise _fault(f"is not done after {error.timeout:.0f} s") from error
        output.seek(0)
        errors.seek(0)
        texts = _texts(output)
        last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
    if len(texts) < len(conversations):
        why = f"exit code {ended.returncode}, {last}" if last else f"killed by {-ended.returncode}"
        raise _fault(f"takes more than {cpu_s:.0f} s or {memory_mb} MB ({why})")
    return texts


def _texts(lines) -> list[str]:
    texts = []
    for line in lines:
        if not line.endswith(b"\n"):
            break  # killed while it wrote
        try:
            text = parse_json(line)
        except ValueError as error:
            raise _fault(f"makes a text that is none: {error}") from error
        if not isinstance(text, str):
            raise _fault(f"fails: {text['error']}")
        texts.append(text)
    return texts


def _fault(why: str) -> ConfigError:
    fix = "set data.apply_chat_template=false, or use a tokenizer with another template"
    issue = ConfigIssue(
        "data.apply_chat_template", True, f"the tokenizer's chat template {why}", fix
    )
    return ConfigError([issue], source="data")
