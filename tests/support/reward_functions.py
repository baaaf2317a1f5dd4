"""Reward functions of the tests' runs.

Every reward worker imports the file of its function: this one imports no library.
"""

from __future__ import annotations

import time
from pathlib import Path


def of_two(data_source, solution_str, ground_truth, extra_info):
    """A reward that is the same for some of the random responses to a prompt."""
    return float(sum(map(ord, solution_str)) % 2)


def of_three(data_source, solution_str, ground_truth, extra_info):
    """A reward that differs between random responses."""
    return float(sum(map(ord, solution_str)) % 3)


def two_parts(data_source, solution_str, ground_truth, extra_info):
    """A reward between 0 and 1 that differs between random responses, and two parts of it."""
    total = sum(map(ord, solution_str))
    return {"score": total % 7 / 7, "sevenths": total % 7 / 7, "halves": total % 2 / 2}


def characters(data_source, solution_str, ground_truth, extra_info):
    """A reward that depends on where a response ends."""
    return len(solution_str)


def first_vowel(data_source, solution_str, ground_truth, extra_info):
    """Right if the first letter is a vowel; the answer is the first two letters."""
    right = solution_str[:1] in set("aeiou")
    return {"score": right, "acc": right, "pred": solution_str[:2]}


def vowels(data_source, solution_str, ground_truth, extra_info):
    """The share of vowels in a response."""
    found = sum(character in "aeiou" for character in solution_str)
    return {"score": found / max(len(solution_str), 1), "length": len(solution_str)}


def divide(data_source, solution_str, ground_truth, extra_info, by):
    return {"score": 1 / by, "acc": True}


def stuck(data_source, solution_str, ground_truth, extra_info, marker):
    Path(marker).touch()
    time.sleep(600)
