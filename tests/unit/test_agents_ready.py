"""Agents with packages of others: tools of MCP servers, games of Gymnasium, environments of
verifiers, and unmodified agents of smolagents and LangGraph."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import pytest
from open_endpoint import assert_exact, open_endpoint
from policy_generator import DictatedGenerator

from mppo.agents.build_agent import build_agent
from mppo.agents.episode_program import read_episode_result
from mppo.batch.prompt import Prompt
from mppo.data.verifiers_environment import environment_rows
from mppo.parallel.addresses import free_port
from mppo.recipe.load import load_recipe
from mppo.rewards.workers.user_function import import_function
from mppo.trainer.start.user_code import input_issues

AGENTS = Path(__file__).parents[2] / "recipes" / "agents"
TASK = {
    "prompt": "2+3?",
    "messages": [{"role": "user", "content": "2+3?"}],
    "data_source": "sums",
    "ground_truth": "5",
    "extra_info": {},
}
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    "{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SERVER = """
    import sys
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("sums")

    @server.tool(name=sys.argv[1])
    def add(a: int, b: int) -> str:
        "Add two numbers."
        return str(a + b)

    if len(sys.argv) > 2:
        server.run("streamable-http", port=int(sys.argv[2]))
    else:
        server.run()
"""


def call(name: str, arguments: str) -> str:
    """A call of a tool as the policy writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


async def played(name: str, texts: list[str], **arguments):
    """The result of an episode in which the policy says some texts, and all that it saw."""
    generator = DictatedGenerator(texts=list(texts))
    generator.tokenizer.chat_template = TEMPLATE
    run = import_function(f"{AGENTS / name}:run")
    async with open_endpoint(generator) as running:
        session = running.sessions.open(TASK["messages"])
        result = read_episode_result(await run(running.client(session), TASK, **arguments))
        record = await running.sessions.close(session.id)
    assert_exact(record.leaves, generator.sampled)
    return result, record


@pytest.fixture
def servers(tmp_path):
    """An MCP server by standard input and output, and one by HTTP."""
    pytest.importorskip("mcp")
    path, port = tmp_path / "server.py", free_port()
    path.write_text(textwrap.dedent(SERVER))
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, str(path), "add_far", str(port)], env={**os.environ, **environment}
    )
    while process.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            break
        time.sleep(0.1)
    near = {"command": sys.executable, "args": [str(path), "add"], "env": environment}
    yield [near, {"url": f"http://127.0.0.1:{port}/mcp"}]
    process.kill()
    process.wait()


def test_tools_of_mcp_servers(servers):
    texts = [
        call("add", '{"a": 2, "b": 3}'),
        call("add_far", '{"a": 20, "b": 30}') + call("add", '{"a": "x"}'),
        "5",
        "never asked for",
    ]
    result, record = asyncio.run(played("mcp_tools.py", texts, servers=servers))
    assert result.reward is None, "reward.* scores the last answer"
    assert result.numbers == {"tool_calls": 3, "failed_tool_calls": 1}
    answers = [each["content"] for each in record.messages if each["role"] == "tool"]
    assert answers[:2] == ["5", "50"]
    assert "a" in answers[2]
    assert record.turns == 3
    assert record.messages[-1]["content"] == "5"


GAMES = """
    import gymnasium

    class Guess(gymnasium.Env):
        observation_space = action_space = gymnasium.spaces.Text(100)

        def __init__(self, lives=3):
            self.lives = lives

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.right = options["ground_truth"]
            return f"Guess. You have {self.lives} lives.", {}

        def step(self, action):
            self.lives -= 1
            won = action == self.right
            return ("yes" if won else "no"), float(won), won, not self.lives, {}

    gymnasium.register("Guess-v0", Guess)
"""


