"""Conversations of the local engine with agents, and what agents may return."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from datetime import date

import pytest
import torch
import transformers
from agent_case import MODEL, SAMPLING, answered, local_engine

from mppo.agents.agent_check import check_agent, imported_waits
from mppo.agents.conversation import Conversation, Reply, read_reply
from mppo.agents.endpoint.prompts import TurnText
from mppo.agents.hermes import HermesAgent
from mppo.agents.number_hints import hint
from mppo.agents.tools import calc_gsm8k_reward, calculate
from mppo.agents.turn_answers import GivenAnswers, HostedAnswers
from mppo.batch.episode import NO_WEIGHTS, EpisodeResult
from mppo.batch.prompt import Prompt
from mppo.data.chat_template import ChatRenderer
from mppo.hub.builtin import byte_tokenizer
from mppo.recipe.errors import ConfigError
from mppo.recipe.load import load_recipe
from mppo.recipe.sections.agent import AgentConfig, ToolConfig
from mppo.recipe.sections.reward import RewardConfig
from mppo.recipe.sections.rollout import SamplingConfig
from mppo.rewards.result import NoScore
from mppo.rewards.scorer import Scorer
from mppo.rollout.engine import GenerationRequest
from mppo.rollout.turns import TurnRequest

PROMPTS = [Prompt(7 * i, tuple(range(3, 4 + i * 3 % 7)), "t", "5", f"q{i}") for i in range(6)]


def talk(agent, limit=24, max_turns=4, batch_size=256, on_response=None, tokenizer=None):
    engine = local_engine(batch_size)
    episodes = answered(engine, agent, max_turns, limit, tokenizer=tokenizer or byte_tokenizer())
    request = GenerationRequest(PROMPTS, SAMPLING, limit, 11, on_response)
    try:
        return engine, episodes.generate(request)
    finally:
        episodes.stop()


def keep_talking(one):
    """Two words after every second turn, and one after others, until it may not go on."""
    return Reply("go on" if one.turn % 2 else [{"role": "user", "content": "more"}], state=one.turn)


def test_a_turn_continues_from_the_sampled_tokens_and_those_of_the_environment():
    engine, episodes = talk(keep_talking)
    complete = engine.logprobs([[*each.prompt.token_ids, *each.here.ids] for each in episodes])
    turns = set()
    for each, logprobs in zip(episodes, complete, strict=True):
        assert each.length == len(each.here.ids) == len(each.here.logprobs) <= 24
        start, ids = 0, each.here.ids.tolist()
        behind = logprobs[len(each.prompt.token_ids) - 1 :]
        for number, (version, count) in enumerate(each.parts):
            part = slice(start, start + count)
            if version == NO_WEIGHTS:
                # a turn that another stop token ended gets the template's own end, too
                said = "go on" if number % 4 == 1 else "<eos>" * (ids[start - 1] != 2) + "more\n"
                assert ids[part] == byte_tokenizer()(said, add_special_tokens=False)["input_ids"]
                assert not each.here.logprobs[part].any()
                assert ids[start - 1] in SAMPLING.stop_token_ids or ids[start - 1] == 2
            else:
                assert version == 3
                expected = pytest.approx(behind[part], abs=2e-5)
                assert each.here.logprobs[part].tolist() == expected
            start += count
        assert each.parts[-1][0] == 3  # the last token is the policy's
        assert each.turns == 1 + sum(version == NO_WEIGHTS for version, _ in each.parts)
        turns.add((each.turns, each.finish_reason))
    assert {(4, "stop"), (2, "length")} < turns


def test_conversations_do_not_depend_on_the_rows_generated_together():
    _, one = talk(keep_talking)
    _, other = talk(keep_talking, batch_size=5)
    assert [each.here.ids.tolist() for each in one] == [each.here.ids.tolist() for each in other]


def test_no_turn_leaves_the_models_table_of_positions():
    sizes = {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 27}
    engine = local_engine(config=transformers.OPTConfig(**MODEL, **sizes))
    # a conversation with little left, beside a new response that has everything left
    texts = [torch.tensor([5, 6, 7, *[9] * 20]), torch.tensor([5, 6, 7])]
    asked = [TurnRequest(ids, 27 - len(ids), (0, i), "") for i, ids in enumerate(texts)]
    found = engine.turns().generate(asked, SamplingConfig(), 11)
    assert [len(each.ids) for each in found] == [4, 24]


def test_a_failure_of_mppo_is_raised_on_all_ranks():
    def agent(one):
        raise KeyError("no reply")

    with pytest.raises(RuntimeError, match="the agent's episodes: KeyError: 'no reply'"):
        talk(agent)


def test_messages_that_cannot_be_rendered_are_a_failure_of_the_agent_in_that_conversation():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ m.must.have }}{% endfor %}"

    def agent(one):
        texts = ("more", [{"role": "user", "content": "more"}])
        return Reply(texts[one.messages[0]["content"] == "q1"])

    _, found = talk(agent, max_turns=2, tokenizer=tokenizer)
    failed = [each for each in found if each.result and each.result.error]
    assert {each.prompt.text for each in failed} == {"q1"}
    assert all("turn 1" in each.result.error for each in failed)
    assert all("cannot be rendered" in each.result.error for each in failed)


def test_one_turn_is_what_the_engine_alone_generates():
    engine, episodes = talk(lambda one: Reply())
    alone = engine.generate(GenerationRequest(PROMPTS, SAMPLING, 24, 11))
    for own, other in zip(episodes, alone, strict=True):
        assert own.here.ids.tolist() == other.here.ids.tolist()
        assert own.finish_reason == other.finish_reason
        assert own.result == EpisodeResult(messages=own.result.messages)
        assert own.result.use is not None
        assert [each["role"] for each in own.result.messages] == ["user", "assistant"]


def test_the_agent_sees_the_turns_its_state_and_whether_it_is_asked_for_the_last_time():
    seen: dict[str, list[Conversation]] = {}

    def agent(one):
        seen.setdefault(one.messages[0]["content"], []).append(one)
        return keep_talking(one)

    early: list[int] = []
    _, episodes = talk(agent, on_response=lambda keys, _: early.extend(keys))
    assert sorted(early) == list(range(12))
    assert set(seen) == {f"q{i}" for i in range(6)}
    tokenizer = byte_tokenizer()
    for prompt in PROMPTS:
        for one in seen[prompt.text]:
            assert one.turn == len([m for m in one.messages if m["role"] == "assistant"])
            assert one.state == (one.turn - 1 or None)
            assert one.messages[-1] == {"role": "assistant", "content": one.text}
            assert one.ground_truth == "5"
            assert one.is_last == (one.is_cut or one.turn == 4)
        texts = {c.text for c in seen[prompt.text]}
        for each in episodes:
            if each.prompt.uid == prompt.uid:
                last = each.here.ids[each.length - each.parts[-1][1] :]
                assert tokenizer.decode(last, skip_special_tokens=True) in texts


def test_a_reward_or_a_failure_of_the_agent_is_the_score():
    def agent(one):
        return "it is broken" if one.messages[0]["content"] == "q1" else paid(one)

    def paid(one):
        reward = {"q2": 2.5, "q3": 0.25}.get(one.messages[0]["content"])
        return Reply("on" if one.turn == 1 else None, reward if one.turn == 1 else None, {"x": 4})

    _, episodes = talk(agent)

    def judge(some):
        assert all(each.prompt.text not in ("q1", "q2", "q3") for each in some)
        return [7.0 for _ in some]

    def score(on_error):
        scorer = Scorer(judge, byte_tokenizer(), RewardConfig(on_error=on_error))
        return scorer.raw_scores(episodes)

    scores = {}
    for each, episode in zip(score(-1.0), episodes, strict=True):
        scores.setdefault(episode.prompt.text, []).append(each)
    assert [each.score for each in scores["q2"] + scores["q3"] + scores["q0"]] == [
        *[2.5] * 2, *[0.25] * 2, *[7.0] * 2,
    ]  # fmt: skip
    assert scores["q0"][0].numbers == {"x": 4}
    assert [each.score for each in scores["q1"]] == [-1.0] * 2
    assert "the agent of prompt 7 (t: 'q1'): turn 1, " in scores["q1"][0].error
    with pytest.raises(ValueError, match="it is broken"):
        score("stop")


AGENTS = """
import asyncio, os, time

