"""The recipes of TRL's, DeepSpeed-Chat's and OpenRLHF's runs, key by key beside their commands.

``extras/migrate/tests/test_verl_scripts.py`` does the same for verl's scripts.
"""

from dataclasses import dataclass, field

import pytest
from migration.commands import COMMANDS
from migration.table import ROOT
from mppo_migrate.__main__ import migrate

from mppo.recipe.document import leaves
from mppo.recipe.load import load_recipe

MACHINE = {
    "actor.log_prob_micro_batch_size_per_gpu", "actor.ppo_micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size_per_gpu", "reward_model.micro_batch_size_per_gpu",
    "critic.log_prob_micro_batch_size_per_gpu", "rollout.batch_size", "rollout.name",
    "rollout.servers", "rollout.server_args", "rollout.server_args.mem_fraction_static",
    "model.hub", "trainer.default_local_dir", "trainer.experiment_name", "trainer.logger",
    "actor.megatron.tensor_model_parallel_size", "critic.megatron.tensor_model_parallel_size",
    "reward_model.megatron.tensor_model_parallel_size", "actor.optim.cpu_offload_fraction",
    "critic.optim.cpu_offload_fraction",
}  # fmt: skip
"""Keys that change no number of a run: layout, engine, memory, and where files are."""
MODELS = {
    "critic.path", "model.path", "model.tokenizer_path", "reward_model.path",
    "reward_model.tokenizer_path",
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """The command of a recipe.

    Args:
        command: its name in ``commands.txt``.
        models: parts of the names of its models; none: the recipe has others, and says so.
        differs: other keys whose value differs, with the words in which the recipe says so.
        ranks: GPUs of the recipe.
    """

    command: str
    models: tuple[str, ...]
    differs: dict[str, str] = field(default_factory=dict)
    ranks: int = 8


SOURCES = {
    "pythia_160m_trl_minimal": Source("trl-minimal", ("pythia-160m",), ranks=1),
    "pythia_1b_tldr": Source(
        "trl-tldr",
        ("EleutherAI_pythia-1b-deduped__sft__tldr", "EleutherAI_pythia-1b-deduped__reward__tldr"),
        {
            "data.apply_chat_template": "without TRL's chat template",
            "data.answer_key": "only shown in samples",
            "data.train_files": "hf:trl-lib/tldr",
        },
    ),
    "deepspeed_chat_step3": Source("deepspeed-1.3b", ()),
    "llama3_8b_openrlhf": Source(
        "openrlhf-llama-ray",
        ("Llama-3-8b-sft-mixture", "Llama-3-8b-rm-700k"),
        {"reward_model.normalize.mode": "are measured on the first responses"},
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_recipe_has_the_values_of_its_command(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)  # without ./configs no layout is chosen
    source, file = SOURCES[name], ROOT / "recipes" / f"{name}.yaml"
    command = COMMANDS[source.command]
    text, _ = migrate(command.system, command.text, command.arguments, source.ranks)
    (tmp_path / "migrated.yaml").write_text(text)
    recipes = load_recipe(tmp_path / "migrated.yaml"), load_recipe(file)
    migrated, ours = (dict(leaves(recipe.model_dump())) for recipe in recipes)
    every = migrated.keys() | ours.keys()
    differ = {key for key in every if migrated.get(key) != ours.get(key)} - MACHINE
    assert differ - MODELS == source.differs.keys()
    said = " ".join(file.read_text().replace("\n#", " ").split())
    assert all(words in said for words in source.differs.values())
    for key in ("model.path", "critic.path", "reward_model.path"):
        assert not source.models or any(each in ours[key] for each in source.models)
