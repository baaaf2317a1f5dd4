"""One prompt, tokenised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor


class ComparedByValue:
    """Dataclasses with tensors are equal if all fields are; tensors are compared as a whole."""

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(_same(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))  # pyright: ignore[reportArgumentType]  # subclasses are dataclasses

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # Python's way to say: not hashable

    def _convert(self, name: str, dtype: torch.dtype) -> None:
        given = getattr(self, name)
        if not isinstance(given, Tensor) or given.dtype != dtype:
            object.__setattr__(self, name, torch.as_tensor(given, dtype=dtype))


def _same(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or torch.equal(a, b)
    return a == b


@dataclass(frozen=True, eq=False)
class Prompt(ComparedByValue):
    """One prompt, tokenised.

    Args:
        uid: position in the data order, unique within a run; samples of one prompt share it.
        token_ids: int32 ``[P]`` (any sequence is converted), after chat template, filtering and
            truncation.
        data_source: name of the task or data set; selects the verifier.
        extra: other columns of the data row.
        verifier: the verifier of the prompt's source; None: that of the recipe or data source.
        messages: the conversation, with ``role`` and ``content`` in each message; empty if the
            prompt is rendered without a chat template.
    """

    uid: int
    token_ids: Tensor
    data_source: str
    ground_truth: str
    text: str
    extra: dict = field(default_factory=dict)
    verifier: str | None = None
    messages: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        self._convert("token_ids", torch.int32)
