"""The state of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch.autograd.profiler import record_function
from transformers import PreTrainedTokenizerBase

from mppo.algos.kl import KLController
from mppo.algos.reward_normalization import RewardStats
from mppo.batch.prompt import Prompt
from mppo.checkpoint.checkpointer import Checkpointer
from mppo.data.loader import PromptLoader
from mppo.data.source import PromptSet
from mppo.parallel import device
from mppo.recipe.schema import Recipe
from mppo.report.reporter import Reporter
from mppo.rewards.early import EarlyScores
from mppo.rewards.scorer import Scorer
from mppo.rollout.engine import Generation, RolloutEngine
from mppo.supervision.phase import phase
from mppo.trainer.run_folder import RunFolder
from mppo.trainer.run_roles import Roles
from mppo.trainer.start.user_parts import Callbacks


@dataclass(frozen=True)
class PendingRollout:
    """Prompts, not consumed yet, whose responses are being generated and scored."""

    prompts: list[Prompt]
    generation: Generation


@contextmanager
def exporting(engine: RolloutEngine, roles: Roles) -> Iterator[None]:
    """Inside the context the weights that an export reads are on the device. If they come from host
    memory, the engine releases its own before, and gets the weights again for generation."""
    if roles.placement.moves_weights:
        engine.sleep()
    with roles.placement.sending_weights():
        yield


@dataclass
class Run:
    """The parts of a run that an iteration uses. ``seconds`` is the duration of each stage of the
    current step; ``ahead`` the next iteration's pending rollout (``rollout.max_staleness``);
    ``last`` number and metrics of the last step that is done (of a resumed run no metrics);
    ``early`` scores of the responses that have arrived."""

    recipe: Recipe
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptLoader
    validation: PromptSet
    engine: RolloutEngine
    scorer: Scorer
    roles: Roles
    kl: KLController
    reward_stats: RewardStats
    checkpoints: Checkpointer
    reporter: Reporter
    folder: RunFolder
    total_steps: int
    callbacks: Callbacks
    seconds: dict[str, float] = field(default_factory=dict)
    ahead: PendingRollout | None = None
    last: tuple[int, dict[str, float]] = (0, {})

    def __post_init__(self) -> None:
        self.early = EarlyScores(self.scorer)

    @property
    def gate_holds(self) -> bool:
        """Whether the run is a value pretraining whose gate holds."""
        return self.roles.gate is not None and self.roles.gate.holds

    @contextmanager
    def stage(self, name: str, step: int) -> Iterator[None]:
        """Time a stage, and name it as the phase for error messages. Copies of parts of roles on
        their own stream may outlast it."""
        start = time.perf_counter()
        with phase(name, step), record_function(name):
            yield
            device.wait_for_stream(device.device())
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def stop(self) -> None:
        """Stop engine, scoring and reporter; callable at any point of the run."""
        self.engine.stop()
        self.early.drop()
        self.reporter.close()
