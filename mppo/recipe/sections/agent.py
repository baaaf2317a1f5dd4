"""The recipe's section ``rollout.agent``: conversations of several turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from mppo.recipe.sections.section import Section


class ToolConfig(Section):
    """A Python function that the policy may call. OpenAI's form of a tool, with ``type`` and
    ``function``, is read too, with ``path`` beside them."""

    path: str
    """``package.module:function`` or ``path/file.py:function``. It gets the call's arguments by
    name, and ``ground_truth`` and ``extra_info`` of the data row if it has such parameters."""
    name: str
    """Name by which the policy calls it."""
    description: str = ""
    """What it does, for the policy."""
    parameters: dict[str, Any] = Field(
        default_factory=lambda: {"type": "object", "properties": {}, "required": []}
    )
    """JSON schema of its arguments, with ``properties`` and ``required``."""

    @model_validator(mode="before")
    @classmethod
    def _from_openai(cls, given: Any) -> Any:
        """Read the form of OpenAI's API: ``{type: function, function: {name: ..., ...}}``."""
        if not isinstance(given, dict) or not isinstance(given.get("function"), dict):
            return given
        beside = {key: value for key, value in given.items() if key not in ("type", "function")}
        content = {key: value for key, value in given["function"].items() if key != "strict"}
        return {**content, **beside}

    @property
    def openai_schema(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        function = self.model_dump(include={"name", "description", "parameters"})
        return {"type": "function", "function": function}


class AgentConfig(Section):
    """The agent of an episode, in one of three forms: ``run`` and ``command`` ask the policy for
    its turns as a client of OpenAI or Anthropic, and ``path`` answers the policy after each of its
    turns. Each episode goes at its own pace."""

    run: str | None = None
    """``package.module:name`` or ``path/file.py:name`` of ``async def run(client, task)`` with a
    client of the package ``openai``. It returns the reward, a mapping with ``reward`` and
    ``numbers``, or nothing."""
    command: str | None = None
    """A command that runs one episode. It gets ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``,
    ``ANTHROPIC_BASE_URL``, ``ANTHROPIC_API_KEY``, and the task as a line of JSON on its standard
    input. The last line that it prints may be its reward."""
    path: str | None = None
    """``package.module:name`` or ``path/file.py:name`` of a function, a coroutine function or a
    class that answers a turn. ``mppo.agents.hermes:HermesAgent`` runs the tools of ``tools``."""
    max_turns: int = Field(default=8, gt=0)
    """Most turns of the policy in an episode. With ``path`` all tokens after the prompt, an
    environment's included, fit into ``data.max_response_length``; with ``run`` and ``command`` each
    sequence fits into ``data.max_prompt_length`` + ``data.max_response_length``."""
    max_seconds: float = Field(default=1800.0, gt=0)
    """Longest duration of an episode. Its processes then end, and its score is
    ``reward.on_error``."""
    max_concurrent: int | None = Field(default=None, ge=1)
    """Most episodes at the same time on each rank. null: 64 with ``command``, which starts a
    process for each, and otherwise 256."""
    tool_format: str = "hermes"
    """How the policy writes calls of tools, for ``run`` and ``command``: ``hermes``, or a
    ``tool-call-parser`` of SGLang, such as ``qwen25`` or ``llama3``."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the function, or those of the class."""
    tools: tuple[ToolConfig, ...] = ()
    """Tools of ``path``. The tokenizer's chat template writes them into the prompts, and the agent
    gets them as the argument ``tools``."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds for one call of ``path``. Its process is then killed, the conversation ends, and its
    score is ``reward.on_error``."""
    memory_mb: int | None = Field(default=None, gt=0)
    """Address space, MiB, of a process that runs ``path``. null: no limit."""
    processes: int = Field(default=1, ge=1)
    """Processes of each rank that run ``path`` or ``run``."""

    @property
    def most_at_once(self) -> int:
        """``max_concurrent``, or its default."""
        return self.max_concurrent or (64 if self.command is not None else 256)

    @property
    def uses_endpoint(self) -> bool:
        """Whether the agent asks the policy for its turns."""
        return self.path is None

    @property
    def call_arguments(self) -> dict[str, Any]:
        """``arguments`` with the tools, as plain values."""
        tools = [tool.model_dump() for tool in self.tools]
        return {**self.arguments, **({"tools": tools} if tools else {})}


class EnvironmentConfig(Section):
    """An environment of another library, by name: it has the prompts and runs the episodes.
    ``data.task``, ``data.task_kwargs``, ``rollout.agent.run`` and ``rollout.agent.arguments``
    follow from it."""

    verifiers: str
    """Name of an installed environment of the package ``verifiers``: a module with
    ``load_environment``."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of its ``load_environment``."""


def following_environment(document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The keys that follow from a document's ``rollout.environment``; {} without one."""
    rollout = document.get("rollout")
    given = rollout.get("environment") if isinstance(rollout, Mapping) else None
    name = given.get("verifiers") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(name, str):
        return {}
    arguments = given.get("arguments") or {}
    own = {"environment": name, "arguments": arguments}
    return {
        "data": {"task": f"verifiers:{name}", "task_kwargs": arguments},
        "rollout": {"agent": {"run": "mppo.data.verifiers_environment:run", "arguments": own}},
    }
