"""An agent with a calculator, by the tools of OpenAI's API.

The policy calls the tool until it answers without a call; ``reward.*`` scores the text of all
turns.
"""

import json

from mppo.agents.tools import calculate

TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Evaluates an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "such as 2*(3+4)"}},
            "required": ["expression"],
        },
    },
}


async def run(client, task, turns=8):
    """Run one episode.

    Args:
        client: an ``openai.AsyncOpenAI`` client; the policy answers.
        task: ``prompt``, ``messages``, ``ground_truth`` and more of the data row.
        turns: most turns of the policy.
    """
    messages, calls = list(task["messages"]), 0
    for _ in range(turns):
        answer = await client.chat.completions.create(
            model="policy", messages=messages, tools=[TOOL]
        )
        said = answer.choices[0].message
        if not said.tool_calls:
            break
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls:
            calls += 1
            found = {"role": "tool", "tool_call_id": call.id, "content": _result(call.function)}
            messages.append(found)
    return {"numbers": {"tool_calls": calls}}


def _result(function):
    """What a call returns; the policy may correct an error."""
    try:
        return calculate(json.loads(function.arguments)["expression"])
    except Exception as error:
        return f"error: {error}"
