"""A short supervised warm start, for models that begin with random weights.

PPO improves what a policy sometimes does already; a model with random weights never earns a reward.
The warm start trains on correct answers for ``trainer.warm_start_steps`` steps and writes the
result as a Hugging Face folder, from which every role then starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from mppo.algos.token_axis import select_sequences
from mppo.batch.batch import Batch
from mppo.batch.episode import Episode, EpisodeTokens
from mppo.batch.head_outputs import HeadOutputs, PolicyOutputs
from mppo.batch.mini_batch import MiniBatch
from mppo.batch.packing import pack_episodes
from mppo.batch.prompt import Prompt
from mppo.data.examples import SupervisedExample, supervised_examples
from mppo.data.source import PromptSet
from mppo.models.optimizer import StepResult
from mppo.models.role import Role, step_together
from mppo.models.streamed_role import forward_backward
from mppo.parallel.groups import GroupRegistry
from mppo.recipe.schema import Recipe
from mppo.recipe.sections.optim import OptimConfig
from mppo.recipe.sections.role_config import RoleConfig
from mppo.supervision import stop_request
from mppo.supervision.phase import phase
from mppo.trainer.update.update_stage import NonFiniteStep


def train_sft(
    recipe: Recipe,
    folder: Path,
    hf_config: PretrainedConfig,
    prompts: PromptSet,
    tokenizer: PreTrainedTokenizerBase,
    registry: GroupRegistry,
    out: Path,
    on_step: Callable[[int, float], None],
) -> Path | None:
    """Train on correct answers and write the result. Collective.

    ``on_step`` gets each step's number and loss (nats per answer token). Returns, on the first
    rank, the new path of a folder ``out`` that existed and that mppo did not write; otherwise None.
    Nothing is written if a loss or gradient was not finite (NonFiniteStep), or a stop was requested
    (StepInterrupted).
    """
    trainer, size = recipe.trainer, recipe.trainer.warm_start_batch_size
    optim = OptimConfig(lr=trainer.warm_start_lr, lr_decay_style="cosine")
    actor = recipe.roles()[0]
    settings = RoleConfig("warm start", actor.batching, actor.megatron, actor.dtype, optim=optim)
    with phase("warm start"):
        groups = registry.of(actor.megatron.layout(torch.distributed.get_world_size()))
        role = Role(settings, folder, hf_config, groups, trainer.warm_start_steps)
        examples = supervised_examples(
            prompts, tokenizer, trainer.warm_start_steps * size, trainer.seed
        )
        for step in range(trainer.warm_start_steps):
            batch = _as_batch(examples[step * size : (step + 1) * size])
            loss, result = _train_step(role, batch)
            if not result.applied:
                raise NonFiniteStep(
                    f"warm start step {step + 1} of {trainer.warm_start_steps}",
                    {role.name: result},
                    f"lower trainer.warm_start_lr ({trainer.warm_start_lr:g})",
                    tuple(range(batch.num_sequences)),
                )
            on_step(step + 1, loss)
            stop_request.sync()
        return role.weights.save(out)


def _as_batch(examples: list[SupervisedExample]) -> Batch:
    episodes = [
        Episode.sampled(
            Prompt(uid, prompt_ids, "supervised", "", ""),
            EpisodeTokens(answer_ids, torch.zeros(len(answer_ids))),
            "stop",
            0,
        )
        for uid, (prompt_ids, answer_ids) in enumerate(examples)
    ]
    return pack_episodes(episodes)


def _train_step(role: Role, batch: Batch) -> tuple[float, StepResult]:
    weight_T = batch.response_mask_T / batch.response_mask_T.sum()
    assert role.optimizer is not None
    role.optimizer.advance()
    objective = NegativeLogLikelihood(batch, weight_T)
    mini_batch = MiniBatch(batch, role.plan(batch, training=True), objective)
    statistics = forward_backward(role, mini_batch)
    return statistics["loss"], step_together([role])[role.name]


@dataclass(frozen=True)
class NegativeLogLikelihood:
    """Sum of ``-log pi`` over answer tokens with weights float32 ``[T]`` of the batch."""

    batch: Batch
    weight_T: Tensor

    @property
    def statistics(self) -> tuple[str, ...]:
        return ("loss",)

    def __call__(
        self, outputs: HeadOutputs, indices: tuple[int, ...]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(outputs, PolicyOutputs)
        logprobs_T = outputs.logprobs_T
        weights = select_sequences(self.weight_T, self.batch.cu_seqlens, list(indices))
        loss = -(weights.to(logprobs_T.device) * logprobs_T).sum()
        return loss, {"loss": loss.detach()}
