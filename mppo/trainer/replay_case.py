"""The batch of a non-finite step, for ``mppo-replay``: written by the loop, read by the program."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mppo.batch.outputs import Experience
from mppo.dumps.experience_files import read_experience, read_one_file
from mppo.safety.disk import replace_text
from mppo.safety.input_files import read_json
from mppo.supervision.first_rank import on_first_rank
from mppo.trainer.dump import write_shares

CASE, MODELS = "case.json", "models"
_EARLIER = "experience.safetensors"
"""Cases of earlier versions have one file of all sequences, and no number of ranks."""


@dataclass(frozen=True)
class ReplayCase:
    """A mini-batch whose loss or gradient was not finite (indices of its sequences), and its
    origin; the recipe is plain values without secrets."""

    step: int
    mini_batch: tuple[int, ...]
    model: str
    recipe: dict[str, Any]
    ranks: int


def keep_case(folder: Path, case: ReplayCase, experience: Experience) -> None:
    """Write the case and the step's experience, shared out; an earlier case of the same step is
    renamed. Collective."""
    write_shares(folder, experience)
    text = json.dumps(asdict(case), indent=1) + "\n"
    on_first_rank(lambda: replace_text(folder / CASE, text))


def load_case(folder: Path) -> tuple[ReplayCase, Experience]:
    """Load what ``keep_case`` wrote; the experience is that of all sequences. A folder without a
    valid case raises ValueError, KeyError, TypeError or OSError."""
    values = read_json(folder / CASE, nan=True)
    if (folder / _EARLIER).exists():
        return ReplayCase(**values, ranks=1), read_one_file(folder / _EARLIER)
    case = ReplayCase(**values)
    return case, read_experience(folder, case.ranks)
