"""Users' mistakes with programs: exit code, the words that name the fix, nothing heavy imported.

``bad_recipes`` has the mistakes inside recipes, ``test_recipe_bad_input`` runs them.
"""

from __future__ import annotations

import shlex

import pytest
from bad_recipe import GOOD
from light_programs import LightPrograms

TRAIN = "mppo-train --config recipe.yaml"
PLAN = "mppo-plan --config recipe.yaml"
DATA = f"{TRAIN} data.task=null reward.verifier=gsm8k data.train_files"
REWARD = f"{TRAIN} reward.name=function reward.function"
AGENT = f"{TRAIN} rollout.agent.path=code.py"
TOOLS = f"{AGENT}:answer data.apply_chat_template=true rollout.agent.tools"
FILES = {
    "recipe.yaml": GOOD,
    "code.py": "def score(answer): return 1.0\n"
    "def answer(conversation): return None\n"
    "def add(first, second): return first + second\n",
    "broken.py": "import no_such_module\n",
    "pointer.jsonl": "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
    "pointer.parquet": "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
    "empty.jsonl": "",
    "question.jsonl": '{"question": "1+1=", "answer": "2"}\n',
    "rows.jsonl": '{"prompt": "1+1=", "answer": "2"}\n',
    "lines.jsonl": "1+1=2\n",
}
# the command and what it says; each ends with 2
MISTAKES = {
    "mppo-train": "give a recipe: --config recipe.yaml",
    "mppo-train recipe.yaml": "write --config recipe.yaml if it is the recipe",
    "mppo-train --confg recipe.yaml": "unrecognized arguments: --confg",
    "mppo-train --config": "argument --config: expected one argument",
    "mppo-train --config nowhere.yaml": "fix: give a YAML file",
    "mppo-train --config folder": "is a folder, not a file",
    "mppo-train data.task=arithmetic actor.ppo_mini_batch=3": "actor.ppo_mini_batch_size?",
    f"{TRAIN} --trainer.seed=3": "a key of the recipe has no dashes: write trainer.seed=3",
    f"{TRAIN} trainer.seed 3": "write section.key=value",
    f"{TRAIN} --world-size 3": "without it the launcher sets the number of ranks",
    f"{TRAIN} --world-size many --dry-run": "invalid int value: 'many'",
    f"{TRAIN} --gpu h100-80gb": "--gpu needs --dry-run",
    f"{TRAIN} --simulate": "--simulate needs --dry-run",
    f"{TRAIN} --time": "--time needs --dry-run",
    f"{TRAIN} --search best.yaml": "--search needs --dry-run",
    f"{TRAIN} --picture plan.svg": "--picture needs --dry-run",
    f"{TRAIN} --mean-prompt 100": "--mean-prompt needs --dry-run",
    f"{TRAIN} --mean-response 100": "--mean-response needs --dry-run",
    f"{TRAIN} --turns 0": "--turns needs --dry-run",
    f"{TRAIN} --turn-seconds 1": "--turn-seconds needs --dry-run",
    f"{TRAIN} --turn-tokens 9": "--turn-tokens needs --dry-run",
    f"{TRAIN} actor.ppo_mini_batch=3": "did you mean actor.ppo_mini_batch_size?",
    f"{TRAIN} rollout.temperature=0": "rollout.temperature",
    f"{TRAIN} data.train_files=[nowhere.jsonl] data.task=null": "give the path of a readable file",
    f"{TRAIN} model.path=Qwen/Qwen2.5-0.5B-Instruct": "set model.hub: true, or run `hf download",
    f"{TRAIN} model.path=folder": "give a Hugging Face model folder",
    f"{TRAIN} actor_rollout_ref.rollout.name=vllm": "choose one of: local, sglang",
    f"{TRAIN} trainer.logger=[tensorbord]": "did you mean tensorboard?",
    f"{TRAIN} --dry-run reward.name=function reward.function=no.py:score": "no such file no.py",
    f"{TRAIN} --dry-run --world-size 3 actor.megatron.tensor_model_parallel_size=2":
        "start a multiple of 2 ranks",
    f"{TRAIN} --dry-run --world-size 0": "give a number of ranks",
    f"{TRAIN} --dry-run --gpu h1000": "unknown GPU (did you mean h100-80gb?)",
    f"{TRAIN} trainer.plugins=[code.py]": "it registers nothing",
    f"{TRAIN} trainer.plugins=[broken.py]": "No module named 'no_such_module'",
    f"{TRAIN} trainer.plugins=[nowhere.py]": "no such file",
    f"{REWARD}=code.py:score": "its parameters do not fit",
    f"{REWARD}=code.py:scores": "code.py has no function 'scores'",
    f"{REWARD}=broken.py:score": "importing broken.py failed: ModuleNotFoundError",
    f"{REWARD}=code.py": "does not name a function",
    f"{AGENT}:add": "it cannot be called as an agent",
    f"{AGENT}:agent": "code.py has no agent 'agent'",
    f"{TRAIN} rollout.agent.path=broken.py:agent": "importing broken.py failed",
    f"{TRAIN} rollout.agent.run=code.py:answer": "it is not a coroutine function",
    f"{TOOLS}=[{{path:\\ code.py:plus,name:\\ add}}]": "code.py has no tool 'plus'",
    f"{DATA}=[pointer.jsonl]": "git lfs pull",
    f"{DATA}=[pointer.parquet]": "git lfs pull",
    f"{DATA}=[empty.jsonl]": "empty.jsonl",
    f"{DATA}=[question.jsonl]": "no key 'prompt'",
    f"{DATA}=[lines.jsonl]": "lines.jsonl line 1",
    f"{DATA}=[folder]": "give the files in it",
    f"{DATA}=[rows.jsonl] data.answer_key=label": "no key 'label'",
    f"{DATA}=[rows.jsonl] reward.verifier=null": "no verifier is known for the data source 'rows'",
    f"{DATA}=[rows.jsonl] reward.verifier=gsm9k": "did you mean 'gsm8k'?",
    f"{PLAN} --gpu h1000": "unknown GPU (did you mean h100-80gb?)",
    f"{PLAN} --world-size 0": "give a number of ranks",
    f"{PLAN} --world-size -2": "give a number of ranks",
    f"{PLAN} reward.name=function reward.function=code.py:score": "its parameters do not fit",
    "python -m mppo.preflight": "the following arguments are required: action",
    "python -m mppo.preflight recipe --config recipe.yaml --world-size 0":
        "give a number of ranks",
    "python -m mppo.preflight recipe --config recipe.yaml --world-size 1 reward.name=function "
    "reward.function=code.py:score": "its parameters do not fit",
    "mppo-report nowhere": "nowhere",
    "mppo-evaluate": "the following arguments are required: --config",
    "mppo-replay": "the following arguments are required",
    "mppo-convert": "the following arguments are required: command",
    "mppo-convert verify --hf folder": "the following arguments are required: --megatron",
    "mppo-plan": "set data.task (arithmetic, ...) or data.train_files",
    "mppo-plan recipe.yaml": "write --config recipe.yaml if it is the recipe",
    "mppo-plan --config nowhere.yaml": "fix: give a YAML file",
    "mppo-plan --config recipe.yaml --search": "argument --search: expected one argument",
    "mppo-inspect": "the following arguments are required: folder",
    "mppo-inspect nowhere": "give the folder of a run with trainer.dump_rollouts: true",
    "mppo-inspect folder": "give the folder of a run with trainer.dump_rollouts: true",
    "mppo-inspect folder --stp 3": "unrecognized arguments: --stp 3",
    "mppo-inspect folder --step last": "invalid int value: 'last'",
    "mppo-migrate": "the following arguments are required",
    "mppo-migrate verll": "invalid choice: 'verll'",
    "python -m mppo.data": "the following arguments are required: command",
    "python -m mppo.data prepare": "the following arguments are required: name, --from, --out",
    "python -m mppo.data prepare gsm9k --from folder --out new": "invalid choice: 'gsm9k'",
    "python -m mppo.data prepare gsm8k --from folder --out full --format jsonl":
        "name a new folder",
}  # fmt: skip


@pytest.fixture(scope="module")
def programs():
    with LightPrograms() as found:
        yield found


@pytest.mark.parametrize(("command", "says"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_is_told_before_anything_heavy_is_imported(command, says, programs, tmp_path):
    folder, out = tmp_path / "folder", tmp_path / "out"
    for path in (folder, out, tmp_path / "full" / "x"):
        path.mkdir(parents=True)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    words = shlex.split(command)
    at = 3 if words[0] == "python" else 1
    told = programs.run(" ".join(words[:at]), words[at:], tmp_path, out)
    assert told.code == 2, told.err
    assert says in " ".join(told.err.split()), told.err
    assert "Traceback" not in told.err
    assert told.out == ""


def test_the_table_holds_sixty_mistakes():
    assert len(MISTAKES) >= 60
