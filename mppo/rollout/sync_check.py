"""The check after a weight sync: servers and local engine must give equal log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mppo.rollout.local.engine import LocalEngine

_TOKENS = 48
_SEQUENCES_PER_SERVER = 2
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.3}

Scores = list[list[float]]


class SyncCheck:
    """Compares log-probabilities of random tokens with those of an oracle, the local engine.

    Args:
        oracle: an engine that loads the same weight stream.
        tolerance: largest allowed difference of a token's log-probability, in nats; None: 1e-4 in
            float32, 0.3 in bfloat16.
    """

    def __init__(
        self, oracle: LocalEngine, dtype: torch.dtype, tolerance: float | None, servers: int
    ) -> None:
        self.oracle = oracle
        self._tolerance = _TOLERANCE[dtype] if tolerance is None else tolerance
        generator = torch.Generator().manual_seed(0)
        shape = (_SEQUENCES_PER_SERVER * servers, _TOKENS)
        self._sequences = torch.randint(oracle.vocab_size, shape, generator=generator).tolist()

    def compare(self, logprobs: Callable[[Sequence[Sequence[int]]], Scores], version: int) -> None:
        """Compare the servers' log-probabilities with the oracle's. Collective; RuntimeError on
        every rank if a difference exceeds the tolerance."""
        ours, theirs = self.oracle.logprobs(self._sequences), logprobs(self._sequences)
        gap = (torch.tensor(ours) - torch.tensor(theirs)).abs().nan_to_num(nan=float("inf"))
        if gap.max() > self._tolerance:
            sequence, position = divmod(int(gap.argmax()), gap.shape[1])
            raise RuntimeError(
                f"verify_sync: with weights of version {version}, SGLang's log-probabilities "
                f"differ from transformers' by {gap.max():.3g} at token {position + 1} of probe "
                f"{sequence} (mean {gap.mean():.3g}; allowed {self._tolerance:.3g}, "
                "rollout.logprob_tolerance)"
            )
