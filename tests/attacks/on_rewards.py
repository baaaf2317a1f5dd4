"""Attacks on the client of reward servers."""

from __future__ import annotations

from attacks.attack import Table

TABLE = Table("Reward servers", "Size, time and content of an answer are bounded and checked.", ())
