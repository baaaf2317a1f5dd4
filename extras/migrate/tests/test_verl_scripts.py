"""The recipes named after verl's scripts, key by key beside the scripts' composed configurations.

``verl_scripts.json`` has the configurations; mppo's own table of verl's keys translates them. A
recipe differs from its script only where ``DIFFERENCES`` says so, in words of the recipe itself.
"""

import json
from pathlib import Path

import pytest
from mppo_migrate.verl_keys.translation import VerlTranslation

from mppo.recipe.document import apply_overrides, leaves
from mppo.recipe.load import load_recipe

RECIPES = Path(__file__).parents[3] / "recipes"
FACTS = json.loads((Path(__file__).parent / "verl_scripts.json").read_text())
COMMON = FACTS["every script"]
CONFIGURATIONS = {name: COMMON | own for name, own in FACTS["scripts"].items()}
CONFIGURATIONS |= FACTS["logs"] | FACTS["later scripts"]
SCRIPT_OF = {
    "deepseek_llm_7b_eurus_sandbox": "run_deepseek7b_llm_sandbox_fusion.sh",
    "deepseek_llm_7b_gsm8k": "run_deepseek7b_llm.sh",
    "deepseek_llm_7b_gsm8k_cp2": "run_deepseek7b_llm_sp2.sh",
    "deepseek_llm_7b_gsm8k_math": "run_deepseek_math_gsm8k_megatron.sh",
    "deepseek_llm_7b_gsm8k_modelscope": "run_deepseek7b_llm_modelscope.sh",
    "deepseek_llm_7b_gsm8k_pfppo": "run_deepseek7b_llm_pfppo.sh",
    "deepseek_llm_7b_hh_rlhf": "run_deepseek_full_hh_rlhf.sh",
    "gemma_2_2b_gsm8k": "run_gemma.sh",
    "moonlight_16b_a3b_gsm8k": "run_moonlight16b_a3b_gsm8k_megatron.sh",
    "qwen1.5_moe_a2.7b_gsm8k": "run_qwen1.5_moe_a2.7b-gsm8k_megatron.sh",
    "qwen2.5_0.5b_gsm8k": "gsm8k/Qwen2.5-0.5B-bsz256_2-prompt1024-resp512-0.567.log",
    "qwen2.5_32b_gsm8k_math": "run_qwen2.5-32b.sh",
    "qwen2_7b_gsm8k_math": "run_qwen2-7b_math_gsm8k_megatron.sh",
    "qwen2_7b_rm": "run_qwen2-7b_rm.sh",
    "qwen2_7b_rm_seq_balance": "run_qwen2-7b_rm_seq_balance.sh",
    "qwen2_7b_seq_balance": "run_qwen2-7b_seq_balance.sh",
    "qwen2_7b_sglang_seq_balance": "run_qwen2-7b_sglang_seq_balance.sh",
    "qwen3_8b_gsm8k_math": "run_qwen3_8b_megatron.sh",
}
EVERYWHERE = {"trainer.max_ckpt_to_keep": "verl keeps all (null)"}
RECOMPUTED = {
    f"{role}.megatron.recompute_granularity": "every layer is recomputed"
    for role in ("actor", "critic")
}
OWN_LAYOUT = "the critic has a layout of its own (verl's critic takes the actor's)"
WRITTEN_OUT = "the critic's layout is written out (verl's critic takes the actor's)"
TP2 = "TP2 instead of TP1"
DIFFERENCES = {
    "deepseek_llm_7b_gsm8k_math": RECOMPUTED
    | {
        "critic.megatron.tensor_model_parallel_size": WRITTEN_OUT,
        "critic.megatron.pipeline_model_parallel_size": WRITTEN_OUT,
    },
    "deepseek_llm_7b_hh_rlhf": RECOMPUTED
    | {
        "actor.megatron.tensor_model_parallel_size": TP2,
        "critic.megatron.tensor_model_parallel_size": TP2,
        "reward_model.path": "here it is FsfairX-LLaMA3-RM-v0.1",
    },
    "moonlight_16b_a3b_gsm8k": RECOMPUTED,
    "qwen1.5_moe_a2.7b_gsm8k": RECOMPUTED,
    "qwen2.5_32b_gsm8k_math": {
        "actor.ppo_micro_batch_size_per_gpu": "micro-batches of two sequences",
        "critic.ppo_micro_batch_size_per_gpu": "micro-batches of two sequences",
        "actor.megatron.recompute_granularity": "no layer is recomputed",
    },
    "qwen3_8b_gsm8k_math": RECOMPUTED,
    "qwen2_7b_gsm8k_math": RECOMPUTED | {"critic.megatron.tensor_model_parallel_size": OWN_LAYOUT},
}
"""By recipe and key: the words in which the recipe, or what it is based on, says so."""
ACTORS_IF_NULL = {
    "actor.log_prob_max_token_len_per_gpu": "actor.ppo_max_token_len_per_gpu",
    "actor.log_prob_micro_batch_size_per_gpu": "actor.ppo_micro_batch_size_per_gpu",
    "critic.ppo_mini_batch_size": "actor.ppo_mini_batch_size",
}
LAST_PARTS = {"data.train_files": 2, "data.val_files": 2, "reward_model.path": 1}
"""Keys of paths: how many last parts are compared."""


