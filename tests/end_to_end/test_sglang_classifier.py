"""A reward model behind SGLang's ``/classify``: its scores are those of transformers."""

from __future__ import annotations

import os

import pytest
import torch
import transformers
from forked_server import forked_server
from sglang_case import SIZES, START_S, needs_sglang

from mppo.batch.prompt import Prompt
from mppo.hub.builtin import load_tokenizer, read_model_config, resolve_model
from mppo.recipe.sections.reward import RewardConfig
from mppo.rewards.remote.remote_reward import build_remote_reward
from mppo.rewards.response import Response
from mppo.rollout.sglang.server_options import server_environment, server_options

pytestmark = [pytest.mark.server, needs_sglang]
KEY = "a-key-of-this-test"
TEMPLATE = "{% for m in messages %}\n\n{{ m['role'] }}: {{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama with a score head, and a tokenizer with a chat template of its own."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_labels=1, pad_token_id=0)
    model = transformers.LlamaForSequenceClassification(config)
    folder = tmp_path_factory.mktemp("reward")
    model.save_pretrained(folder)
    tokenizer = load_tokenizer(resolve_model("builtin:tiny-reward"))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def url(folder, forks_servers):
    """The address of an SGLang server with that model."""
    options = server_options(
        str(folder), "float32", 1, True, {}, read_model_config(folder), with_weights=True
    )
    options |= {"is_embedding": True}
    environment = {**os.environ, **server_environment(1, True, "llama")}
    server = forked_server(0, options, environment, KEY, folder, START_S)
    server.start()
    try:
        server.wait_until_up()
        yield f"http://127.0.0.1:{server.port}/classify"
    finally:
        server.stop()


@torch.no_grad()
def reference(folder, responses: list[Response]) -> list[float]:
    """The scores of transformers, one text at a time."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = load_tokenizer(folder)
    scores = []
    for each in responses:
        messages = [*each.prompt.messages, {"role": "assistant", "content": each.text}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        scores.append(model(torch.tensor([ids])).logits.item())
    return scores


def test_scores_are_those_of_transformers_in_the_models_own_template(folder, url, monkeypatch):
    monkeypatch.setenv("SGLANG_KEY_OF_TEST", KEY)
    texts = [f"answer {index} " + "x" * index for index in range(7)]
    messages = ({"role": "user", "content": "Say it."},)
    given = [
        Response(Prompt(i, (1,), "poems", "", "unused", messages=messages), text)
        for i, text in enumerate(texts)
    ]
    options = {"tokenizer_path": str(folder), "api_key_env": "SGLANG_KEY_OF_TEST", "batch_size": 3}
    section = RewardConfig(name="remote", format="sglang", url=url, kwargs=options)
    scores = build_remote_reward(section)(given)
    assert scores == pytest.approx(reference(folder, given), abs=1e-4)
    assert len({round(score, 4) for score in scores}) == len(texts)
