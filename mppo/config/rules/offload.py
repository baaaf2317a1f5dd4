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


@rule("ref.megatron.offload", "reward_model.megatron.offload")
def offload_of_frozen_roles(context: RuleContext) -> Iterator[ConfigIssue]:
    """Of a role that is not trained, only the weights can move."""
    for role in context.roles:
        own = role.megatron.offload
        if role.trained or role.key == "actor.megatron" or isinstance(own, str):
            continue
        for name in ("gradients", "optimizer"):
            if getattr(own, name):
                called = "reference" if role.name == "ref" else "reward model"
                why = f"the {called} is not trained: it has no {name}"
                fix = f"remove it; {role.key}.offload.parameters moves its weights"
                yield ConfigIssue(f"{role.key}.offload.{name}", True, why, fix)