def translated(configuration):
    """mppo's keys and values for verl's."""
    settings = [f"{key}={json.dumps(value)}" for key, value in configuration.items()]
    document, issues = apply_overrides({}, settings)
    translation = VerlTranslation(document)
    assert not issues
    assert not translation.issues
    return dict(leaves(translation.document))


def ours(recipe, key):
    """The recipe's value of a key, that of the key which a null stands for."""
    value = recipe
    for part in key.split("."):
        value = getattr(value, part) if not isinstance(value, dict) else value.get(part)
    return ours(recipe, ACTORS_IF_NULL[key]) if value is None and key in ACTORS_IF_NULL else value


def matters(recipe, values, key):
    """Whether verl reads the key in this run."""
    role = key.partition(".")[0]
    if role == "reward_model" and not values["reward_model.enable"]:
        return False
    if key.endswith("expert_tensor_parallel_size"):
        return recipe in ("moonlight_16b_a3b_gsm8k", "qwen1.5_moe_a2.7b_gsm8k")
    dynamic = values.get(f"{role}.use_dynamic_bsz", False)
    if key.endswith("max_token_len_per_gpu"):
        return dynamic
    return not (dynamic and key.endswith("micro_batch_size_per_gpu"))


def comparable(key, value):
    if key not in LAST_PARTS:
        return value
    paths = value if isinstance(value, list | tuple) else [value]
    return [path.split("/")[-LAST_PARTS[key] :] for path in paths]


@pytest.mark.parametrize("name", SCRIPT_OF)
def test_a_recipe_has_the_values_of_its_script(name):
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    values = translated(CONFIGURATIONS[SCRIPT_OF[name]])
    enabled = values["reward_model.enable"]
    assert (recipe.reward_model.path is not None) == enabled
    compared = [key for key in values if matters(name, values, key)]
    compared.remove("reward_model.enable") if enabled else None
    differ = {
        key
        for key in compared
        if comparable(key, ours(recipe, key)) != comparable(key, values[key])
    }
    assert len(compared) > 40
    assert differ == set(words_of(name, values))


def words_of(name, values):
    every = {key: words for key, words in EVERYWHERE.items() if key in values}
    return every | DIFFERENCES.get(name, {})


@pytest.mark.parametrize("name", SCRIPT_OF)
def test_a_recipe_says_where_it_differs(name):
    texts = [(RECIPES / f"{name}.yaml").read_text(), (RECIPES / "common/ppo.yaml").read_text()]
    said = " ".join("\n".join(texts).replace("\n#", " ").split())
    for words in words_of(name, EVERYWHERE).values():
        assert words in said


def test_every_script_has_its_recipe():
    assert sorted(SCRIPT_OF.values()) == sorted(CONFIGURATIONS)
