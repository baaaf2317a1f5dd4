"""Plain text beside a mini-batch: the unsupervised loss (PPO-ptx) in the actor's own pass.

The documents ride along as further micro-batches of the same pipeline pass, so their gradient adds
to the policy's before the one optimizer step, in every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mppo.algos.packing import select_sequences
from mppo.algos.unsupervised import ptx_loss
from mppo.batch import Batch, Prompt, Trajectory, pack_trajectories
from mppo.data.loader import PromptLoader
from mppo.models.role_spec import Objective, Outputs
from mppo.parallel.balance import Plan, plan_microbatches
from mppo.parallel.schedule import RoleShape
from mppo.selection import concatenate_batches

METRIC = "actor/ptx_loss"


class PlainText:
    """An endless stream of documents, and their loss.

    Args:
        documents: the order they are read in; the position is the state.
        coef: weight of their loss beside the policy's.
    """

    def __init__(self, documents: PromptLoader, coef: float) -> None:
        self.documents = documents
        self.coef = coef

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands."""
        return self.documents.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position."""
        self.documents.load_state_dict(state)

    def join(
        self, batch: Batch, plan: Plan, shape: RoleShape, objective: Objective
    ) -> tuple[Batch, Plan, Objective]:
        """The next documents behind a batch's sequences.

        Args:
            batch: the global batch.
            plan: micro-batches of one mini-batch of it.
            shape: the actor's.
            objective: of the mini-batch's micro-batches.

        Returns:
            The longer batch; the plan with the documents' micro-batches at every rank's end; the
            objective of both kinds, ``L + coef mean(-log pi(text))``, with the metric
            ``actor/ptx_loss`` (nats per token, without the coefficient).
        """
        text, first = text_batch(next(self.documents)), batch.num_sequences
        num_tokens = float(text.response_mask_T.sum())
        text_plan = plan_microbatches(
            text.lengths_B.tolist(),
            range(text.num_sequences),
            shape.dp,
            shape.limits,
            shape.count_multiple,
        )
        longer = [
            [*mine, *([first + i for i in indices] for indices in theirs)]
            for mine, theirs in zip(plan, text_plan, strict=True)
        ]

        def both(outputs: Outputs, indices: tuple[int, ...]) -> tuple[Tensor, dict[str, Tensor]]:
            if not indices or indices[0] < first:
                loss, stats = objective(outputs, indices)
                return loss, {**stats, METRIC: 0.0 * loss.detach()}
            nothing, stats = objective(tuple(x_T[:0] for x_T in outputs), ())
            chosen = [index - first for index in indices]
            mask_T = select_sequences(text.response_mask_T, text.cu_seqlens, chosen)
            loss = ptx_loss(outputs[0], mask_T.to(outputs[0].device), num_tokens, 1.0)
            return nothing + self.coef * loss, {**stats, METRIC: loss.detach()}

        return concatenate_batches([batch, text]), longer, both


def text_batch(documents: Sequence[Prompt]) -> Batch:
    """Documents as sequences whose every token but the first is predicted."""
    trajectories = [
        Trajectory(
            Prompt(document.uid, document.token_ids[:1], document.data_source, "", ""),
            document.token_ids[1:],
            (0.0,) * (len(document.token_ids) - 1),
            "stop",
            0,
        )
        for document in documents
    ]
    return pack_trajectories(trajectories, [0.0] * len(trajectories))
