"""An agent for questions whose answer is a number: it says whether the policy's is too low."""

from __future__ import annotations

import re
from typing import Any

from mppo.agents.conversation import Conversation

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def hint(
    conversation: Conversation,
    too_low: str = "higher",
    too_high: str = "lower",
    unclear: str = "write a number",
    discount: float = 0.5,
) -> dict[str, Any]:
    """Compare the last number of a turn with the ground truth.

    Returns:
        The end with the reward ``discount ** (turn - 1)`` after the right number; otherwise a
        user's message, and the reward 0 should the conversation end here.
    """
    found = _NUMBER.findall(conversation.text)
    right = float(conversation.ground_truth)
    if found and float(found[-1]) == right:
        return {"done": True, "reward": discount ** (conversation.turn - 1), "numbers": {"acc": 1}}
    says = unclear
    if found:
        says = too_low if float(found[-1]) < right else too_high
    message = {"role": "user", "content": says}
    return {"messages": [message], "reward": 0.0, "numbers": {"acc": 0}}
