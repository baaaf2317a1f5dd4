"""``mppo-serve-reward``: a model, a function and a sandbox, asked by the clients of the run."""

from __future__ import annotations

import http.client
import json
import queue
import socket
import threading
from contextlib import contextmanager

import pytest
import torch
from mppo_reward_server.__main__ import main
from mppo_reward_server.json_server import JsonServer
from mppo_reward_server.routes import function_routes, model_routes
from mppo_reward_server.sequence_classifier import load_sequence_classifier
from transformers import AutoModelForSequenceClassification

from mppo.batch.prompt import Prompt
from mppo.hub.builtin import load_tokenizer, resolve_model
from mppo.recipe import extras
from mppo.recipe.extras import PROGRAM_ROUTES
from mppo.recipe.sections.reward import RewardConfig
from mppo.rewards.remote.remote_reward import build_remote_reward
from mppo.rewards.response import Response
from mppo.rewards.scorer import build_reward_function
from mppo.rewards.scores import FailedScore, read_scores

GO_ON = 0.0
MODEL = "builtin:tiny-reward"
FUNCTION = """
def score(data_source, solution_str, ground_truth, extra_info, bonus):
    if solution_str == "fail":
        raise RuntimeError("cannot read it")
    found = float(solution_str == ground_truth) + bonus
    return {"score": found, "length": len(solution_str), "pred": solution_str.upper()}
"""


@contextmanager
def served(routes, key=""):
    """The address of a server with these routes."""
    with JsonServer("127.0.0.1", 0, routes, key) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def ask(url, wire, responses, **kwargs):
    section = RewardConfig(
        name="remote", url=url, format=wire, kwargs={"retries": 0, "batch_size": 2, **kwargs}
    )
    found = build_remote_reward(section)(responses)
    return found, [each.score for each in read_scores(found, responses, GO_ON)]


def responses(*texts):
    """Responses to a question in a chat."""
    tokenizer = load_tokenizer(resolve_model(MODEL))
    messages = ({"role": "user", "content": "Say it."},)
    shown = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, tokenize=False
    )
    prompts = [Prompt(i, (1,), "poems", "yes", shown, messages=messages) for i in range(len(texts))]
    return [Response(prompt, text) for prompt, text in zip(prompts, texts)]


@torch.no_grad()
def reference(texts):
    """The scores of texts by transformers, one at a time."""
    folder = resolve_model(MODEL)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(folder)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return [model(torch.tensor([each])).logits.item() for each in ids]


def test_a_models_scores_are_those_of_transformers_in_every_format():
    given = responses("aeiou!", "x" * 30, "hello")
    tokenizer = load_tokenizer(resolve_model(MODEL))
    templated = [
        tokenizer.apply_chat_template(
            [*each.prompt.messages, {"role": "assistant", "content": each.text}], tokenize=False
        )
        for each in given
    ]
    plain = [each.prompt.text + each.text + tokenizer.eos_token for each in given]
    model = load_sequence_classifier(MODEL, "float32", 2, None, False)
    tokenizer_path = str(resolve_model(MODEL))
    with served(model_routes(model)) as url:
        _, own = ask(f"{url}/score", "mppo", given)
        _, theirs = ask(f"{url}/get_reward", "openrlhf", given)
        _, tokens = ask(f"{url}/classify", "sglang", given, tokenizer_path=tokenizer_path)
    expected = pytest.approx(reference(templated), abs=1e-5)
    assert own == expected
    assert tokens == expected
    assert theirs == pytest.approx(reference(plain), abs=1e-5)
    assert len({round(score, 3) for score in own}) == 3


