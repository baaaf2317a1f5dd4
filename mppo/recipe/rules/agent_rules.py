"""Rules on conversations (``rollout.agent``)."""

from __future__ import annotations

from collections.abc import Iterator

from mppo.recipe.document import leaves
from mppo.recipe.errors import ConfigIssue
from mppo.recipe.rules.rule import RuleContext, rule
from mppo.recipe.sections.agent import following_environment

_ONLY_WITH: dict[str, tuple[str, ...]] = {
    "run": ("tool_format", "arguments", "processes"),
    "command": ("tool_format",),
    "path": ("arguments", "tools", "timeout_s", "memory_mb", "processes"),
}
"""Keys of ``rollout.agent`` that have an effect with each form of an agent."""


@rule("rollout.agent")
def an_agent_has_one_form(context: RuleContext) -> Iterator[ConfigIssue]:
    """An agent is a function, a command or an answering function, with the keys of this form."""
    agent = context.recipe.rollout.agent
    if agent is None:
        return
    forms = [form for form in _ONLY_WITH if getattr(agent, form) is not None]
    names = ", ".join(_ONLY_WITH)
    if len(forms) != 1:
        why = "an agent has one form, " + ("and none is given" if not forms else "not several")
        yield ConfigIssue("rollout.agent", forms, why, f"give one of {names}")
        return
    useful = {*_ONLY_WITH[forms[0]], "max_turns", "max_seconds", "max_concurrent", *_ONLY_WITH}
    for name in sorted(agent.model_fields_set - useful):
        value = getattr(agent, name)
        if value != type(agent).model_fields[name].get_default(call_default_factory=True):
            why = f"has no effect with rollout.agent.{forms[0]}"
            yield ConfigIssue(f"rollout.agent.{name}", value, why, "leave it out")


@rule("rollout.environment", "data.task")
def an_environment_has_the_prompts_and_is_the_agent(context: RuleContext) -> Iterator[ConfigIssue]:
    """What follows from ``rollout.environment`` cannot be given besides."""
    found = context.recipe.model_dump(include={"data", "rollout"})
    for key, expected in leaves(following_environment(found)):
        section, *names = key.split(".")
        value = found[section]
        for name in names:
            value = value[name]
        if value != expected:
            why = f"rollout.environment sets it to {expected!r}"
            yield ConfigIssue(key, value, why, "leave it out")


@rule("rollout.agent", "algorithm.whiten_rewards")
def whitened_rewards_have_one_sequence(context: RuleContext) -> Iterator[ConfigIssue]:
    """Each sequence of an episode carries its score, which is to count once."""
    agent, algorithm = context.recipe.rollout.agent, context.recipe.algorithm
    if agent is not None and agent.uses_endpoint and algorithm.whiten_rewards:
        why = (
            "an agent's episode may have several sequences, and its score would count several times"
        )
        yield ConfigIssue("algorithm.whiten_rewards", True, why, "set it to false")


@rule("rollout.agent", "data.apply_chat_template")
def tools_have_a_chat_template(context: RuleContext) -> Iterator[ConfigIssue]:
    """The chat template writes the tools into the prompts."""
    recipe = context.recipe
    agent = recipe.rollout.agent
    if agent is None or not agent.tools:
        return
    key, names = "rollout.agent.tools", [tool.name for tool in agent.tools]
    if not recipe.data.apply_chat_template:
        why = "data.apply_chat_template is false, so that no prompt would name the tools"
        yield ConfigIssue(key, names, why, "set data.apply_chat_template to true")
    if len(set(names)) < len(names):
        yield ConfigIssue(key, names, "two tools have one name", "rename one of them")
    if "tools" in agent.arguments:
        why = "the agent gets rollout.agent.tools under this name"
        yield ConfigIssue("rollout.agent.arguments.tools", None, why, "rename the argument")
