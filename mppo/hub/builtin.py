"""Model folders: a Hugging Face folder on disk, or one of the embedded tiny models.

The embedded models need no download. Each has a config.json of a real family, a byte tokenizer and
random weights that follow from a seed. They are written once per seed into a cache folder in the
Hugging Face form, so weight import, rollout and export run the same code as with a real model.
Small models, whose config.json is another model's with small sizes, are written in the same way.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from mppo.hub.local_model import BUILTIN_PREFIX, no_model_folder
from mppo.hub.tokenizing import check_growth
from mppo.recipe.errors import ConfigError, config_error, nearest
from mppo.safety.input_error import InputError
from mppo.safety.input_files import check_regular_files, read_json
from mppo.safety.temporary import unfinished_folder
from mppo.weights.model_folder import companion_folder, weights_folder

if TYPE_CHECKING:  # imported where they are used: the check of a recipe takes a second without
    from transformers import PretrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, BOS, EOS, SEP = "<pad>", "<bos>", "<eos>", "<sep>"
VOCAB = (PAD, BOS, EOS, SEP, *sorted(pre_tokenizers.ByteLevel.alphabet()))

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% else %}{{ '\\n' }}{% endif %}"
    "{% endfor %}"
)
"""``<bos>question\\n``, then the answer and ``<eos>``: the fewest tokens that a turn can have."""

_TRUNK: dict[str, Any] = {
    "vocab_size": len(VOCAB), "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "pad_token_id": VOCAB.index(PAD), "bos_token_id": VOCAB.index(BOS),
    "eos_token_id": VOCAB.index(EOS), "tie_word_embeddings": False,
}  # fmt: skip
_MOE_TRUNK: dict[str, Any] = {**_TRUNK, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

MODELS: dict[str, dict[str, Any]] = {
    "tiny": {**_TRUNK, "model_type": "qwen2"},
    "tiny-reward": {**_TRUNK, "model_type": "qwen2", "num_labels": 1},
    "tiny-llama": {**_TRUNK, "model_type": "llama", "tie_word_embeddings": True},
    "tiny-qwen3": {**_TRUNK, "model_type": "qwen3", "head_dim": 32},
    "tiny-moe": {
        **_MOE_TRUNK, "model_type": "qwen2_moe", "num_experts": 4,
        "shared_expert_intermediate_size": 64, "norm_topk_prob": False,
    },
    "tiny-qwen3-moe": {
        **_MOE_TRUNK, "model_type": "qwen3_moe", "head_dim": 32, "num_experts": 4,
        "norm_topk_prob": True,
    },
    "tiny-moonlight": {
        **_MOE_TRUNK, "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": None,
        "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
        "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.446,
        "rope_interleave": True,
    },
}  # fmt: skip
"""Each embedded model's config.json, by the name after ``builtin:``. ``tiny-reward`` is a reward
model with one label; the others are language models."""
REWARD_MODELS = frozenset({"tiny-reward"})
REWARDED = "aeiou"
"""The characters that ``tiny-reward`` prefers: its score is their share of a text's tokens."""

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "head_dim": 8, "query_pre_attn_scalar": 8, "vocab_size": len(VOCAB),
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32, "num_experts": 8,
    "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
"""Largest values of a small model's config.json; smaller ones, and keys that it lacks, stay."""