def test_a_game_of_gymnasium(tmp_path, monkeypatch):
    pytest.importorskip("gymnasium")
    (tmp_path / "own_games.py").write_text(textwrap.dedent(GAMES))
    monkeypatch.syspath_prepend(tmp_path)
    game = {"environment": "own_games:Guess-v0"}
    result, record = asyncio.run(played("text_game.py", ["4", "5", "6"], **game))
    assert (result.reward, result.numbers) == (1.0, {"steps": 2, "ended": 1})
    assert [each["content"] for each in record.messages] == [
        "2+3?\n\nGuess. You have 3 lives.", "4", "no", "5",
    ]  # fmt: skip
    lost, _ = asyncio.run(played("text_game.py", ["4"], **game, settings={"lives": 1}))
    assert (lost.reward, lost.numbers) == (0.0, {"steps": 1, "ended": 1})


def test_only_the_second_turn_wins_the_recipes_game(monkeypatch):
    gymnasium = pytest.importorskip("gymnasium")
    monkeypatch.syspath_prepend(AGENTS)
    game = gymnasium.make("doors:Doors-v0")
    for first, seed in itertools.product("1234", range(20)):
        won = []
        for door in "1234":
            game.reset(seed=seed)
            letter, *nothing = game.step(first)
            assert nothing[:3] == [0.0, False, False]
            _, reward, ended, *_ = game.step(door)
            assert ended
            assert reward == float("1234"["ABCD".index(letter)] == door)
            won.append(reward)
        assert sum(won) == 1


async def asked_by_smolagents(smolagents, texts: list[str]):
    """What an unmodified agent that writes code finds, and the record of its episode."""
    generator = DictatedGenerator(texts=list(texts))
    generator.tokenizer.chat_template = TEMPLATE
    prompts = {**smolagents.EMPTY_PROMPT_TEMPLATES, "system_prompt": "Write code."}
    async with open_endpoint(generator) as running:
        session = running.sessions.open()
        where = {"api_base": session.base_url, "api_key": session.key}
        agent = smolagents.CodeAgent(
            tools=[], model=smolagents.OpenAIModel("policy", **where), prompt_templates=prompts,
            verbosity_level=0,
        )  # fmt: skip
        found = await asyncio.to_thread(agent.run, "What is 2+3?")
        record = await running.sessions.close(session.id)
    for leaf, sampled in zip(record.leaves, generator.sampled, strict=True):
        assert leaf.context_ids.tolist() == list(sampled.given)
        assert leaf.ids.equal(sampled.turn.ids[: len(leaf.ids)]), "cut at the text that ends it"
    return found, record


def test_an_unmodified_agent_of_smolagents():
    smolagents = pytest.importorskip("smolagents")
    texts = ["<code>\nn = 2 + 3\nprint(n)\n</code>", "<code>\nfinal_answer(n)\n</code>"]
    found, record = asyncio.run(asked_by_smolagents(smolagents, texts))
    assert found == 5
    assert record.turns == 2
    assert len(record.leaves) == 2, "it completes a turn by the tag at which it ended"
    assert "5" in record.messages[-2]["content"]


