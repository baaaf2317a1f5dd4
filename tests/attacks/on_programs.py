"""Attacks on the sandbox for programs."""

from __future__ import annotations

from attacks.attack import Table

TABLE = Table(
    "Programs in the sandbox",
    "Each program runs in namespaces of its own, and the parent decides its score.",
    (),
)
