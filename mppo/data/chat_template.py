"""Rendering of chat templates, which are programs from a tokenizer, in a limited process.

Jinja's sandbox denies a template files and Python, but does not stop an endless loop or the use of
all memory. Only a separate process with limits of time and memory does.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from mppo.config.errors import ConfigError, ConfigIssue
from mppo.hub.builtin import CHAT_TEMPLATE
from mppo.safety.input_files import parse_json

CPU_S, CPU_S_PER_PROMPT, WALL_S = 3.0, 0.01, 60.0
"""Processor time for a data set, processor time per prompt, and the constant part of the wall-clock
limit, to which ten times the processor time is added."""
MEMORY_MB, MAX_CHARACTERS = 1024, 4 << 20
"""Memory of the process in MiB, to which a part for the prompts is added, and characters of one
rendered prompt."""
CHILD = Path(__file__).with_name("chat_template_child.py")


def render_with(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Sequence[Mapping]],
    key: str,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[str]:
    """Render every conversation with the chat template of a tokenizer.

    Args:
        conversations: lists of messages with ``role`` and ``content``.
        key: the recipe key that asks for a chat template, for messages.
        add_generation_prompt: end with what comes before a response.
        tools: schemas of tools, for the template.

    Raises:
        ConfigError: the tokenizer has no chat template, or see :func:`render`.
    """
    template = template_of(tokenizer, key)
    if template == CHAT_TEMPLATE:
        return rendered_builtin(tokenizer, conversations, add_generation_prompt)
    variables: dict[str, Any] = dict(tokenizer.special_tokens_map)
    if tools:
        variables["tools"] = list(tools)
    return render(template, variables, conversations, key, add_generation_prompt)


def render_each(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Sequence[Mapping]], key: str
) -> list[str | ConfigError]:
    """As ``render_with``, with an error in place of each conversation that cannot be rendered."""
    template = template_of(tokenizer, key)
    if template == CHAT_TEMPLATE:
        return list(rendered_builtin(tokenizer, conversations, True))
    job = template_job(template, tokenizer.special_tokens_map, True)
    found: list[str | ConfigError] = []
    while len(found) < len(conversations):
        texts, killed = _in_child(job, conversations[len(found) :], key, keep_going=True)
        found += texts
        if len(found) < len(conversations):  # the next one needs more than a limit
            found.append(killed)
    return found


def template_of(tokenizer: PreTrainedTokenizerBase, key: str) -> str:
    """The chat template of a tokenizer; ConfigError if it has none, or several without a
    default."""
    if not tokenizer.chat_template:
        fix = f"set {key}=false, or use a tokenizer with one"
        raise ConfigError([ConfigIssue(key, True, "the tokenizer has no chat template", fix)])
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        fix = "name one of them default in its tokenizer_config.json"
        raise ConfigError([ConfigIssue(key, True, str(error), fix)]) from error


def rendered_builtin(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Sequence[Mapping]], ask: bool
) -> list[str]:
    """Render with the embedded models' template, which needs no limits."""
    return tokenizer.apply_chat_template(  # type: ignore[return-value]
        [[dict(message) for message in messages] for messages in conversations],
        add_generation_prompt=ask,
        tokenize=False,
    )


def render(
    template: str,
    variables: Mapping[str, Any],
    conversations: Sequence[Sequence[Mapping]],
    key: str = "data.apply_chat_template",
    add_generation_prompt: bool = True,
) -> list[str]:
    """Render every conversation with a Jinja template in a process with limits.

    Args:
        variables: variables of the template besides the messages: the tokenizer's special tokens.
        key: the recipe key that asks for a chat template, for messages.
        add_generation_prompt: end with what comes before a response.

    Raises:
        ConfigError: the template fails, exceeds a limit of time or memory, or renders a text of
            more than ``MAX_CHARACTERS``.
    """
    job = template_job(template, variables, add_generation_prompt)
    found, killed = _in_child(job, conversations, key, keep_going=False)
    texts = [text for text in found if isinstance(text, str)]
    for text in found:
        if isinstance(text, ConfigError):
            raise text
    if len(texts) < len(conversations):
        raise killed
    return texts


def template_job(template: str, variables: Mapping[str, Any], ask: bool) -> dict[str, Any]:
    """What the process needs besides conversations and limits."""
    return {
        "path": sys.path,
        "template": template,
        "variables": dict(variables),
        "add_generation_prompt": ask,
        "max_characters": MAX_CHARACTERS,
    }


def _in_child(
    job: Mapping[str, Any], conversations: Sequence[Sequence[Mapping]], key: str, keep_going: bool
) -> tuple[list[str | ConfigError], ConfigError]:
    """The text or error of each conversation up to the one that a limit stopped, and the error of
    that one. With ``keep_going``, those after one that fails are rendered, too."""
    cpu_s = CPU_S + CPU_S_PER_PROMPT * len(conversations)
    job = {**job, "conversations": conversations, "keep_going": keep_going, "cpu_s": cpu_s}
    memory_mb = MEMORY_MB + (20 * len(json.dumps(job, default=str)) >> 20)
    text = json.dumps({**job, "memory_mb": memory_mb}, default=str)
    limit, last = WALL_S + 10 * cpu_s, ""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            ended = subprocess.run(
                [sys.executable, "-I", str(CHILD)],
                input=text.encode(),
                stdout=output,
                stderr=errors,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            killed = template_error(key, f"is not done after {limit:.0f} s")
        else:
            errors.seek(0)
            last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
            code = ended.returncode
            why = f"exit code {code}, {last}" if last else f"killed by {-code}"
            killed = template_error(key, f"takes more than {cpu_s:.0f} s or {memory_mb} MB ({why})")
        output.seek(0)
        return _texts(output, key), killed


def _texts(lines: Iterable[bytes], key: str) -> list[str | ConfigError]:
    texts: list[str | ConfigError] = []
    for line in lines:
        if not line.endswith(b"\n"):
            break  # the process was killed while it wrote this line
        try:
            text = parse_json(line)
        except ValueError as error:
            text = {"error": f"renders an invalid text: {error}"}
        else:
            text = text if isinstance(text, str) else {"error": f"fails: {text['error']}"}
        texts.append(text if isinstance(text, str) else template_error(key, text["error"]))
    return texts


def template_error(key: str, why: str) -> ConfigError:
    fix = f"set {key}=false, or use a tokenizer with another template"
    issue = ConfigIssue(key, True, f"the tokenizer's chat template {why}", fix)
    return ConfigError([issue], source="data")
