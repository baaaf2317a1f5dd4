"""Embedded models and model folders."""

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from mppo.hub.builtin import (
    MODELS,
    REWARD_MODELS,
    REWARDED,
    load_tokenizer,
    read_model_config,
    resolve_model,
)
from mppo.recipe.errors import ConfigError
from mppo.recipe.sections.model import ModelConfig

TEXT = "What is 12+5?  Say 'seventeen'.\n\té 漢"


@pytest.mark.parametrize("name", MODELS)
def test_embedded_model_loads_in_transformers_and_reads_text_without_loss(name, tmp_path):
    folder = resolve_model(f"builtin:{name}", tmp_path)
    tokenizer = load_tokenizer(folder)
    ids = tokenizer(TEXT)["input_ids"]
    assert tokenizer.decode(ids) == TEXT
    assert len(ids) == len(TEXT.encode())
    assert ids == PreTrainedTokenizerFast.from_pretrained(folder)(TEXT)["input_ids"]
    if name in REWARD_MODELS:
        logits = AutoModelForSequenceClassification.from_pretrained(folder)(
            torch.tensor([ids])
        ).logits
        assert logits.shape == (1, 1)
    else:
        logits = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([ids])).logits
        assert logits.shape == (1, len(ids), len(tokenizer))
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("text", ["aeiou", "xyz", "reverse banana\nananab"])
def test_the_embedded_reward_model_scores_the_share_of_vowels(text, tmp_path):
    folder = resolve_model("builtin:tiny-reward", tmp_path)
    ids = load_tokenizer(folder)(text)["input_ids"]
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    (score,) = model(torch.tensor([ids])).logits[0].tolist()
    vowels = sum(
        character in REWARDED for character in text.replace("<bos>", "").replace("<eos>", "")
    )
    assert score == pytest.approx(vowels / len(ids), abs=1e-3)


def test_embedded_weights_are_the_same_every_time_and_leave_the_generator_alone(tmp_path):
    state = torch.get_rng_state()
    first = resolve_model("builtin:tiny", tmp_path / "a")
    assert torch.equal(state, torch.get_rng_state())
    torch.rand(3)
    second = resolve_model("builtin:tiny", tmp_path / "b")
    weights = [(folder / "model.safetensors").read_bytes() for folder in (first, second)]
    assert weights[0] == weights[1]


def test_embedded_language_models_follow_from_the_seed_and_reward_models_do_not(tmp_path):
    seeds = [resolve_model("builtin:tiny", tmp_path, seed) for seed in (0, 1)]
    weights = [AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in seeds]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert (weights[0][name] - weights[1][name]).abs().max() > 0.01
    files = [(folder / "config.json").read_bytes() for folder in seeds]
    assert files[0] == files[1]
    assert resolve_model("builtin:tiny", tmp_path) == seeds[0]
    rewards = {resolve_model("builtin:tiny-reward", tmp_path, seed) for seed in (0, 1)}
    assert len(rewards) == 1


def test_embedded_model_is_written_once_and_whole(tmp_path):
    first = resolve_model("builtin:tiny", tmp_path)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert resolve_model("builtin:tiny", tmp_path) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    assert [entry.name for entry in tmp_path.iterdir()] == [first.name]


def test_chat_template_is_bos_question_newline_answer_eos(tmp_path):
    tokenizer = load_tokenizer(resolve_model("builtin:tiny", tmp_path))
    question = [{"role": "user", "content": "1+2="}]
    both = [*question, {"role": "assistant", "content": "3"}]
    requested = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    assert requested == "<bos>1+2=\n"
    assert tokenizer.apply_chat_template(both, tokenize=False) == requested + "3<eos>"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/no/such/folder", "no such folder"),
        (".", "no config.json"),
        ("builtin:huge", "no such embedded model(.|\\n)*the embedded models are builtin:tiny"),
    ],
)
def test_wrong_path_says_what_would_be_right(path, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        resolve_model(path, tmp_path)


def test_folder_without_tokenizer_names_the_key_to_set(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ValueError, match=r"model\.tokenizer_path"):
        load_tokenizer(tmp_path)


def ships_code(folder: Path, kind: str, reported: dict[str, object]) -> Path:
    """A folder whose config or tokenizer needs its Python code; the code creates a file."""
    folder.mkdir()
    (folder / "code.py").write_text(f"open({str(folder / 'mark')!r}, 'w')\nclass Mine: pass\n")
    reported = {
        **reported,
        "auto_map": {kind: ["code.Mine", None] if "Token" in kind else "code.Mine"},
    }
    (folder / ("tokenizer_config.json" if "Token" in kind else "config.json")).write_text(
        json.dumps(reported)
    )
    return folder


def test_code_in_a_model_folder_is_run_only_where_the_recipe_trusts_it(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "c"))
    monkeypatch.syspath_prepend(str(tmp_path / "c"))
    assert not ModelConfig().trust_remote_code
    model = ships_code(tmp_path / "model", "AutoConfig", {"model_type": "mine"})
    with pytest.raises(ValueError, match="trust_remote_code"):
        read_model_config(model)
    tokens = ships_code(tmp_path / "tokens", "AutoTokenizer", {"tokenizer_class": "Mine"})
    with pytest.raises(ConfigError, match="trust_remote_code"):
        load_tokenizer(tokens)
    assert not (model / "mark").exists()
    assert not (tokens / "mark").exists()
    with pytest.raises(AttributeError):  # Mine builds no tokenizer
        read_model_config(model, trust_remote_code=True)
    assert (model / "mark").exists()