def agent(conversation, word="w"):
    what = conversation.text
    if what == "raises":
        raise KeyError("no such thing")
    if what == "hangs":
        time.sleep(3600)
    if what == "exits":
        os._exit(3)
    return {
        "none": None,
        "garbage": 5,
        "unknown": {"txt": "a"},
        "both": {"done": True, "text": "a"},
        "nothing": "",
        "role": [{"role": "assistant", "content": "x"}],
        "nan": {"done": True, "reward": float("nan")},
        "state": {"text": word, "state": {1}},
        "long": word * 1000000,
        "text": word + what,
        "reward": {"text": word, "reward": 1, "state": [2]},
    }[what]

class Counter:
    def __init__(self, word):
        self.word = word
    async def __call__(self, conversation):
        if conversation.text == "exits":
            await asyncio.sleep(0.2)
            os._exit(4)
        await asyncio.sleep({"hangs": 3600, "waits": 1}.get(conversation.text, 0.01))
        return self.word

class Large:
    def __call__(self, conversation):
        return "w" * (4 << 30)
"""


def conversation(text: str, turn: int = 1, is_last: bool = False, truth: str = "5"):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
    return Conversation(text, messages, turn, is_last, False, "t", truth)


class PatientAnswers(HostedAnswers):
    """Calls that hang have half a second, and all others as long as a machine needs."""

    async def _answer(self, conversation: Conversation) -> Reply | str:
        limit_s = 0.5 if conversation.text == "hangs" else 600.0
        self._config = self._config.model_copy(update={"timeout_s": limit_s})
        return await super()._answer(conversation)


async def replies(config: AgentConfig, texts: list[str]) -> list[Reply | str]:
    """What an agent in processes of its own answers to some turns at the same time."""
    answers = PatientAnswers(config, waits=imported_waits(config))
    try:
        return await asyncio.gather(*[answers.answer(conversation(text)) for text in texts])
    finally:
        await answers.stop()


def test_an_agent_runs_in_a_process_and_its_faults_are_words(tmp_path):
    (tmp_path / "own.py").write_text(AGENTS)
    path = f"{tmp_path}/own.py:agent"
    config = AgentConfig(path=path, arguments={"word": "hm "})
    expected = {
        "none": Reply(),
        "text": Reply("hm text"),
        "reward": Reply("hm ", 1.0, {}, [2]),
        "raises": "KeyError: 'no such thing' (own.py, line 7)",
        "garbage": "its reply is 5, neither None nor a text",
        "unknown": "its reply holds txt; its keys are done, text",
        "both": "its reply is unclear: give either done",
        "nothing": "its reply is '', which is neither",
        "role": "its reply is [{'role': 'assistant'",
        "nan": "its reply has the reward nan, not a finite number",
        "long": "its reply has more than 1048576 characters",
        "state": "its reply holds a state or a message that is not JSON",
        "exits": "its process ended with exit code 3",
        "hangs": "it took longer than rollout.agent.timeout_s, 0.5 s",
    }
    found = asyncio.run(replies(config, [*expected, "none"]))
    assert found.pop() == Reply(), "after a process that was ended comes another"
    for reply, (text, wanted) in zip(found, expected.items(), strict=True):
        if isinstance(wanted, str):
            assert isinstance(reply, str), text
            assert reply.startswith(wanted), text
        else:
            assert reply == wanted


def test_an_agent_gets_values_of_a_row_that_json_does_not_have_as_text(tmp_path):
    (tmp_path / "own.py").write_text("def agent(it): return str(it.extra_info)")

    async def answer() -> Reply | str:
        answers = HostedAnswers(AgentConfig(path=f"{tmp_path}/own.py:agent"), waits=False)
        row = {"day": date(2026, 11, 28), "n": 1}
        try:
            return await answers.answer(replace(conversation("a"), extra_info=row))
        finally:
            await answers.stop()

    assert asyncio.run(answer()) == Reply("{'day': '2026-11-28', 'n': 1}")


def test_calls_of_a_coroutine_function_share_a_process_and_only_one_is_at_fault(tmp_path):
    (tmp_path / "own.py").write_text(AGENTS)
    path = f"{tmp_path}/own.py:Counter"
    config = AgentConfig(path=path, arguments={"word": "w"})
    texts = ["hangs", "exits", "waits", "a"]
    late, ended, *fine = asyncio.run(replies(config, texts))
    assert late.startswith("it took longer than rollout.agent.timeout_s, 0.5 s")
    assert ended == "its process ended with exit code 4"
    assert fine == [Reply("w")] * 2


def test_an_agent_has_a_limit_of_memory_and_says_why_it_does_not_start(tmp_path, capfd):
    (tmp_path / "own.py").write_text(AGENTS)
    path = f"{tmp_path}/own.py:Large"
    (found,) = asyncio.run(replies(AgentConfig(path=path, memory_mb=2048), ["a"]))
    assert found == "it needs more than rollout.agent.memory_mb"
    (tmp_path / "own.py").write_text("raise SystemExit(5)")
    answers = HostedAnswers(AgentConfig(path=path), waits=False)
    with pytest.raises(RuntimeError, match=r"rollout\.agent could not start: exit code 5"):
        asyncio.run(answers.answer(conversation("a")))


def test_an_agent_of_the_program_that_started_the_run():
    def agent(one):
        return {"none": None, "number": 5, "raises": one}.get(one.text) or one.nothing

    async def waits(one):
        await asyncio.sleep(3600 if one.text == "hangs" else 0)
        return one.text

    async def answers() -> list[Reply | str]:
        given, slow = GivenAnswers(agent, 5.0), GivenAnswers(waits, 0.2)
        found = [await given.answer(conversation(text)) for text in ("number", "none")]
        return found + [await slow.answer(conversation(text)) for text in ("hangs", "a")]

    number, raises, late, fine = asyncio.run(answers())
    assert number == "its reply is 5, neither None nor a text, a list of messages or a dict"
    assert raises.startswith("AttributeError: 'Conversation' object has no attribute 'nothing'")
    assert late == "it took longer than rollout.agent.timeout_s, 0.2 s"
    assert fine == Reply("a")


@pytest.mark.parametrize(
    ("path", "arguments", "why"),
    [
        ("own.py", {}, "no module and agent"),
        ("own.py:absent", {}, "has no agent 'absent'"),
        ("other.py:agent", {}, "no such file"),
        ("own.py:agent", {"wrod": 1}, "unexpected keyword argument 'wrod'"),
        ("own.py:Counter", {}, "missing 1 required positional argument: 'word'"),
    ],
)
def test_an_agent_that_cannot_be_called_is_refused_before_a_run(tmp_path, path, arguments, why):
    (tmp_path / "own.py").write_text(AGENTS)
    with pytest.raises(ConfigError, match=r"rollout\.agent\.path") as error:
        check_agent(AgentConfig(path=f"{tmp_path}/{path}", arguments=arguments))
    assert why in str(error.value)


HERMES = "mppo.agents.hermes:HermesAgent"
CALCULATE = "mppo.agents.tools:calculate"
EXPRESSION = {"expression": {"type": "string"}}


@pytest.mark.parametrize(
    ("path", "properties", "required", "key", "why"),
    [
        (CALCULATE, EXPRESSION, ["expression"], "", ""),
        ("mppo.agents.tools:calc_gsm8k_reward", {"answer": {"type": "string"}}, [], "", ""),
        ("builtins:print", {"anything": {}}, [], "properties", "print has no such parameter"),
        (
            CALCULATE,
            {"expr": {"type": "string"}},
            [],
            "properties",
            "its parameters are expression",
        ),
        (CALCULATE, {}, [], "properties", "needs expression, which the schema does not have"),
        (CALCULATE, EXPRESSION, ["expr"], "required", "parameters.properties has no 'expr'"),
        (CALCULATE, {"expression": {"type": "strng"}}, [], "expression.type", "mean 'string'?"),
        ("mppo.agents.tools:calculat", EXPRESSION, [], "path", "has no tool 'calculat'"),
    ],
)
def test_a_tools_schema_is_compared_with_its_function_before_a_run(
    path, properties, required, key, why
):
    schema = {"type": "object", "properties": properties, "required": required}
    tool = {"path": path, "name": "tool", "parameters": schema}
    config = AgentConfig.model_validate({"path": HERMES, "tools": [tool]})
    if not why:
        check_agent(config)
        return
    with pytest.raises(ConfigError) as error:
        check_agent(config)
    assert why in str(error.value)
    assert any(
        issue.key.startswith("rollout.agent.tools.0") and issue.key.endswith(key)
        for issue in error.value.issues
    )


def test_openais_form_of_a_tool_is_read():
    function = {"name": "calculate", "description": "", "parameters": {}, "strict": True}
    given = {"type": "function", "path": CALCULATE, "function": function}
    tool = ToolConfig.model_validate(given)
    assert (tool.path, tool.name) == (CALCULATE, "calculate")
    assert tool.openai_schema == {
        "type": "function",
        "function": {"name": "calculate", "description": "", "parameters": {}},
    }
    del given["path"]
    with pytest.raises(ConfigError, match="it has no default: give it") as error:
        load_recipe({"rollout": {"agent": {"path": HERMES, "tools": [given]}}})
    assert "rollout.agent.tools.0.path" in str(error.value)


def test_a_reply_may_have_an_end_with_or_without_a_reward():
    assert read_reply({"done": True, "reward": 2}) == Reply(None, 2.0)
    assert read_reply({"reward": 2}) == Reply(None, 2.0)
    assert read_reply({"messages": [{"role": "tool", "content": "a"}]}).environment
    assert read_reply({"text": "a", "numbers": {"n": 1, "m": "x"}}).numbers == {"n": 1.0}
    with pytest.raises(NoScore, match="the reward inf"):
        read_reply({"reward": math.inf})


def test_messages_become_what_the_template_writes_between_two_turns():
    tokenizer = byte_tokenizer()
    text = TurnText(tokenizer, ChatRenderer(tokenizer, "rollout.agent"))
    eos = tokenizer.eos_token_id
    chat = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "3"}]
    more = [{"role": "user", "content": "no"}]
    before = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    complete = tokenizer.apply_chat_template([*chat, *more], tokenize=False)
    ids = tokenizer(before, add_special_tokens=False)["input_ids"] + [*tokenizer("3")["input_ids"]]
    added = text.token_ids(more, eos)
    assert [*ids, eos, *added] == tokenizer(complete, add_special_tokens=False)["input_ids"]
    # a turn that another token ended keeps the template's own end
    assert text.token_ids(more, 9) == [eos, *added]
    assert text.token_ids("raw", 9) == tokenizer("raw", add_special_tokens=False)["input_ids"]
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template; return a text"):
        text.token_ids(more, eos)


TOOLS = [
    {
        "path": "mppo.agents.tools:calculate",
        "name": "calculator",
        "parameters": {
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
    {
        "path": "mppo.agents.tools:calc_gsm8k_reward",
        "name": "check",
        "parameters": {"properties": {"answer": {"type": "string"}}, "required": ["answer"]},
    },
]


@pytest.mark.parametrize(
    ("call", "result"),
    [
        ('{"name": "calculator", "arguments": {"expression": "2*(3+4)/4"}}', "3.5"),
        ('{"name": "check", "arguments": {"answer": "5"}}',
         "Current parsed answer='5' reward=1.0"),
        ('{"name": "calculator", "arguments": {}}', "error: ValueError: calculator needs the"),
        ('{"name": "calculator", "arguments": {"expression": "1", "ground_truth": "5"}}',
         "error: ValueError: calculator has no argument ground_truth"),
        ('{"name": "shell", "arguments": {}}', "error: ValueError: no tool 'shell'; the tools are"),
        ('{"name": "calculator", "arguments": {"expression": "__import__(\'os\')"}}',
         "error: ValueError: __import__('os') is not arithmetic"),
        ('{"name": "calculator", "arguments": {"expression": "1/0"}}', "error: ZeroDivisionError"),
        ("[1]", "error: ValueError: write {"),
        ("{", "error: JSONDecodeError"),
    ],
)  # fmt: skip
def test_tools_are_called_in_the_hermes_format(call, result):
    agent = HermesAgent(TOOLS, max_calls=2)
    text = f"Let me see. <tool_call>\n{call}\n</tool_call>"
    (message,) = agent(conversation(text))
    assert message["role"] == "tool"
    assert message["content"].startswith(result)
    assert len(agent(conversation(text * 3))) == 2
    assert agent(conversation("It is 4.")) is None
    assert agent(conversation(text, is_last=True)) is None


def test_tool_calls_are_found_in_one_pass_over_a_turn():
    agent = HermesAgent(TOOLS)
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>'
    assert agent(conversation("<tool_call>" * 200_000)) is None
    answers = agent(conversation(f"</tool_call>{call} and {call}<tool_call>"))
    assert [each["content"] for each in answers] == ["2", "2"]
    (answer,) = agent(conversation('<tool_call>{"name": ["a"]}</tool_call>'))
    assert answer["content"].startswith("error: ValueError: no tool ['a']")


def test_small_tools_and_hints():
    assert calculate(" -2 + 7 % 4 ") == "1"
    assert calc_gsm8k_reward("#### 6", "5").endswith("reward=0.0")
    assert hint(conversation("I say 5"))["reward"] == 1
    assert hint(conversation("I say 5", turn=3))["reward"] == 0.25
    assert hint(conversation("4"))["messages"][0]["content"] == "higher"
    assert hint(conversation("12"))["messages"][0]["content"] == "lower"
    assert hint(conversation("?"))["messages"][0]["content"] == "write a number"
