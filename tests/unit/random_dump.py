"""A dump of two random sequences, for tests that read dumps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from random_outputs import outputs_of

from mppo.config.sections.algorithm import AlgorithmConfig
from mppo.dumps.experience_files import write_share
from mppo.dumps.step_dump import SequenceRow, StepDump, step_folder, write_header, write_pieces
from mppo.trainer.advantages import estimate


def write_dump(
    run_dir: Path,
    step: int,
    prompt: str = "2+2=",
    text: str = "ab",
    numbers: Mapping[str, float] | None = None,
    experts: tuple[int, int] = (0, 0),
) -> Path:
    """Write the dump of a step; token 3 is ``ab3``. Returns its folder.

    Args:
        run_dir: the run folder.
        step: the step.
        prompt: text of both prompts.
        text: beginning of every token's text.
        numbers: further numbers of both scores.
        experts: (layers, k) of the engine's choices of experts.
    """
    outputs = outputs_of([3, 2], scores=[1.0, 0.0])
    chosen_T = torch.zeros(len(outputs.batch.tokens_T), *experts, dtype=torch.int16)
    outputs = replace(outputs, batch=replace(outputs.batch, routed_experts_T=chosen_T))
    folder = step_folder(run_dir, step)
    folder.mkdir(parents=True)
    write_share(folder, 0, estimate(outputs, AlgorithmConfig(), 0.0))
    write_pieces(folder, 0, {i: f"{text}{i}" for i in range(len(outputs.batch.tokens_T))})
    rows = tuple(
        SequenceRow(0, "src", prompt, "4", "stop", [(0, tokens)], score, numbers=numbers or {})
        for tokens, score in ((3, 1.0), (2, 0.0))
    )
    write_header(folder, StepDump(step, "00", 1, 0.1, rows))
    return folder
