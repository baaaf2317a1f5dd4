"""The reward of ``critic_keeps_up.py``'s value pretraining: a count, given at the end."""

from typing import Any

LETTER, MOST = "a", 4


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    """How often the answer says ``LETTER``, over ``MOST``."""
    return solution_str.count(LETTER) / MOST
