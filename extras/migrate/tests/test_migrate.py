"""``mppo-migrate``: commands of other systems become recipes that mppo accepts."""

from __future__ import annotations

import io
import shlex
import sys
import unicodedata
from pathlib import Path

import pytest
from migration.commands import COMMANDS
from mppo_migrate.__main__ import main, migrate
from mppo_migrate.migration import Migration
from mppo_migrate.row import Setting
from mppo_migrate.verl_keys.translation import VerlTranslation
from mppo_migrate.writer import recipe_text
from verl_flags.flags import read_scripts

from mppo.recipe.checks import check_recipe
from mppo.recipe.document import parse_yaml
from mppo.recipe.load import load_recipe
from mppo.recipe.rules.rule import world_size_of
from mppo.train import main as train

CONFIGS = Path(__file__).parents[3] / "recipes" / "configs"
SCRIPTS = {
    name: "python3 -m verl.trainer.main_ppo \\\n" + " \\\n".join(map(shlex.quote, settings))
    for name, settings in read_scripts().items()
}


def recipe_of(tmp_path, system: str, text: str, *arguments: str):
    """The recipe of a command, its text, and the lines for the user."""
    written, remarks = migrate(system, text, arguments)
    path = tmp_path / "recipe.yaml"
    path.write_text(written)
    recipe = load_recipe(path)
    assert not check_recipe(recipe, world_size_of(recipe), {})
    return recipe, written, remarks


def of(tmp_path, name: str):
    command = COMMANDS[name]
    return recipe_of(tmp_path, command.system, command.text, *command.arguments)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_becomes_a_recipe_in_which_every_flag_is_named(name, tmp_path):
    """A flag is a comment, the origin of a key, or (verl) a key of its own name."""
    _, written, _ = of(tmp_path, name)
    assert "mppo refuses" not in written
    words = COMMANDS[name].text.split()
    flags = [word for word in words if word.startswith("--") and len(word) > 2]
    program = max((i for i, w in enumerate(words) if w.endswith(".py") or "openrlhf.cli" in w),
                  default=0)  # fmt: skip
    flags = [flag for flag in flags if words.index(flag) > program]
    computed = {"--gradient_accumulation_steps", "--colocate_critic_reward", "--generation_batches",
                "--colocate_actor_ref", "--kl_target", "--aux_loss_coef", "--train.colocate_all",
                "--train.colocate_critic_reward", "--train.colocate_actor_ref"}  # fmt: skip
    ranks = ("num_nodes", "num_gpus_per_node")
    missing = [flag for flag in flags if flag.partition("=")[0] not in written]
    assert [f for f in missing if f not in computed and not f.endswith(ranks)] == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_verls_scripts_become_recipes(name, tmp_path):
    recipe, written, _ = recipe_of(tmp_path, "verl", SCRIPTS[name])
    assert recipe.rollout.name == "sglang"
    assert recipe.data.answer_key == "reward_model.ground_truth"
    assert recipe.algorithm.preset == "verl"
    assert "Not recognised" not in written


def test_verls_experts_are_divided_like_the_other_matrices(tmp_path):
    script = SCRIPTS["run_qwen1.5_moe_a2.7b-gsm8k_megatron.sh"]
    recipe, _, _ = recipe_of(tmp_path, "verl", script)
    for role in (recipe.actor, recipe.critic, recipe.ref):
        assert role.megatron.expert_tensor_parallel_size is None
        assert role.megatron.layout(32).etp == role.megatron.tensor_model_parallel_size == 4
    recipe, _, _ = recipe_of(tmp_path, "verl", SCRIPTS["run_moonlight16b_a3b_gsm8k_megatron.sh"])
    assert recipe.actor.megatron.expert_tensor_parallel_size == 1


def test_verls_sandbox_gives_the_share_of_passed_tests(tmp_path):
    recipe, _, _ = recipe_of(tmp_path, "verl", SCRIPTS["run_deepseek7b_llm_sandbox_fusion.sh"])
    assert recipe.reward.name == "rule"
    assert recipe.reward.kwargs["partial_credit"] is True
    recipe, _, _ = recipe_of(tmp_path, "verl", SCRIPTS["run_deepseek7b_llm.sh"])
    assert not recipe.reward.kwargs


