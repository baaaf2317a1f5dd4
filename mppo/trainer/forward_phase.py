"""The forward stage of an iteration: log-probabilities and values before any update."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from mppo.batch import Batch, ModelOutputs
from mppo.models.heads.outputs import Outputs
from mppo.models.role import Role
from mppo.models.role_spec import PassInputs
from mppo.supervision.phase import phase
from mppo.trainer.roles import Roles

TIMED_AS = {"actor": "old_log_prob", "ref": "ref", "critic": "values"}
"""verl's name for what each role's forward pass yields, under which it is timed."""


class ForwardPhase:
    """Forward passes of reference, actor and critic over a batch, one role at a time.

    The actor is left out where the recipe takes the engine's log-probabilities instead.

    Args:
        roles: the models.
        batch: the global batch.

    Attributes:
        order: the roles that compute; the reference comes before the actor, whose pass may read
            its hidden states.
    """

    def __init__(self, roles: Roles, batch: Batch) -> None:
        self._roles, self._batch = roles, batch
        actor = roles.actor if roles.recipe.needs_actor_logprobs else None
        self.order = [role for role in (roles.ref, actor, roles.critic) if role is not None]
        self._outputs: dict[str, Any] = {}
        self._ref_hidden_T: Tensor | None = None

    def compute(self, role: Role) -> None:
        """The forward pass of one role; collective."""
        name, start = role.name, time.perf_counter()
        with phase(f"computing {TIMED_AS[name]} with {name}"):
            self._outputs[name] = self._forward(role)
        self._roles.seconds[TIMED_AS[name]] = time.perf_counter() - start

    def _forward(self, role: Role) -> Outputs:
        plan = role.plan(self._batch, training=False)
        if role is self._roles.ref and self._roles.recipe.needs_full_kl:
            outputs, self._ref_hidden_T = role.forward_with_states(self._batch, plan)
            return outputs
        if role is self._roles.actor:
            return role.forward(self._batch, plan, PassInputs(self._ref_hidden_T))
        return role.forward(self._batch, plan)

    def outputs(self) -> ModelOutputs:
        """The batch with all roles' outputs, once every role has computed."""
        batch, recipe = self._batch, self._roles.recipe
        actor, ref, critic = (self._outputs.get(name) for name in ("actor", "ref", "critic"))
        logprobs_T = batch.rollout_logprobs_T if actor is None else actor.logprobs_T
        return ModelOutputs(
            batch=batch,
            logprobs_T=logprobs_T,
            ref_logprobs_T=logprobs_T if ref is None else ref.logprobs_T,
            values_T=torch.zeros_like(logprobs_T) if critic is None else critic.values_T,
            has_actor_logprobs=actor is not None,
            full_kl_T=None if actor is None else actor.full_kl_T,
            ref_hidden_T=self._ref_hidden_T if recipe.actor.learns_full_kl else None,
        )
