"""A dump of two random sequences, for tests that read dumps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from random_outputs import outputs_of

from mppo.dumps.experience_files import write_share
from mppo.dumps.step_dump import SequenceRow, StepDump, step_folder, write_header, write_pieces
from mppo.recipe.sections.algorithm import AlgorithmConfig
from mppo.trainer.advantages import estimate


def write_dump(
    run_dir: Path,
    step: int,
    prompt: str = "2+2=",
    text: str = "ab",
    numbers: Mapping[str, float] | None = None,
    experts: tuple[int, int] = (0, 0),
    tokens: Sequence[int] | None = None,
    episode: int | None = None,
) -> Path:
    """Write the dump of a step; token 3 is ``ab3``. Returns its folder.

    Args:
        run_dir: the run folder.
        step: the step.
        prompt: text of both prompts.
        text: beginning of every token's text.
        numbers: further numbers of both scores.
        experts: (layers, k) of the engine's choices of experts.
        tokens: of the first sequence (4) and the second (3), instead of 0 to 6.
        episode: of both sequences; None: each is one.
    """
    outputs = outputs_of([3, 2], scores=[1.0, 0.0])
    if tokens is not None:
        batch = replace(outputs.batch, tokens_T=torch.tensor(tokens))
        outputs = replace(outputs, batch=batch)
    chosen_T = torch.zeros(len(outputs.batch.tokens_T), *experts, dtype=torch.int16)
    outputs = replace(outputs, batch=replace(outputs.batch, routed_experts_T=chosen_T))
    folder = step_folder(run_dir, step)
    folder.mkdir(parents=True)
    write_share(folder, 0, estimate(outputs, AlgorithmConfig(), 0.0))
    write_pieces(folder, 0, {i: f"{text}{i}" for i in range(len(outputs.batch.tokens_T))})
    rows = tuple(
        SequenceRow(
            0, "src", prompt, "4", "stop", [(0, length)], score, numbers=numbers or {},
            episode=episode,
        )
        for length, score in ((3, 1.0), (2, 0.0))
    )  # fmt: skip
    write_header(folder, StepDump(step, "00", 1, 0.1, rows))
    return folder