async def asked_by_langgraph(texts: list[str]):
    """The last message of an unmodified graph with a tool, and the record of its episode."""
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    @tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    generator = DictatedGenerator(texts=list(texts))
    generator.tokenizer.chat_template = TEMPLATE
    async with open_endpoint(generator) as running:
        session = running.sessions.open()
        model = ChatOpenAI(model="policy", base_url=session.base_url, api_key=session.key)
        policy = model.bind_tools([add])

        async def say(state: MessagesState):
            return {"messages": [await policy.ainvoke(state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node("policy", say)
        graph.add_node("tools", ToolNode([add]))
        graph.add_edge(START, "policy")
        graph.add_conditional_edges("policy", tools_condition)
        graph.add_edge("tools", "policy")
        found = await graph.compile().ainvoke({"messages": [("user", "2+3?")]})
        record = await running.sessions.close(session.id)
    assert_exact(record.leaves, generator.sampled)
    return found["messages"][-1].content, record


def test_an_unmodified_graph_of_langgraph():
    pytest.importorskip("langgraph")
    pytest.importorskip("langchain_openai")
    texts = [call("add", '{"a": 2, "b": 3}'), "It is 5."]
    found, record = asyncio.run(asked_by_langgraph(texts))
    assert found == "It is 5."
    assert record.turns == 2
    assert len(record.leaves) == 1, "its second request continues the first"
    assert [each["content"] for each in record.messages if each["role"] == "tool"] == ["5"]


ENVIRONMENT = """
    import verifiers as vf
    from datasets import Dataset

    class Again(vf.MultiTurnEnv):
        @vf.stop
        async def is_right(self, state):
            turns = state["trajectory"]
            return bool(turns) and turns[-1]["completion"][-1].content == state["answer"]

        async def env_response(self, messages, state, **kwargs):
            if state["answer"] == "2":
                raise vf.ToolError("no more")
            return [{"role": "user", "content": "Not right."}]

    def right(completion, answer):
        return float(completion[-1].content == answer)

    async def ranked(states):
        return [float(i) for i, _ in enumerate(states)]

    def load_environment(rows=3, in_groups=False):
        data = [{"question": f"{i}+1?", "answer": str(i + 1)} for i in range(rows)]
        rubric = vf.Rubric(funcs=[ranked if in_groups else right])
        data = Dataset.from_list(data)
        return Again(dataset=data, rubric=rubric, max_turns=2, system_prompt="Add.")
"""


@pytest.fixture
def add_one(tmp_path, monkeypatch):
    """The name of an environment of verifiers, as one that is installed."""
    pytest.importorskip("verifiers")
    (tmp_path / "add_one.py").write_text(textwrap.dedent(ENVIRONMENT))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    return "add_one"


async def episodes_of(recipe, rows, texts: list[str]):
    """Results of episodes of a recipe's agent, and what the policy saw in the last one."""
    generator = DictatedGenerator(texts=list(texts))
    generator.tokenizer.chat_template = TEMPLATE
    program, results, records = build_agent(recipe), [], []
    async with open_endpoint(generator) as running:
        for row in rows:
            prompt = Prompt(0, (1,), "", row.answer, "", row.extra, messages=tuple(row.prompt))
            session = running.sessions.open()
            results.append(await program.run(session, prompt))
            records.append(await running.sessions.close(session.id))
        await program.stop()
    assert_exact([leaf for each in records for leaf in each.leaves], generator.sampled)
    return results, records[-1].messages


def test_an_environment_of_verifiers(add_one):
    keys = [f"rollout.environment={{verifiers: {add_one}, arguments: {{rows: 2}}}}"]
    recipe = load_recipe(None, ["model.path=builtin:tiny", *keys])
    data, name = recipe.data, recipe.rollout.environment.verifiers
    assert data.task == f"verifiers:{name}"
    rows = environment_rows(name, data.task_kwargs, "train", None)
    found = [(row.prompt[-1]["content"], row.answer) for row in rows]
    assert found == [("0+1?", "1"), ("1+1?", "2")]
    results, seen = asyncio.run(episodes_of(recipe, reversed(rows), ["7", "0", "1", "unasked"]))
    assert "no more" in results[0].error, "the environment itself failed"
    assert results[1].reward == 1.0
    assert results[1].numbers["num_turns"] == 2
    assert [each["content"] for each in seen] == ["Add.", "0+1?", "0", "Not right.", "1"]


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("add_two", {}, "Could not import 'add_two'"),
        ("add_one", {"in_groups": True}, "together"),
        ("add_one", {"rows": "two"}, "cannot be interpreted as an integer"),
    ],
)
def test_an_environment_that_cannot_be_used_is_told_before_a_run(add_one, name, arguments, why):
    keys = [f"rollout.environment={json.dumps({'verifiers': name, 'arguments': arguments})}"]
    (issue,) = input_issues(load_recipe(None, ["model.path=builtin:tiny", *keys]), remarks=[])
    assert issue.key == "rollout.environment.verifiers"
    assert why in issue.why
