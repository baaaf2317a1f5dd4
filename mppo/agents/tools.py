"""Tools for ``mppo.agents.hermes:HermesAgent``."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

from mppo.rewards.verifiers import gsm8k_flexible

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_LONGEST = 200
"""Most characters of an expression."""


def calculate(expression: str) -> str:
    """Evaluate an expression of numbers, ``+ - * / // %`` and brackets; ValueError if it holds
    something else, or is too long."""
    if len(expression) > _LONGEST:
        raise ValueError(f"an expression has at most {_LONGEST} characters")
    return f"{_value(ast.parse(expression.strip(), mode='eval').body):.12g}"


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(f"{ast.unparse(node)} is not arithmetic")


def calc_gsm8k_reward(answer: str, ground_truth: str) -> str:
    """Tell whether an answer to a question of GSM8K is right, as verl's tool of this name does."""
    text = str(answer)
    reward = gsm8k_flexible(text if "####" in text else f"#### {text}", ground_truth, {})
    return f"Current parsed answer='{text}' reward={reward}"
