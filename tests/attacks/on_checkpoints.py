"""Attacks on checkpoints."""

from __future__ import annotations

from attacks.attack import Table

TABLE = Table(
    "Checkpoints", "Nothing of a checkpoint is unpickled outside the restricted unpickler.", ()
)