def test_a_functions_scores_and_further_numbers_arrive(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTION)
    section = RewardConfig(
        name="function", function=f"{tmp_path}/mine.py:score", kwargs={"bonus": 0.5}
    )
    given = responses("yes", "fail", "no")
    with served(function_routes(build_reward_function(section))) as url:
        found, own = ask(f"{url}/score", "mppo", given)
        assert found[0] == {"score": 1.5, "length": 3, "pred": "YES"}
        assert isinstance(found[1], FailedScore)
        assert "RuntimeError: " in found[1].message  # long paths cut the end off
        assert own == [1.5, 0.0, 0.5]
        found, theirs = ask(f"{url}/get_reward", "openrlhf", given)
        assert found[2] == {"score": 0.5, "length": 2}
        assert theirs == own


def test_programs_run_in_the_sandbox():
    tests = json.dumps({"inputs": ["2\n", "5\n"], "outputs": ["4", "25\n"]})
    statements = json.dumps(["assert square(3) == 9", "assert square(2) == 4"])
    square = "```python\nprint(int(input()) ** 2)\n```"
    double = "```python\nprint(int(input()) * 2)\n```"
    function = "```python\ndef square(x):\n    return x * x\n```"
    cases = [
        (square, tests, 1.0), (double, tests, 0.5), ("```python\n1 / 0\n```", tests, 0.0),
        (function, statements, 1.0), ("```python\nwhile True: 1 ** 1\n```", tests, 0.0),
    ]  # fmt: skip
    given = [Response(Prompt(0, (1,), "code", truth, "p"), text) for text, truth, _ in cases]
    options = {"batch_size": 1, "partial_credit": True}
    found, scores = [], []
    with served(PROGRAM_ROUTES.load("--sandbox", True)()) as url:
        for part, seconds in ((given[:-1], 40.0), (given[-1:], 1.0)):  # the last one never ends
            asked = ask(f"{url}/run_code", "sandbox_fusion", part, run_timeout_s=seconds, **options)
            found += asked[0]
            scores += asked[1]
    assert not any(isinstance(each, FailedScore) for each in found)
    assert scores == [score for *_, score in cases]


def test_rules_score_the_rest_while_programs_run_elsewhere():
    prompts = [
        Prompt(0, (1,), "openai/gsm8k", "7", "p"),
        Prompt(1, (1,), "taco", json.dumps({"inputs": ["1", "2"], "outputs": ["1", "3"]}), "p"),
        Prompt(2, (1,), "exact_one", "a", "p", verifier="exact"),
    ]
    texts = ["so #### 7", "```python\nprint(input())\n```", "a"]
    given = list(map(Response, prompts, texts))
    with served(PROGRAM_ROUTES.load("--sandbox", True)()) as url:
        section = RewardConfig(url=f"{url}/run_code", kwargs={"partial_credit": True})
        reward = build_reward_function(section)
        reward.check(prompts)
        assert reward(given) == [1.0, 0.5, 1.0]
    with pytest.raises(ValueError, match=r"prompt 1 .*cannot be verified"):
        reward.check([Prompt(1, (1,), "taco", "not tests", "p")])


@pytest.fixture(scope="module")
def echo():
    """The port of a server that wants a key."""
    with served({"/echo": lambda content: content, "/fail": lambda _: 1 / 0}, "sesame-open") as url:
        yield int(url.rpartition(":")[2])


