"""Rules of what leaves the GPU."""

from __future__ import annotations

from collections.abc import Iterator

from mppo.config.errors import ConfigIssue
from mppo.config.rules.rule import RuleContext, rule


@rule(
    "actor.optim.cpu_offload_fraction",
    "critic.optim.cpu_offload_fraction",
    "*.megatron.use_distributed_optimizer",
)
def hybrid_optimizer_is_distributed(context: RuleContext) -> Iterator[ConfigIssue]:
    """Megatron's hybrid optimizer keeps its copies of the weights only for a distributed one."""
    sections = {"actor": context.recipe.actor, "critic": context.recipe.critic}
    for role in context.roles:
        section = sections.get(role.name)
        if section is None or role.megatron.use_distributed_optimizer:
            continue
        if fraction := section.optim.cpu_offload_fraction:
            yield ConfigIssue(
                f"{role.name}.optim.cpu_offload_fraction",
                fraction,
                f"{role.key}.use_distributed_optimizer = false, but the hybrid optimizer needs the "
                "distributed one",
                "set that to true, or leave this key out",
            )


@rule("ref.megatron.offload")
def offload_of_the_reference(context: RuleContext) -> Iterator[ConfigIssue]:
    """The reference is not trained: only its weights can move."""
    own = context.recipe.ref.megatron
    if not context.recipe.uses_reference or own is None or isinstance(own.offload, str):
        return
    for name in ("gradients", "optimizer"):
        if getattr(own.offload, name):
            why = f"the reference is not trained: it has no {name}"
            fix = "remove it; ref.megatron.offload.parameters moves its weights"
            yield ConfigIssue(f"ref.megatron.offload.{name}", True, why, fix)
