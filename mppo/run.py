"""A run: everything an iteration works with."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from mppo.algos.kl_controller import KLController
from mppo.algos.reward_normalization import RunningMoments
from mppo.checkpoint.checkpointer import Checkpointer
from mppo.config.schema import Recipe
from mppo.data.loader import PromptLoader
from mppo.data.source import PromptSet
from mppo.parallel import device
from mppo.parallel.phase import phase
from mppo.report.reporter import Reporter
from mppo.rewards.scorer import Scorer
from mppo.roles import Roles
from mppo.rollout.engine import RolloutEngine


@dataclass
class Run:
    """Everything an iteration works with, and how long its stages took."""

    recipe: Recipe
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptLoader
    validation: PromptSet
    engine: RolloutEngine
    scorer: Scorer
    roles: Roles
    kl: KLController
    moments: RunningMoments
    checkpoints: Checkpointer
    reporter: Reporter
    total_steps: int
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str, step: int) -> Iterator[None]:
        """Time a stage, and name it should it fail."""
        start = time.perf_counter()
        with phase(name, step):
            yield
        device.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
