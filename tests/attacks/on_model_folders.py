"""Attacks on model folders and data files."""

from __future__ import annotations

from attacks.attack import Table

TABLE = Table("Model folders and data", "Headers are checked before anything is read by them.", ())