@pytest.mark.parametrize("name", ["verl-english", "verl-chinese"])
def test_verls_reference_run(name, tmp_path, monkeypatch):
    """Qwen2.5-0.5B on GSM8K: settings on top of run_gemma.sh, which is read if it is there."""
    monkeypatch.chdir(tmp_path)
    recipe, _, remarks = of(tmp_path, name)
    assert recipe.model.path == recipe.critic.path == "Qwen/Qwen2.5-0.5B-Instruct"
    assert (recipe.data.train_batch_size, recipe.actor.ppo_mini_batch_size) == (256, 64)
    assert recipe.actor.ppo_micro_batch_size_per_gpu == 2
    assert recipe.critic.ppo_micro_batch_size_per_gpu == 2
    assert recipe.trainer.logger == ("console",)
    assert any("run_gemma.sh are missing" in remark for remark in remarks)
    (tmp_path / "run_gemma.sh").write_text(f"set -x\n{SCRIPTS['run_gemma.sh']} $@\n")
    recipe, _, remarks = of(tmp_path, name)
    assert (recipe.trainer.n_gpus_per_node, recipe.data.train_batch_size) == (1, 256)
    assert recipe.data.max_prompt_length == 1024  # of the script
    assert not any("missing here" in remark for remark in remarks)


def test_shell_and_unknown_settings_of_verl(tmp_path):
    recipe, written, remarks = of(tmp_path, "verl-shell")
    assert recipe.data.max_response_length == 1024
    assert [name.rpartition("/")[2] for name in recipe.data.train_files] == ["train.parquet"] * 2
    assert recipe.model.path == "deepseek-ai/deepseek-llm-7b-chat"
    assert recipe.model.hub
    assert any(line.startswith("actor_rollout_ref.actor.wheels=4: no such key") for line in remarks)
    assert "#   actor_rollout_ref.actor.wheels=4: no such key" in written
    assert "#   actor_rollout_ref.rollout.name=vllm: vLLM" in written
    assert recipe.reward_model.path == "some/rm"


@pytest.mark.parametrize(
    "launch",
    [
        "ray job submit --address=http://x:8265 --no-wait -- {}",
        "A=b ray job submit --working-dir . --runtime-env-json '{{\"a.b\": 1}}' -- \\\n  {}",
        "ray job submit -- bash -c '{}'",
        'srun -N 2 bash -c "cd x && {}"',
    ],
)
def test_launchers_of_a_command_are_read(launch, tmp_path):
    command = "python3 -m verl.trainer.main_ppo data.train_batch_size=512 trainer.n_gpus_per_node=4"
    recipe, written, remarks = recipe_of(tmp_path, "verl", launch.format(command))
    assert (recipe.data.train_batch_size, recipe.trainer.n_gpus_per_node) == (512, 4)
    assert "verl.trainer.main_ppo" in written
    assert not [line for line in remarks if "not a setting" in line]


def test_a_program_of_verls_recipes_is_found_behind_its_launcher(tmp_path):
    launch = "ray job submit --no-wait --runtime-env=e.yaml --address http://x:1 -- python3 -m"
    command = f"{launch} recipe.dapo.main_dapo data.train_batch_size=512 trainer.nnodes=4"
    recipe, written, remarks = recipe_of(tmp_path, "verl", command)
    assert (recipe.data.train_batch_size, recipe.trainer.nnodes) == (512, 4)
    assert "recipe.dapo.main_dapo" in written
    assert not [line for line in remarks if "not a setting" in line]


def test_a_launcher_may_start_a_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = "python3 -m verl.trainer.main_ppo data.train_batch_size=512 trainer.nnodes=2 $@"
    Path("run.sh").write_text(script)
    text = "ray job submit --no-wait -- bash run.sh trainer.nnodes=4"
    recipe, _, _ = recipe_of(tmp_path, "verl", text)
    assert (recipe.data.train_batch_size, recipe.trainer.nnodes) == (512, 4)


@pytest.mark.parametrize(
    ("command", "other"),
    [
        ("trl grpo --model_name_or_path m --learning_rate 1e-6", "trl grpo"),
        ("accelerate launch scripts/rloo.py --learning_rate 1", "scripts/rloo.py"),
        ("python dpo_online.py --learning_rate 1e-6", "dpo_online.py"),
        ("python -m trl.scripts.sft --learning_rate 1e-6", "trl.scripts.sft"),
    ],
)  # fmt: skip
def test_another_trainer_of_trl_does_not_become_ppo(command, other):
    with pytest.raises(ValueError) as error:
        migrate("trl", command)
    assert f"line 1: {other!r} is not TRL's PPO" in str(error.value)
    assert "algorithm.adv_estimator" in str(error.value)


