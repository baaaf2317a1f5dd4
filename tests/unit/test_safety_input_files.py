"""Input files that must be accepted; ``tests/attacks`` has those that are refused."""

from __future__ import annotations

import json
import math

import pytest

from mppo.data.chat_template import render_with
from mppo.hub.builtin import byte_tokenizer
from mppo.recipe.document import parse_yaml
from mppo.recipe.errors import ConfigError
from mppo.safety.input_files import MAX_DEPTH, inside, open_file, parse_json, read_json
from mppo.weights.hf.config_file import check_numbers
from mppo.weights.hf.input_folder import HFFolder

MESSAGES = [{"role": "system", "content": "é"}, {"role": "user", "content": "1+1=\n'x'"}]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n  [{{ m.role | upper }}] {{ m.content | tojson }}\n"
    "{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


def test_json_may_be_nested_and_hold_pairs_and_its_writers_nan():
    assert parse_json('"[[[" ') == "[[["
    assert parse_json(nested(MAX_DEPTH)) == json.loads(nested(MAX_DEPTH))
    with pytest.raises(ValueError, match="levels deep"):
        parse_json(nested(MAX_DEPTH + 1))
    assert parse_json('"\\ud83d\\ude00"') == "\U0001f600"
    assert math.isnan(parse_json("[NaN]", nan=True)[0])
    assert parse_json('{"a": 1, "a": 2}') == {"a": 2}
    brackets = json.dumps("[" * 200)
    assert parse_json(brackets) == "[" * 200


def test_yaml_may_use_anchors():
    text = "a: &a {x: 1, y: [1, 2]}\nb: {<<: *a, x: 2}\nc: [*a, *a]\n"
    assert parse_yaml(text)["b"] == {"x": 2, "y": [1, 2]}
    assert parse_yaml(nested(MAX_DEPTH)) == json.loads(nested(MAX_DEPTH))


def test_links_inside_a_folder_and_of_the_cache_of_hugging_face_are_followed(tmp_path):
    repository = tmp_path / "models--some--model"
    snapshot, blobs = repository / "snapshots/0123abcd", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "ffff").write_bytes(b"content")
    (snapshot / "config.json").symlink_to("../../blobs/ffff")
    (snapshot / "again.json").symlink_to("config.json")
    for name in ("config.json", "again.json"):
        assert open_file(inside(snapshot, name)).read() == b"content"
    (snapshot / "other").symlink_to("../../../other")
    with pytest.raises(ValueError, match="outside the folder; copy the file into it"):
        inside(snapshot, "other")


def test_a_folder_may_itself_be_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real/x").touch()
    (tmp_path / "link").symlink_to("real")
    assert inside(tmp_path / "link", "x") == tmp_path / "link/x"


def test_a_missing_file_is_reported(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        read_json(tmp_path / "config.json")
    with pytest.raises(ValueError, match="no such folder"):
        HFFolder(tmp_path / "nowhere")


def test_sizes_of_published_models_pass():
    check_numbers(
        {
            "num_hidden_layers": 126, "hidden_size": 16384, "intermediate_size": 53248,
            "num_attention_heads": 128, "vocab_size": 262_144, "rope_theta": 1e9,
            "max_position_embeddings": 10_485_760, "rms_norm_eps": 1e-6, "sliding_window": None,
            "rope_scaling": None, "mlp_only_layers": [],
        }
    )  # fmt: skip
    check_numbers({"num_hidden_layers": 61, "n_routed_experts": 384, "q_lora_rank": None})


def test_a_template_gives_the_same_text_in_its_own_process():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    conversations = [MESSAGES, MESSAGES[1:]]
    expected = tokenizer.apply_chat_template(
        conversations, add_generation_prompt=True, tokenize=False
    )
    assert render_with(tokenizer, conversations, "key") == expected


def test_a_templates_own_error_is_reported():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ConfigError, match="roles must alternate"):
        render_with(tokenizer, [MESSAGES], "key")
