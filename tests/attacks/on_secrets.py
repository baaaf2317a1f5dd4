"""Attacks on secrets."""

from __future__ import annotations

from attacks.attack import Table

TABLE = Table("Secrets", "Secrets are recognised by key and by value, and never written.", ())