def posted(port, path, body, length=None, key="sesame-open"):
    """Status and content of the answer to a request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Content-Length": str(len(body)) if length is None else length}
    connection.request("POST", path, body, headers | {"Authorization": f"Bearer {key}"})
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


@pytest.mark.parametrize(
    ("request_", "status", "message"),
    [
        (("/echo", b"{}", None, "other"), 401, "the key is missing or wrong"),
        (("/echo", b"{}", None, "\xe9"), 401, "the key is missing or wrong"),
        (("/elsewhere", b"{}"), 404, "the paths are /echo, /fail"),
        (("/echo", b"{"), 400, "not JSON"),
        (("/echo", b"[" * 100_000), 400, "not JSON"),
        (("/echo", b"[]"), 400, "not a JSON object"),
        (("/echo", b"", "-1"), 411, "no Content-Length"),
        (("/echo", b"", "9" * 11), 413, "larger than 64 MiB"),
        (("/fail", b"{}"), 500, "internal error: ZeroDivisionError"),
    ],
)
def test_bad_requests_are_refused_and_the_server_goes_on(echo, request_, status, message):
    code, content = posted(echo, *request_)
    assert (code, message in content["error"]) == (status, True), content
    assert posted(echo, "/echo", b'{"a": 1}') == (200, {"a": 1})


def test_answers_wait_for_no_acknowledgement(monkeypatch):
    options = queue.Queue()

    def closed(server, connection):
        options.put(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        connection.close()

    monkeypatch.setattr(JsonServer, "shutdown_request", closed)
    with served({"/echo": lambda content: content}, "sesame-open") as url:
        assert posted(int(url.rpartition(":")[2]), "/echo", b"{}") == (200, {})
        assert options.get(timeout=60) == 1


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/score", {}), ("/score", {"items": [1]}), ("/score", {"items": [{"response": 1}]}),
        ("/score", {"items": [{"messages": [1]}]}), ("/score", {"items": [{"extra": []}]}),
        ("/get_reward", {}), ("/get_reward", {"query": [1]}), ("/get_reward", {"query": [""]}),
        ("/classify", {"input_ids": [[1], ["a"]]}), ("/classify", {"input_ids": [[]]}),
        ("/classify", {"input_ids": [[10**9]]}), ("/classify", {"input_ids": [[1]], "rid": []}),
        ("/classify", {"input_ids": [[1], [2]], "rid": ["a"]}), ("/classify", {"input_ids": 5}),
    ],
)  # fmt: skip
def test_requests_that_a_model_cannot_score_are_bad_requests(model_port, path, content):
    status, answer = posted(model_port, path, json.dumps(content).encode())
    expected = 200 if content == {"input_ids": [[1]], "rid": []} else 400
    assert status == expected, answer


@pytest.fixture(scope="module")
def model_port():
    """The port of a server with the tiny reward model."""
    model = load_sequence_classifier(MODEL, "float32", 2, 64, False)
    with served(model_routes(model), "sesame-open") as url:
        yield int(url.rpartition(":")[2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere"], "--model = 'nowhere' why: no such folder"),
        (["--model", "builtin:tiny"], "--model = 'builtin:tiny' why: config.json describes a"),
        (["--function", "nowhere:score"], "reward.function = 'nowhere:score'"),
        (["--function", "json:loads", "--kwargs", "{"], "--kwargs = '{' why: is not JSON"),
        (["--function", "json:loads", "--kwargs", "[]"], "--kwargs = '[]' why: is not an object"),
        (["--function", "json:loads", "--timeout-s", "0"], "--timeout-s = 0.0 why: is not"),
        (["--sandbox", "--host", "0.0.0.0"], "MPPO_REWARD_API_KEY = '***' why: is not set, and"),
        (["--sandbox", "--host", "192.0.2.1"], "MPPO_REWARD_API_KEY = '***' why: is not set, and"),
        (["--sandbox", "--port", "-1"], "--port = '127.0.0.1:-1' why: cannot listen there"),
    ],
)  # fmt: skip
def test_bad_options_are_refused(arguments, message, capsys, monkeypatch):
    monkeypatch.delenv("MPPO_REWARD_API_KEY", raising=False)
    assert main(arguments) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert message in shown
    assert "Traceback" not in shown
    assert "fix:" in shown


def test_without_the_sandboxs_package_the_command_that_installs_it_is_told(capsys, monkeypatch):
    monkeypatch.setattr(extras, "entry_points", lambda **_: ())
    assert main(["--sandbox", "--port", "0"]) == 2
    shown = capsys.readouterr().err
    assert "--sandbox = True" in shown
    assert "fix: pip install ./extras/sandbox\n" in shown
