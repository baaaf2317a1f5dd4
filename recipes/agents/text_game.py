"""An agent that plays an environment of Gymnasium whose observations and actions are texts.

    rollout:
      agent:
        run: recipes/agents/text_game.py:run
        arguments: {environment: "my_games:Hangman-v0"}   # a name of gymnasium.make

It needs the package ``gymnasium``. An observation is a message to the policy, and its answer is the
action. The reward is the sum of the environment's rewards. The environment gets the data row as
``options`` of ``reset``, and a seed that is the same for all episodes of a row.
"""

import asyncio
import zlib

import gymnasium


async def run(client, task, environment, settings=None, turns=8):
    """Run one episode.

    Args:
        client: an ``openai.AsyncOpenAI`` client; the policy answers.
        task: ``prompt``, ``messages``, ``ground_truth`` and more of the data row.
        environment: its name; ``module:name`` imports the module first.
        settings: arguments of the environment.
        turns: most turns of the policy.
    """
    game = await asyncio.to_thread(gymnasium.make, environment, **(settings or {}))
    try:
        seed = zlib.crc32(f"{task['prompt']}\n{task['ground_truth']}".encode())
        seen, _ = await asyncio.to_thread(game.reset, seed=seed, options=task)
        messages, reward, ended, steps = _with_text(task["messages"], seen), 0.0, False, 0
        while not ended and steps < turns:
            answer = await client.chat.completions.create(model="policy", messages=messages)
            action = answer.choices[0].message.content or ""
            seen, gained, terminated, truncated, _ = await asyncio.to_thread(game.step, action)
            reward, steps, ended = reward + float(gained), steps + 1, terminated or truncated
            messages.append({"role": "assistant", "content": action})
            messages.append({"role": "user", "content": str(seen)})
    finally:
        await asyncio.to_thread(game.close)
    return {"reward": reward, "numbers": {"steps": steps, "ended": float(ended)}}


def _with_text(messages, text):
    """The messages with a text at the end of the last one; templates want turns to alternate."""
    *before, last = messages
    content = "\n\n".join(part for part in (last["content"], str(text)) if part)
    return [*before, {**last, "content": content}]