@pytest.mark.parametrize("other", ["verl.trainer.fsdp_sft_trainer", "verl/trainer/main_eval.py"])
def test_another_program_of_verl_does_not_become_ppo(other):
    command = f"torchrun {'' if other.endswith('py') else '-m '}{other} data.train_batch_size=8"
    with pytest.raises(ValueError, match="only PPO's command is translated") as error:
        migrate("verl", command)
    assert f"line 1: {other!r}" in str(error.value)


def test_trl_minimal(tmp_path):
    recipe, _, remarks = of(tmp_path, "trl-minimal")
    own = "EleutherAI/pythia-160m"  # the command names the tokenizer only
    assert recipe.model.path == recipe.critic.path == recipe.reward_model.path == own
    assert recipe.model.tokenizer_path == "EleutherAI/pythia-1b-deduped"
    assert recipe.data.train_files[0].endswith(":descriptiveness")
    assert not recipe.data.apply_chat_template
    assert (recipe.data.train_batch_size, recipe.actor.ppo_mini_batch_size) == (64, 64)
    assert recipe.trainer.total_training_steps == 157
    assert recipe.reward.missing_eos_score == -1
    assert recipe.actor.optim.lr == recipe.critic.optim.lr == 3e-6
    assert not remarks


def test_trl_tldr_on_eight_ranks(tmp_path):
    recipe, written, remarks = of(tmp_path, "trl-tldr")
    assert recipe.data.train_batch_size == 16 * 4 * 8
    assert recipe.trainer.total_training_steps == -(-1_000_000 // 512)
    assert recipe.model.path == "cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr"
    assert recipe.model.tokenizer_path == "EleutherAI/pythia-1b-deduped"
    reward = "cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr"
    assert recipe.critic.path == recipe.reward_model.path == reward
    assert recipe.data.answer_key is None, "a reward model needs no answers"
    assert "#   --stop_token eos: " in written
    assert any("8 are assumed" in remark for remark in remarks)
    two, _ = migrate("trl", COMMANDS["trl-tldr"].text, ranks=2)
    assert "train_batch_size: 128 " in two


def test_data_sets_of_the_hub_keep_their_parts(tmp_path):
    recipe, _, _ = of(tmp_path, "trl-hub")
    assert recipe.data.train_files == ("hf:owner/tldr/plain:train",)
    assert recipe.data.val_files == ("hf:owner/tldr/plain:validation",)
    text = "python ppo.py --dataset_name rows.jsonl --dataset_test_split test"
    recipe, _, _ = recipe_of(tmp_path, "trl", text)
    assert (recipe.data.train_files, recipe.data.val_files) == (("rows.jsonl",), ())


def test_openrlhf_counts_samples_and_gpus(tmp_path):
    recipe, written, _ = of(tmp_path, "openrlhf-ray")
    assert (recipe.data.train_batch_size, recipe.actor.ppo_mini_batch_size) == (1024, 64)
    assert (recipe.trainer.nnodes, recipe.trainer.n_gpus_per_node) == (1, 8)
    assert recipe.data.train_files == ("hf:OpenRLHF/prompt-collection-v0.1",)
    assert recipe.data.apply_chat_template
    assert recipe.critic.path == recipe.reward_model.path == "OpenRLHF/Llama-3-8b-rm-mixture"
    assert recipe.reward_model.normalize.mode == "config"
    for role in (recipe.actor, recipe.critic):
        assert role.optim.cpu_offload_fraction == 1
    assert recipe.reward.name == "rule"
    assert not recipe.uses_reward_section
    assert "WANDB_TOKEN" not in written
    assert recipe.trainer.logger == ("console", "jsonl", "wandb")


def test_openrlhf_options(tmp_path):
    recipe, written, _ = of(tmp_path, "openrlhf-notes")
    assert recipe.algorithm.kl_ctrl.type == "adaptive"
    assert recipe.algorithm.kl_ctrl.target_kl == 6
    assert (recipe.actor.ptx_coef, recipe.data.ptx_files) == (0.05, ("texts.jsonl",))
    assert not recipe.data.apply_chat_template
    assert "#   --zero_stage 2: " in written
    mixed, _, _ = of(tmp_path, "openrlhf-mixed")
    assert [(s.train_files, s.weight) for s in mixed.data.sources] == [
        (("hf:Open-Orca/OpenOrca",), 0.4), (("hf:Dahoas/full-hh-rlhf",), 0.6)
    ]  # fmt: skip
    assert mixed.data.ptx_files == ("hf:owner/texts:train",)
    for role in (mixed.ref, mixed.reward_model):
        assert role.megatron.offload.parameters
    assert mixed.ref.megatron.tensor_model_parallel_size == 2, "the actor's"
    remote, _, _ = recipe_of(tmp_path, "openrlhf", COMMANDS["openrlhf-mixed"].text
                             + " --remote_rm_url http://a:5000/get_reward")  # fmt: skip
    assert (remote.reward.name, remote.reward_model.path) == ("remote", None)


def test_openrlhfs_flags_with_dots(tmp_path):
    recipe, written, _ = of(tmp_path, "openrlhf-dotted")
    assert (recipe.data.train_batch_size, recipe.actor.ppo_mini_batch_size) == (1024, 128)
    assert recipe.trainer.n_gpus_per_node == 8
    assert (recipe.data.max_prompt_length, recipe.data.max_response_length) == (1024, 1024)
    assert (recipe.actor.optim.lr, recipe.critic.optim.lr) == (5e-7, 9e-6)
    assert recipe.actor.optim.min_lr == pytest.approx(1e-7)
    assert (recipe.actor.clip_ratio_low, recipe.actor.clip_ratio_high) == (0.2, 0.28)
    assert (recipe.algorithm.lam, recipe.critic.cliprange_value) == (1.0, 0.5), "since 0.10"
    correction = recipe.algorithm.rollout_correction
    assert (correction.rollout_is, correction.rollout_is_mode) == ("token", "truncate")
    assert (correction.rollout_is_lower, correction.rollout_is_threshold) == (0.5, 5.0)
    assert "--train.batch_size 128 counts samples" in written, "the flag as it was written"
    assert "Not recognised" not in written
    other, _, _ = of(tmp_path, "openrlhf-dotted-slurm")
    assert other.trainer.n_gpus_per_node * other.trainer.nnodes == 16
    kind = " --algo.advantage.is_correction_type seq-mask-tis"
    masked, _, _ = recipe_of(tmp_path, "openrlhf", COMMANDS["openrlhf-dotted"].text + kind)
    found = list(masked.algorithm.rollout_correction.rejections())
    assert found == [("geometric", 2.0, 0.2)]


def test_verls_keys_of_2026(tmp_path):
    recipe, written, _ = of(tmp_path, "verl-2026")
    assert recipe.critic.megatron.offload.optimizer
    assert not recipe.critic.megatron.offload.parameters
    assert recipe.critic.use_dynamic_bsz
    assert "#   data.apply_chat_template_kwargs.enable_thinking=False: the chat template" in written
    assert "#   trainer.use_v1=True: it chooses" in written
    assert "Not recognised" not in written


def test_staleness_of_verl_becomes_a_number_of_updates():
    given = {"async_training": {"staleness_threshold": 0.5, "partial_rollout": True}}
    translation = VerlTranslation(given)
    assert translation.document == {"rollout": {"max_staleness": 1}}


def test_deepspeed_chat_with_arguments_and_defaults_of_its_script(tmp_path):
    recipe, written, _ = of(tmp_path, "deepspeed-chat")
    assert (recipe.model.path, recipe.critic.path) == ("facebook/opt-1.3b", "facebook/opt-350m")
    assert recipe.reward_model.path == recipe.critic.path
    assert (recipe.data.train_batch_size, recipe.actor.ppo_mini_batch_size) == (32, 16)
    assert recipe.trainer.default_local_dir == "./output"
    assert recipe.actor.optim.lr == 9.65e-6
    assert recipe.critic.optim.lr_warmup_steps == 100
    assert "#   --actor_lora_dim 128: LoRA" in written


def test_deepspeed_chat_offloads(tmp_path):
    recipe, _, _ = of(tmp_path, "deepspeed-offload")
    assert recipe.data.train_files == ("hf:Dahoas/rm-static",)
    assert recipe.actor.optim.cpu_offload_fraction == recipe.critic.optim.cpu_offload_fraction == 1
    assert recipe.ref.megatron.offload.parameters


def test_uneven_stages_of_the_actor_are_those_of_the_other_roles_as_in_verl(tmp_path):
    text = SCRIPTS["run_moonlight16b_a3b_gsm8k_megatron.sh"]
    recipe, _, _ = recipe_of(tmp_path, "verl", text)
    for role in (recipe.actor, recipe.critic, recipe.ref):
        assert role.megatron.num_layers_in_last_pipeline_stage == 13


def test_what_a_script_does_not_give_is_named(tmp_path):
    text = "python ppo.py --model_name_or_path $1 --learning_rate $LR --output_dir $HOME/out"
    recipe, written, remarks = recipe_of(tmp_path, "trl", text)
    assert any("$1: the script does not give its value" in remark for remark in remarks)
    assert any("--learning_rate $LR: " in remark for remark in remarks)
    assert "$" not in str(recipe.trainer.run_dir)
    assert "default_local_dir: $HOME/out" in written


def test_values_that_mppo_refuses_become_comments(tmp_path):
    text = "python ppo.py --gamma 7 --seed x --wings 2 --num_mini_batches 0 --lam=0.9"
    recipe, written, remarks = recipe_of(tmp_path, "trl", text)
    assert recipe.algorithm.lam == 0.9
    for named in ("--gamma 7: is out of range", "--seed x: ", "--wings 2: ",
                  "--num_mini_batches 0: is not a whole number"):  # fmt: skip
        assert any(remark.startswith(named) for remark in remarks), named
        assert f"#   {named}" in written


@pytest.mark.parametrize("model", ["deepseek-llm-7b-chat"])
def test_a_migrated_recipe_is_planned(model, tmp_path, capsys):
    path = tmp_path / "recipe.yaml"
    path.write_text(migrate("verl", SCRIPTS["run_deepseek7b_llm.sh"])[0])
    own = [f"{role}.path={CONFIGS / model}" for role in ("model", "critic")]
    # FSDP's script names no layout: the dry run says that one GPU is too small
    assert train(["--config", str(path), "--dry-run", *own]) == 3
    assert "# parameters and estimated memory" in capsys.readouterr().out
    layout = [f"{role}.megatron.tensor_model_parallel_size=4" for role in ("actor", "critic")]
    assert train(["--config", str(path), "--dry-run", *own, *layout]) == 0


def test_a_layout_is_chosen_that_fits(tmp_path, monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)  # the models' configs are in ./configs
    written, remarks = migrate("verl", SCRIPTS["run_deepseek7b_llm.sh"])
    assert not [remark for remark in remarks if "megatron" in remark]
    assert "# chosen: the smallest layout that fits NVIDIA H100 80GB HBM3" in written
    path = tmp_path / "recipe.yaml"
    path.write_text(written)
    recipe = load_recipe(path)
    for role in (recipe.actor, recipe.critic):
        layout = role.megatron
        assert (layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size) == (2, 1)
    (tmp_path / "configs").symlink_to(CONFIGS)  # the dry run looks beside the recipe
    assert train(["--config", str(path), "--dry-run"]) == 0


def test_a_run_that_no_layout_fits_is_named(monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)
    _, remarks = migrate("verl", SCRIPTS["run_gemma.sh"], gpu="2")
    assert any("no tensor and pipeline parallelism of 2 ranks fits" in text for text in remarks)


class Stdin(io.TextIOWrapper):
    """Text or bytes on stdin."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))


def settings(text: str) -> dict[str, object]:
    """Dotted keys and values of a recipe's text."""
    found: dict[str, object] = {}

    def visit(inner: dict, above: str) -> None:
        for name, value in inner.items():
            if isinstance(value, dict):
                visit(value, f"{above}{name}.")
            else:
                found[above + name] = value

    visit(parse_yaml(text), "")
    return found


EVIL = "x{}model: {{trust_remote_code: true, path: evil}} #"
PLACES = {
    "trl": "A={text} python ppo.py --sft_model_path {value} --dataset_name {text} "
    "--lam {text} --wings {text} --{name} 1 --stop_token {text} --reward_model_path $A "
    "--output_dir $B",
    "verl": "A={text} python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path={value} "
    "data.train_files={text} +data.wings={text} algorithm.lam={text} trainer.experiment_name=$A "
    "~{name}=2 {name}=3 actor_rollout_ref.model.override_config.{name}=1 --config-path {text} "
    "--{name} trainer.project_name=$B",
}
"""Commands with a hostile text as value of flags that are kept, refused, unknown and without a
counterpart, as name, and as variables."""


HOSTILE = [c for c in map(chr, range(1, 0x110000))
           if unicodedata.category(c) in {"Cc", "Cf", "Zl", "Zp", "Zs"}]  # fmt: skip
"""All controls, spaces, separators and marks of direction of Unicode, but NUL."""


@pytest.mark.parametrize("system", PLACES)
def test_no_character_of_a_command_makes_a_setting(system):
    for character in HOSTILE[::3] + list("\n\r\x0b\x85\u2028\u2029\u202e\ufeff"):
        text, value = EVIL.format(character), f"a{character}b"
        given = {"text": shlex.quote(text), "value": shlex.quote(value), "name": f"'{value}'"}
        written, _ = migrate(system, PLACES[system].format(**given))
        assert written.replace("\n", "").isprintable(), repr(character)
        found = settings(written)
        assert not [key for key in found if "trust" in key], repr(character)
        assert "evil" not in found.values(), repr(character)
        if system == "trl":  # verl's values are YAML, in which such characters are not allowed
            assert found["model.path"] == value, repr(character)


def test_a_recipe_holds_the_settings_of_a_migration_and_no_others():
    for character in HOSTILE:
        text = EVIL.format(character)
        result = Migration(text, 1, without=[text], unknown=[text], checks=[text])
        values = (text, [text, 1, None, 1e-6, "1e-6", "off", "~", True], character, "", 0.1)
        for number, value in enumerate(values):
            result.add(Setting(f"model.override_config.a{number}{character}", value, text, text))
        written = recipe_text(result, text)
        named = {f"a{number}{character}": value for number, value in enumerate(values)}
        assert parse_yaml(written) == {"model": {"override_config": named}}, repr(character)
        assert written.replace("\n", "").isprintable(), repr(character)


def test_the_program_prints_the_recipe_and_names_unknown_flags(monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "stdin", Stdin(b"python ppo.py --lam 0.9 --wings 2 --token hf_secret99")
    )
    assert main(["trl"]) == 0
    shown = capsys.readouterr()
    assert "lam: 0.9" in shown.out
    assert "mppo-migrate: --wings 2: " in shown.err
    assert (
        "its version of TRL is not clear; 1 of its 3 flags are understood (lam), not" in shown.err
    )
    assert "hf_secret99" not in shown.out + shown.err


@pytest.mark.parametrize(
    ("system", "data", "words"),
    [
        ("verl", b"", "no setting key=value of verl; give"),
        ("trl", b"", "it has no flags; give TRL's command"),
        ("trl", b"echo hello --there", "0 of its 1 flags are understood, not there. The table"),
        ("trl", b"trl grpo --learning_rate 1e-6", "is not TRL's PPO"),
        ("verl", b"python train.py --learning_rate 3", "no setting key=value of verl; give"),
        ("openrlhf", b"python ppo.py --policy.wings 2", "looks like OpenRLHF 0.10 or later; 0 of"),
        ("trl", b"python ppo.py --lam '0.9", "a quote ' is not closed"),
        ("trl", b"\xff\xfe", "not UTF-8"),
        ("trl", b"a\0b", "NUL"),
        ("trl", b"a" * (1 << 18) + b"b", "more than"),
    ],
)
def test_what_is_not_a_command_of_the_system_is_refused(system, data, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", Stdin(data))
    assert main([system]) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert words in shown.err
    assert len(shown.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("system", "command", "words"),
    [
        ("trl", "python ppo.py --lam 0.9 --init_kl_coef 0.1 --steps 9",
         "looks like TRL 0.8 or earlier (a PPOConfig of one step); 1 of its 3 flags are understood "
         "(lam), not init_kl_coef, steps. The table has the flags of 0.9 to 1.12: docs/"),
        ("openrlhf", "python -m openrlhf.cli.train_ppo_ray --actor.adam.lr 1e-6 --actor.wings 2",
         "looks like OpenRLHF 0.10 or later; 1 of its 2 flags are understood (actor.adam.lr), not"),
        ("verl", "python -m verl.trainer.main_ppo critic.fsdp.param_offload=True actor.wings=2",
         "looks like verl 0.8 or later; 1 of its 2 flags are understood (critic.fsdp.param_offload)"
         ", not actor.wings."),
    ],
)  # fmt: skip
def test_a_command_of_another_version_says_which_and_what_is_understood(system, command, words):
    recipe, remarks = migrate(system, command)
    assert sum(words in remark for remark in remarks) == 1, remarks
    assert words in recipe.replace("\n#     ", " ")


def test_the_example_in_the_documentation_is_what_the_program_prints():
    page = (Path(__file__).parents[3] / "docs" / "migrating.md").read_text()
    command = page.partition("TRL's command\n\n")[2].partition("\n\nbecomes")[0]
    assert f"```yaml\n{migrate('trl', command)[0]}```\n" in page
