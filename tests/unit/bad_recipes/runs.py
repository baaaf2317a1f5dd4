"""Mistakes in agents, offload, validation, dumps, plugins, replays and profiles."""

from __future__ import annotations

AGENTS = [
    ("an agent without a form", "rollout.agent.max_turns=3", "rollout.agent", "none is given"),
    ("an agent of two forms", "rollout.agent.path=a:b rollout.agent.command=env", "rollout.agent",
     "not several"),
    ("an agent's program that is missing", "rollout.agent.command=no_such_program",
     "rollout.agent.command", "names no executable file"),
    ("an agent's function that is missing", "rollout.agent.run=no.py:run", "rollout.agent.run",
     "no such file no.py"),
    ("a format of calls for an agent that answers", "rollout.agent.path=a:b "
     "rollout.agent.tool_format=qwen25", "rollout.agent.tool_format",
     "no effect with rollout.agent.path"),
    ("tools for a program", "rollout.agent.command=env "
     "rollout.agent.tools=[{\"path\":\"c:d\",\"name\":\"e\"}]", "rollout.agent.tools",
     "no effect with rollout.agent.command"),
    ("prompts beside those of an environment", "rollout.environment.verifiers=a", "data.task",
     "rollout.environment sets it"),
    ("whitened rewards of episodes", "rollout.agent.command=env algorithm.whiten_rewards=true",
     "algorithm.whiten_rewards", "would count several times"),
    ("an agent's file that is missing", "rollout.agent.path=no.py:agent", "rollout.agent.path",
     "no such file no.py"),
    ("a tool's file that is missing", "rollout.agent.path=a:b "
     "rollout.agent.tools=[{\"path\":\"no.py:d\",\"name\":\"e\"}]",
     "rollout.agent.tools.0.path", "no such file no.py"),
    ("tools in prompts without a template", "rollout.agent.path=a:b "
     "rollout.agent.tools=[{\"path\":\"c:d\",\"name\":\"e\"}] data.apply_chat_template=false",
     "rollout.agent.tools", "no prompt would name"),
    ("two tools of one name", "rollout.agent.path=a:b "
     "rollout.agent.tools=[{\"path\":\"c:d\",\"name\":\"e\"},{\"path\":\"f:g\",\"name\":\"e\"}]",
     "rollout.agent.tools", "two tools have one name"),
]  # fmt: skip

CODE = [
    ("a missing agent", "rollout.agent.path=no.py:agent", "rollout.agent.path",
     "no such file no.py"),
    ("a missing reward", "reward.name=function reward.function=no.py:score", "reward.function",
     "no such file no.py"),
    ("a reward of one parameter", "reward.name=function reward.function={mine}:score",
     "reward.function", "its parameters do not fit"),
    ("a reward that is not there", "reward.name=function reward.function={mine}:scores",
     "reward.function", "has no function 'scores'"),
]  # fmt: skip
"""Mistakes in code that a recipe names."""

OFFLOAD = [
    ("an unknown word", "actor.megatron.offload=some", "actor.megatron.offload",
     "choose one of: auto, none; or give its keys"),
    ("true", "actor.megatron.offload=true", "actor.megatron.offload",
     "choose one of: auto, none; or give its keys"),
    ("an unknown part", "critic.megatron.offload.params=true",
     "critic.megatron.offload.params", "did you mean critic.megatron.offload.parameters?"),
    ("a word for a part", "critic.megatron.offload.optimizer=maybe",
     "critic.megatron.offload.optimizer", "valid boolean"),
    ("gradients of a reference", "algorithm.use_kl_in_reward=true "
     "ref.megatron.offload.gradients=true", "ref.megatron.offload.gradients",
     "the reference is not trained"),
    ("an optimizer of a reference", "algorithm.use_kl_in_reward=true "
     "ref.megatron.offload.optimizer=true", "ref.megatron.offload.optimizer",
     "offload.parameters moves its weights"),
    ("an optimizer of a reward model", "reward_model.path=builtin:tiny-reward "
     "reward_model.megatron.offload.optimizer=true", "reward_model.megatron.offload.optimizer",
     "the reward model is not trained: it has no optimizer"),
    ("verl's offload of a reference's optimizer", "ref.megatron.optimizer_offload=true",
     "ref.megatron.optimizer_offload", "mppo-migrate verl < run.sh > recipe.yaml"),
    ("a hybrid optimizer that is not distributed",
     "actor.megatron.use_distributed_optimizer=false actor.optim.cpu_offload_fraction=0.5",
     "actor.optim.cpu_offload_fraction", "the hybrid optimizer needs the distributed one"),
    ("more than all moments", "critic.optim.cpu_offload_fraction=1.5",
     "critic.optim.cpu_offload_fraction", "a value <= 1"),
]  # fmt: skip

VALIDATION = [
    ("a best of no validation", "trainer.best_metric=val/reward trainer.save_freq=5",
     "trainer.best_metric", "set trainer.test_freq"),
    ("a best of steps that are not validated",
     "trainer.best_metric=-val-core/x/reward/mean trainer.save_freq=5 trainer.test_freq=10",
     "trainer.best_metric", "to a multiple of it"),
    ("a number for a folder", "trainer.validation_data_dir=3", "trainer.validation_data_dir",
     "valid string"),
]  # fmt: skip

DUMPS = [
    ("a dump that is a path", "trainer.dump_rollouts=/data", "trainer.dump_rollouts", "boolean"),
    ("a plugin that is missing", "trainer.plugins=[nowhere.py]", "trainer.plugins", "no such file"),
    ("a replay of nothing", "trainer.replay=nowhere", "trainer.replay", "does not exist"),
    ("a replay of a folder without dumps", "trainer.replay=.", "trainer.replay",
     "holds no complete step_N"),
    ("a profile of step 0", "trainer.profile.steps=[0]", "trainer.profile.steps.0", "a value > 0"),
    ("a profile of a rank that is not there", "trainer.profile.steps=[1] "
     "trainer.profile.ranks=[0,7]", "trainer.profile.ranks", "has the ranks 0 to 0"),
]  # fmt: skip