def cache_folder() -> Path:
    """The folder of the embedded models: ``MPPO_CACHE``, or ``mppo`` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("MPPO_CACHE", Path(base) / "mppo"))


def resolve_model(path: str, cache_dir: str | Path | None = None, seed: int = 0) -> Path:
    """Return the folder of a recipe's ``model.path``, ``critic.path`` or ``ref.path``: a Hugging
    Face folder, a Megatron checkpoint with its companions beside it, or ``builtin:NAME``
    (``MODELS``).

    Several processes may call this at the same time: an embedded model's folder gets its name when
    it is complete. ``seed`` is that of an embedded language model's weights only.

    Raises:
        ConfigError: no such folder, no config.json in it, or no such embedded model.
    """
    if path.startswith(BUILTIN_PREFIX):
        return _write_builtin(
            path.removeprefix(BUILTIN_PREFIX), Path(cache_dir or cache_folder()), seed
        )
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ConfigError([no_model_folder("model.path", path)])
    try:
        folder = weights_folder(folder)
        companions = companion_folder(folder)
    except ValueError as error:
        fix = "name a model in Hugging Face form, or a checkpoint with its config.json"
        raise config_error("model.path", path, str(error), fix) from error
    if not (companions / "config.json").is_file():
        fix = "name a model in Hugging Face form, as save_pretrained writes it"
        raise config_error("model.path", path, "the folder has no config.json", fix)
    return folder


def read_model_config(folder: str | Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """Read the transformers config of a Hugging Face folder, or of the one beside a Megatron
    checkpoint; ``trust_remote_code`` runs Python code of the folder. InputError if it is missing or
    unreadable, names an unknown family, or holds a value out of range."""
    from transformers import AutoConfig

    from mppo.weights.hf.config_file import CONFIG, read_config_file

    folder = companion_folder(folder)
    read_config_file(folder)
    try:
        return AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # transformers raises many types for an unexpected value
        if trust_remote_code:
            raise  # the folder's own code failed: its traceback says where
        raise InputError(f"{folder / CONFIG}: {_one_line(error)}") from error


@cache
def load_config(path: str | Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """Read the config of a recipe's model path; the result is cached."""
    return read_model_config(resolve_model(str(path)), trust_remote_code)


