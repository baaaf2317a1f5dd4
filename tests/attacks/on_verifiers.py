"""Attacks on the verifiers of model text."""

from __future__ import annotations

from attacks.attack import Table

TABLE = Table(
    "Answers of the model", "Verifiers run in processes that are killed after reward.timeout_s.", ()
)
