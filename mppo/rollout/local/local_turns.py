"""Turns by the local engine: texts that wait together are continued in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mppo.batch.prompt import Prompt
from mppo.config.sections.rollout import SamplingConfig
from mppo.rollout.local.decoding import decode
from mppo.rollout.local.sampling import row_keys
from mppo.rollout.turns import Turn, TurnRequest, deal_prompts


class LocalTurns:
    """A ``TurnEngine`` that continues up to ``batch_size`` texts in one batch; ``stops``: tokens
    that end a turn, int64."""

    calls = 1

    def __init__(
        self, model: Any, version: int, stops: Tensor, world: int, batch_size: int
    ) -> None:
        self._model, self._version, self._stops = model, version, stops
        self._world, self.at_once = world, batch_size

    def homes(self, prompts: Sequence[Prompt], n: int) -> dict[int, int]:
        return deal_prompts(prompts, n, range(self._world))

    def generate(
        self, requests: Sequence[TurnRequest], sampling: SamplingConfig, seed: int
    ) -> list[Turn]:
        device = self._stops.device
        uids, samples = torch.tensor([each.stream for each in requests], device=device).unbind(1)
        extra = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=device)
        rows = decode(
            self._model,
            [each.token_ids for each in requests],
            list(range(len(requests))),
            row_keys(seed, uids, samples),
            sampling,
            torch.tensor([each.max_tokens for each in requests], device=device),
            torch.cat([self._stops, extra]),
        )
        sizes = zip(rows.length_R.tolist(), rows.stopped_R.tolist(), strict=True)
        return [
            Turn(
                rows.tokens[row, :length].cpu(),
                rows.logprobs[row, :length].cpu(),
                "stop" if stopped else "length",
                self._version,
            )
            for row, (length, stopped) in enumerate(sizes)
        ]

    def abort(self) -> None:
        """Do nothing: a batch runs to its end."""
