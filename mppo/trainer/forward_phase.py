"""The forward stage of an iteration: log-probabilities and values before any update."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mppo.batch.batch import Batch
from mppo.batch.head_outputs import HeadOutputs, add_outputs
from mppo.batch.microbatches import MicroBatchPlan
from mppo.batch.mini_batch import TOKENS_ONLY, PassInputs
from mppo.batch.outputs import Outputs
from mppo.models.role import Role
from mppo.models.streamed_role import StreamedForward, forward, forward_with_states
from mppo.models.work_share import ranges_of
from mppo.pipeline.executor import carry_out
from mppo.pipeline.links import Links
from mppo.pipeline.schedule import forward_list
from mppo.planning.residency import phase_of_role
from mppo.recipe.schedule_kind import forward_groups
from mppo.supervision.phase import phase
from mppo.trainer.run_roles import Roles

TIMED_AS = {"actor": "old_log_prob", "ref": "ref", "critic": "values"}
"""verl's name for what each role's forward pass yields, under which it is timed."""


def _what(name: str) -> str:
    return f"computing {TIMED_AS[name]} with {name}"


class ForwardPhase:
    """Forward passes of reference, actor and critic over a batch. They run through one pipeline if
    the layouts allow it, otherwise one role at a time. The actor is left out where the recipe takes
    the engine's log-probabilities instead. In ``passes`` the reference comes before the actor,
    whose pass may read its hidden states."""

    def __init__(self, roles: Roles, batch: Batch) -> None:
        self._roles, self._batch = roles, batch
        by_name = {role.name: role for role in (roles.actor, roles.critic, roles.ref) if role}
        groups = forward_groups(roles.recipe)
        self.passes: list[list[Role]] = [[by_name[name] for name in group] for group in groups]
        self._outputs: dict[str, Any] = {}
        self._ref_hidden_T: Tensor | None = None

    def compute(self, roles: Sequence[Role]) -> None:
        """The forward passes of some ``passes``, collective; roles of one stream have taken time in
        proportion to their parameters and micro-batches."""
        names, start = [role.name for role in roles], time.perf_counter()
        shares = [1.0]
        if len(roles) == 1:
            with phase(_what(names[0])):
                self._enter(names[0])
                self._outputs[names[0]] = self._forward(roles[0])
        else:
            with phase("computing in one stream"):
                self._enter(names[0])
                shares = self._stream(roles)
        seconds = time.perf_counter() - start
        for name, share in zip(names, shares, strict=True):
            self._roles.seconds[TIMED_AS[name]] = seconds * share

    def _enter(self, role: str) -> None:
        self._roles.placement.enter(phase_of_role(self._roles.recipe, "forward", role))

    def _stream(self, roles: Sequence[Role]) -> list[float]:
        links = Links(role.groups for role in roles)
        phase_names = {role.name: _what(role.name) for role in roles}
        work: dict[str, StreamedForward] = {}
        for role in roles:
            with phase(phase_names[role.name]):
                plan = role.plan(self._batch, training=False)
                share, _ = role.fetch(self._batch, plan)
                inputs = self._inputs(role)
                work[role.name] = StreamedForward(role, share, plan, inputs)
        passes = [one.work for one in work.values()]
        carry_out(forward_list(passes, links.stage, links.stages), work, links, phase_names)
        for name, one in work.items():
            with phase(phase_names[name]):
                self._outputs[name] = one.outputs()
        weights = [
            one.work.micro_batches[0]
            * sum(p.numel() for s in one.role.stages for p in s.parameters())
            for one in work.values()
        ]
        return [weight / sum(weights) for weight in weights]

    def _inputs(self, role: Role) -> PassInputs:
        if role is not self._roles.actor:
            return TOKENS_ONLY
        squares = self._roles.recipe.algorithm.has_token_baseline
        return PassInputs(self._ref_hidden_T, with_squares=squares)

    def _forward(self, role: Role) -> HeadOutputs:
        inputs = self._inputs(role)
        keeps_states = role is self._roles.ref and self._roles.recipe.needs_full_kl
        plan, outputs, states = role.plan(self._batch, training=False), None, None
        # a range at a time, where a token has many bytes: no rank then holds more than a range's
        large = keeps_states or inputs.ref_hidden_T is not None
        for part in _ranges(role, plan, large):
            share, part_inputs = role.fetch(self._batch, part, inputs)
            if keeps_states:
                found, found_states = forward_with_states(role, share, part)
                states = found_states if states is None else states.add_(found_states)
            else:
                found = forward(role, share, part, part_inputs)
            outputs = found if outputs is None else add_outputs(outputs, found)
        assert outputs is not None, "a plan has micro-batches"
        self._ref_hidden_T = states if keeps_states else self._ref_hidden_T
        return outputs

    def outputs(self) -> Outputs:
        """The batch with all roles' outputs, once every role has computed."""
        batch, recipe = self._batch, self._roles.recipe
        actor, ref, critic = (self._outputs.get(name) for name in ("actor", "ref", "critic"))
        logprobs_T = batch.rollout_logprobs_T if actor is None else actor.logprobs_T
        return Outputs(
            batch=batch,
            logprobs_T=logprobs_T,
            ref_logprobs_T=logprobs_T if ref is None else ref.logprobs_T,
            values_T=torch.zeros_like(logprobs_T) if critic is None else critic.values_T,
            has_actor_logprobs=actor is not None,
            full_kl_T=None if actor is None else actor.full_kl_T,
            ref_hidden_T=self._ref_hidden_T if recipe.actor.learns_full_kl else None,
            entropy_T=None if actor is None else actor.entropy_T,
            squares_T=None if actor is None else actor.squares_T,
        )


def _ranges(role: Role, plan: MicroBatchPlan, large: bool) -> list[MicroBatchPlan]:
    """Divide a pass into ranges if its inputs or results are large, or the engine's choices are. A
    pass whose routers record their choices is one range: the record is of one pass."""
    routing, layout = role.routing, role.layout
    if routing is not None:
        large = (large or routing.replays_engine) and not routing.records
    return ranges_of(plan, layout.pp, layout.pp if layout.vpp > 1 else 1) if large else [plan]
