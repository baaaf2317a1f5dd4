"""``mppo.serve`` serves a run's exported actor with the actor's weights, and answers a chat."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from pages.blocks import blocks_of
from sglang_case import TOLERANCE, needs_sglang
from transformers import AutoModelForCausalLM, AutoTokenizer

from mppo.hub.builtin import resolve_model
from mppo.parallel.addresses import free_port
from mppo.recipe.sections.rollout import SamplingConfig
from mppo.rollout.sglang.http_client import JsonClient
from mppo.rollout.sglang.server_api import SGLangApi, sampling_parameters
from mppo.train import main as train

pytestmark = [pytest.mark.server, needs_sglang]
START_S = 900.0
PAGE = Path(__file__).parents[2] / "docs/rollout.md"
RECIPE = """
model: {path: "builtin:tiny", dtype: float32}
data:
  task: arithmetic
  train_batch_size: 8
  val_size: 0
  max_prompt_length: 16
  max_response_length: 4
actor: {ppo_mini_batch_size: 8, optim: {lr: 1e-2}}
algorithm: {adv_estimator: reinforce_plus_plus}
trainer: {total_training_steps: 1, warm_start_steps: 5, val_before_train: false, logger: [jsonl]}
"""


@pytest.fixture(scope="module")
def actor(tmp_path_factory) -> Path:
    """The exported actor of a run that changed its weights."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "small.yaml").write_text(RECIPE)
    run = folder / "run"
    assert train(["--config", str(folder / "small.yaml"), f"trainer.default_local_dir={run}"]) == 0
    return run / "actor"


@dataclass(frozen=True)
class Served:
    """A server as the documentation starts it.

    Args:
        port: where it listens.
        key: that its clients send.
        request: the documentation's request to it, a command.
        environment: variables of the documentation's shell.
    """

    port: int
    key: str
    request: str
    environment: dict[str, str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture(scope="module")
def served(actor):
    """The actor, served by the commands of ``PAGE`` on a free port."""
    port = free_port()
    (text,) = (b.text for b in blocks_of(PAGE) if b.text.startswith("export MPPO_ROLLOUT_API_KEY"))
    text = text.replace("30000", str(port)).replace("RUN/", f"{actor.parent}/")
    export, start, request = text.split("\n", 2)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "MPPO_DEVICE": "cpu"}
    say = ["bash", "-c", f"{export}\necho $MPPO_ROLLOUT_API_KEY"]
    key = subprocess.run(say, env=environment, capture_output=True, text=True, check=True).stdout
    environment["MPPO_ROLLOUT_API_KEY"] = key.strip()
    command = ["bash", "-c", f"exec {start}"]
    server = subprocess.Popen(command, env=environment, start_new_session=True)
    served = Served(port, key.strip(), request, environment)
    api, deadline = SGLangApi(served.url, served.key, 60.0), time.monotonic() + START_S
    try:
        while not api.is_up():
            assert server.poll() is None, "it ended while starting"
            assert time.monotonic() < deadline, "it does not come up"
            time.sleep(0.5)
        yield served
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@torch.no_grad()
def logprobs(folder: Path, tokens: list[int]) -> list[float]:
    """A model folder's log-probabilities of every token but the first."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    scores = model(torch.tensor([tokens])).logits[0].log_softmax(-1)[:-1]
    return scores.gather(-1, torch.tensor(tokens)[1:, None])[:, 0].tolist()


def test_a_served_actor_has_the_log_probabilities_of_its_own_weights(actor, served):
    tokens = AutoTokenizer.from_pretrained(actor)("12+7=19, 3+4=7")["input_ids"]
    (found,) = SGLangApi(served.url, served.key, 60.0).score([tokens])
    assert found == pytest.approx(logprobs(actor, tokens), abs=TOLERANCE)
    start = logprobs(resolve_model("builtin:tiny"), tokens)
    assert max(abs(a - b) for a, b in zip(found, start)) > 100 * TOLERANCE


def test_a_served_actor_answers_a_runs_generation_requests(served):
    requested = sampling_parameters(SamplingConfig(), 4, [])
    (answer,) = SGLangApi(served.url, served.key, 60.0).generate([[5, 6, 7]], requested)
    assert 0 < len(answer.tokens) == len(answer.logprobs) <= 4


def test_a_served_actor_answers_a_chat_like_transformers(actor, served):
    tokenizer = AutoTokenizer.from_pretrained(actor)
    model = AutoModelForCausalLM.from_pretrained(actor, dtype=torch.float32)
    messages = [{"role": "user", "content": "12+7="}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=6, do_sample=False)[0]
    expected = tokenizer.decode(answer[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    reply = JsonClient(served.url, served.key, 60.0).post(
        "/v1/chat/completions",
        {"model": "default", "messages": messages, "temperature": 0, "max_tokens": 6},
    )
    assert reply["choices"][0]["message"]["content"] == expected
    command = ["bash", "-c", served.request]
    shown = subprocess.run(command, env=served.environment, capture_output=True, check=True).stdout
    assert json.loads(shown)["choices"][0]["message"]["content"].startswith(expected)