def load_tokenizer(folder: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a Hugging Face folder, or the one beside a Megatron checkpoint, without
    a download.

    It has an end-of-sequence and a padding token; if the folder names no padding token, the
    end-of-sequence token is used.

    Raises:
        ConfigError: the folder holds no tokenizer, or the tokenizer has no end-of-sequence token.
    """
    from transformers import AutoTokenizer

    folder = companion_folder(folder)
    if not any(folder.glob("tokenizer*")) and not any(folder.glob("*vocab*")):
        why = "the folder has no tokenizer.json, tokenizer.model or vocab.json"
        raise _tokenizer_error(folder, why, "name a folder that holds a tokenizer")
    try:
        _check_tokenizer_files(folder)
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # transformers raises many types for an unexpected value
        fix = "name a folder with a valid tokenizer.json and tokenizer_config.json"
        raise _tokenizer_error(folder, f"unreadable: {_one_line(error)}", fix) from error
    if tokenizer.eos_token_id is None:
        why = "the tokenizer has no eos_token, without which no response ends"
        raise _tokenizer_error(folder, why, "set eos_token in its tokenizer_config.json")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def eos_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id of a tokenizer's end-of-sequence token; InputError if it has none."""
    token = tokenizer.eos_token_id
    if not isinstance(token, int):
        raise InputError(f"the tokenizer's eos_token_id is {token}, not a token; name an eos_token")
    return token


def _check_tokenizer_files(folder: Path) -> None:
    for place in (folder, folder / "additional_chat_templates"):
        if place.is_dir():
            check_regular_files(place)
    for file in folder.glob("*token*.json"):
        content = read_json(file)
        if file.name == "tokenizer.json":
            check_growth(file, content)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte, and pad, bos, eos and sep: a byte-level BPE without
    merges, the only form that every family's tokenizer class in transformers loads unchanged."""
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(BPE({token: index for index, token in enumerate(VOCAB)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=PAD,
        sep_token=SEP,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=_TRUNK["max_position_embeddings"],
        padding_side="left",
    )


def _one_line(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 1000 else text[:997] + "..."


def _tokenizer_error(folder: str | Path, why: str, fix: str) -> ConfigError:
    return config_error("model.tokenizer_path", str(folder), why, fix)


def _write_builtin(name: str, cache_dir: Path, seed: int) -> Path:
    if name not in MODELS:
        known = [BUILTIN_PREFIX + each for each in MODELS]
        guess = nearest(BUILTIN_PREFIX + name, known)
        hint = f"did you mean {guess!r}? " if guess else ""
        fix = f"{hint}the embedded models are {', '.join(known)}"
        raise config_error("model.path", BUILTIN_PREFIX + name, "no such embedded model", fix)
    parts: list[Any] = [MODELS[name], VOCAB, CHAT_TEMPLATE]
    if name in REWARD_MODELS:
        parts += [0, REWARDED]
        save = partial(save_random_model, scores=True, change=_prefer_characters)
    else:
        parts.append(seed)
        save = partial(save_random_model, scores=False, seed=seed)
    digest = definition_hash(parts)
    return written_once(cache_dir / f"{name}-{digest}", partial(save, MODELS[name]))


def definition_hash(definition: Any) -> str:
    text = json.dumps(definition, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def written_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """A folder of the cache; ``write`` fills it if it is missing. Several processes may call this
    at the same time: a folder gets its name when it is complete, and the name says what is in
    it."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with unfinished_folder(folder.parent) as unfinished:
        write(unfinished)
        unfinished.chmod(0o755)
        try:
            unfinished.rename(folder)
        except OSError:
            # another process finished first; its folder holds the same bytes
            if not folder.is_dir():
                raise
    return folder


def save_random_model(
    fields: Mapping[str, Any],
    folder: Path,
    scores: bool,
    seed: int = 0,
    change: Callable[[Any], None] = lambda model: None,
) -> None:
    """Write a model of random float32 weights with a byte tokenizer.

    Args:
        fields: content of its config.json.
        scores: it is a reward model rather than a language model.
        change: changes the random weights.
    """
    import torch
    import transformers as hf

    own = dict(fields)
    config = hf.AutoConfig.for_model(own.pop("model_type"), **own)
    auto = hf.AutoModelForSequenceClassification if scores else hf.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=torch.float32)
        change(model)
    hf.utils.logging.disable_progress_bar()  # one bar per rank, for a few megabytes
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def _prefer_characters(model: Any) -> None:
    """Set the weights with which a Qwen2 reward model scores the share of ``REWARDED`` in a text.

    The embeddings have two features of equal size: a constant, and +1 or -1 for a character of
    ``REWARDED`` or any other token. Without queries, the first layer's attention is the mean over
    all tokens; it writes a small multiple of the mean feature, so small that the norm stays
    constant, into a third dimension, from which the head computes the share. All other layers add
    nothing.
    """
    import torch

    constant, feature, mean, small = 0, 1, 2, 1e-3
    trunk, hidden = model.model, model.config.hidden_size
    norm = (2 / hidden) ** 0.5  # of an embedding
    with torch.no_grad():
        embeddings = trunk.embed_tokens.weight.zero_()
        embeddings[:, constant] = 1.0
        embeddings[:, feature] = -1.0
        embeddings[[VOCAB.index(character) for character in REWARDED], feature] = 1.0
        for layer in trunk.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        attention = trunk.layers[0].self_attn
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection.weight.zero_()
            projection.bias.zero_()
        attention.v_proj.weight[0, feature] = norm
        attention.o_proj.weight[mean, 0] = small
        head = model.score.weight.zero_()
        head[0, constant] = norm / 2
        head[0, mean] = norm / (2 * small)


def cached_small_model(plain: Mapping[str, Any]) -> Path:
    """The folder, in Hugging Face form, of a small model in the cache, written if it is missing.
    Several processes may call this at the same time; ``plain``: content of a config.json."""
    digest = definition_hash([dict(plain), SIZES, VOCAB])
    folder = cache_folder() / f"small-{plain['model_type']}-{digest}"
    return written_once(folder, lambda unfinished: write_small_model(plain, unfinished))


def write_small_model(plain: Mapping[str, Any], folder: Path) -> None:
    """Write a model with a config's family, head and options, but small sizes, and a byte
    tokenizer."""
    small = {**plain, **{k: min(v, plain[k]) for k, v in SIZES.items() if plain.get(k) is not None}}
    if "num_key_value_heads" in plain:
        grouped = plain["num_key_value_heads"] < plain["num_attention_heads"]
        small["num_key_value_heads"] = 2 if grouped else small["num_attention_heads"]
    tokens = zip(("pad", "bos", "eos"), (PAD, BOS, EOS))
    small |= {f"{kind}_token_id": VOCAB.index(token) for kind, token in tokens}
    (architecture,) = small.pop("architectures")
    save_random_model(small, folder, architecture.endswith("ForSequenceClassification"))
