"""Hundreds of faults of a real reward server: no score is lost or given to another response."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import faulty_reward_server
import pytest
from faulty_reward_server import true_score

from mppo.batch.prompt import Prompt
from mppo.hub.builtin import load_tokenizer, resolve_model
from mppo.recipe.sections.reward import RewardConfig
from mppo.rewards.remote.remote_reward import build_remote_reward
from mppo.rewards.response import Response
from mppo.rewards.scores import read_scores

# many attempts: on a busy machine, right answers may take too long as well
PATIENT = {"retries": 200, "backoff_s": 0.001, "max_backoff_s": 0.01, "concurrency": 32}
TIMEOUT_S = 1.0


@pytest.fixture(scope="module")
def port():
    """The port of the faulty server, which is a process of its own."""
    command = [sys.executable, str(Path(faulty_reward_server.__file__))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield int(server.stdout.readline())
        server.kill()


def responses(count: int) -> list[Response]:
    """Responses whose texts, and therefore scores, all differ."""
    prompts = [Prompt(i // 2, (1,), "poems", f"label {i}", f"prompt {i} ") for i in range(count)]
    return [Response(prompt, f"answer {i}") for i, prompt in enumerate(prompts)]


def scores_of(port: int, name: str, faults: int, given: list[Response], **kwargs) -> list[float]:
    url = f"http://127.0.0.1:{port}/{name}?faults={faults}"
    reward = RewardConfig(
        name="remote", format=name, url=url, timeout_s=TIMEOUT_S, kwargs={**PATIENT, **kwargs}
    )
    return [found.score for found in read_scores(build_remote_reward(reward)(given), given)]


def faults_of(port: int, name: str) -> dict[str, int]:
    """The faults that were injected, by kind."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/counts", timeout=60) as answer:
        counts = json.load(answer)
    return {key.partition(" ")[2]: n for key, n in counts.items() if key.startswith(f"/{name} ")}


def test_500_faults_lose_or_exchange_no_score(port):
    given = responses(960)
    scores = scores_of(port, "mppo", 500, given, batch_size=4)
    assert scores == [true_score(each.text) for each in given]
    faults = faults_of(port, "mppo")
    assert sum(faults.values()) == 500
    assert faults.keys() == set(faulty_reward_server.KINDS)


def test_openrlhf_sends_one_response_per_request(port):
    given = responses(40)
    assert scores_of(port, "openrlhf", 60, given) == [true_score(each.text) for each in given]
    assert sum(faults_of(port, "openrlhf").values()) == 60


def test_sglangs_answers_are_matched_by_the_ids_of_its_requests(port):
    given = responses(120)
    folder = resolve_model("builtin:tiny-reward")
    options = {"tokenizer_path": str(folder), "apply_chat_template": False, "batch_size": 4}
    tokenizer = load_tokenizer(folder)
    texts = [each.prompt.text + each.text for each in given]
    ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    expected = [true_score(",".join(map(str, each))) for each in ids]
    assert scores_of(port, "sglang", 60, given, **options) == expected
    assert sum(faults_of(port, "sglang").values()) == 60


def test_a_sandbox_that_fails_changes_no_verdict(port):
    """Half of the expected outputs are right; every program has two tests."""
    given = []
    for index in range(30):
        program = f"program {index}"
        right = [str(true_score(f"{program}|{stdin}")) for stdin in "ab"]
        tests = {"inputs": ["a", "b"], "outputs": [right[0], right[1] if index % 2 else "0"]}
        prompt = Prompt(index, (1,), "code", json.dumps(tests), "p")
        given.append(Response(prompt, f"```python\n{program}```"))
    limits = {"compile_timeout_s": 0.4, "run_timeout_s": 0.4}
    found = scores_of(port, "sandbox_fusion", 60, given, partial_credit=True, **limits)
    assert found == [1.0 if index % 2 else 0.5 for index in range(30)]
    assert sum(faults_of(port, "sandbox_fusion").values()) == 60


def test_a_judge_that_fails_is_asked_again(port):
    given = responses(40)
    options = {"model": "m", "template": "{prompt}{response}", "pattern": r"Score: (\S+)"}
    expected = [true_score(each.prompt.text + each.text) for each in given]
    assert scores_of(port, "judge", 60, given, **options) == expected
    assert sum(faults_of(port, "judge").values()) == 60
