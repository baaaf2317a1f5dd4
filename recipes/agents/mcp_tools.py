"""An agent whose tools are those of servers of the Model Context Protocol.

    rollout:
      agent:
        run: recipes/agents/mcp_tools.py:run
        arguments:
          servers:
            - {command: python, args: [my_server.py]}   # by its standard input and output
            - {url: "http://127.0.0.1:8000/mcp"}        # by HTTP

It needs the package ``mcp``, from 2.0. The policy calls tools until it answers without a call;
``reward.*`` scores the text of all turns. A server with a command is started for each episode, and
ends with it; one with a URL gets a session for each.
"""

import json
from contextlib import AsyncExitStack

from mcp import Client, MCPError, StdioServerParameters


async def run(client, task, servers, turns=8):
    """Run one episode.

    Args:
        client: an ``openai.AsyncOpenAI`` client; the policy answers.
        task: ``prompt``, ``messages``, ``ground_truth`` and more of the data row.
        servers: for each, ``url``, or ``command`` and perhaps ``args``, ``env`` and ``cwd``.
        turns: most turns of the policy.
    """
    calls = failed = 0
    async with AsyncExitStack() as stack:
        owners, schemas = {}, []
        for server in servers:
            where = server["url"] if "url" in server else StdioServerParameters(**server)
            owner = await stack.enter_async_context(Client(where))
            for tool in (await owner.list_tools()).tools:
                if tool.name in owners:
                    raise ValueError(f"two servers have a tool named {tool.name}")
                owners[tool.name] = owner
                schemas.append(_schema(tool))
        messages = list(task["messages"])
        for _ in range(turns):
            answer = await client.chat.completions.create(
                model="policy", messages=messages, tools=schemas
            )
            said = answer.choices[0].message
            if not said.tool_calls:
                break
            messages.append(said.model_dump(exclude_none=True))
            for call in said.tool_calls:
                text, is_error = await _call(owners, call.function)
                calls, failed = calls + 1, failed + is_error
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
    return {"numbers": {"tool_calls": calls, "failed_tool_calls": failed}}


def _schema(tool):
    """A tool of a server as OpenAI's clients describe it."""
    function = {"name": tool.name, "description": tool.description or ""}
    return {"type": "function", "function": {**function, "parameters": tool.input_schema}}


async def _call(owners, function):
    """What a tool answers, and whether this is an error, which the policy may correct."""
    try:
        arguments = json.loads(function.arguments)
        if not isinstance(arguments, dict):
            return "the arguments are no JSON object", True
        found = await owners[function.name].call_tool(function.name, arguments)
    except (json.JSONDecodeError, MCPError) as error:
        return str(error), True
    return "\n".join(part.text for part in found.content if part.type == "text"), found.is_error
