"""The recipe's section ``rollout.agent``: conversations of several turns."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from mppo.config.sections.section import Section


class ToolConfig(Section):
    """A Python function that the policy may call."""

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

    @property
    def openai_schema(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        function = self.model_dump(include={"name", "description", "parameters"})
        return {"type": "function", "function": function}


class AgentConfig(Section):
    """The agent that answers the policy after each of its turns."""

    path: str
    """``package.module:name`` or ``path/file.py:name`` of a function, a coroutine function or a
    class. ``mppo.agents.hermes:HermesAgent`` runs the tools of ``tools``."""
    max_turns: int = Field(default=8, gt=0)
    """Most turns of the policy in a conversation. All tokens after the prompt, an environment's
    included, fit into ``data.max_response_length``."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the function, or those of the class."""
    tools: tuple[ToolConfig, ...] = ()
    """Tools. The tokenizer's chat template writes them into the prompts, and the agent gets them as
    the argument ``tools``."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds for one call of the agent. Its process is then killed, the conversation ends, and its
    score is ``reward.on_error``."""
    memory_mb: int | None = Field(default=None, gt=0)
    """Address space, MiB, of a process that runs the agent. null: no limit."""
    processes: int = Field(default=1, ge=1)
    """Processes of each rank that run the agent."""

    @property
    def call_arguments(self) -> dict[str, Any]:
        """``arguments`` with the tools, as plain values."""
        tools = [tool.model_dump() for tool in self.tools]
        return {**self.arguments, **({"tools": tools} if tools else {})}
