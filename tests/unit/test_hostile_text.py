"""Whatever a model, a tool or a row can write is data: it ends no run and is lost in no file."""

from __future__ import annotations

import asyncio
import io
import json

from random_dump import write_dump
from rich.console import Console

from mppo.agents.conversation import Conversation, Reply
from mppo.agents.endpoint.prompts import TurnText
from mppo.agents.turn_answers import HostedAnswers
from mppo.data import chat_template
from mppo.data.chat_template import ChatRenderer
from mppo.dumps.step_dump import read_header_of
from mppo.hub.builtin import byte_tokenizer
from mppo.recipe.sections.agent import AgentConfig
from mppo.recipe.sections.trainer import TrainerConfig
from mppo.report.console import SampleRow, StepConsole
from mppo.report.files import METRICS
from mppo.report.history import LONGEST_NAME, read_history
from mppo.report.html.page import page_data, page_text
from mppo.report.reporter import Reporter
from mppo.report.run_record import read_events
from mppo.rewards.result import ANSWER_CHARACTERS, read_result
from mppo.safety.foreign_text import json_line, valid_text

CHARACTERS = [
    *map(chr, range(0xA1)), "\u061c", "\u2028", "\u2029", "\u202e", "\u2066", "\ufeff", "\ufffe",
    "\ud83d", "\ude00", "\udfff", "\U000e0001",
]  # fmt: skip
TEXT = "a" + "b".join(CHARACTERS) + "c"
"""Every control character, separator, mark of direction and half of a surrogate pair."""
SOURCES = ("a//b", "../..", "/", ".", "x\ud800", "\x1b[31mred", "a\nb", "n" * 1000)
"""Names of data sources that a tracker, a file or a terminal could take amiss."""
TOOL = "def echo(said): return said\n"
PARAMETERS = {"properties": {"said": {"type": "string"}}}


def test_a_value_is_one_line_for_every_reader_and_the_same_value_again():
    line = json_line({TEXT: [TEXT]})
    assert line.splitlines() == [line]
    assert json.loads(line) == {valid_text(TEXT): [valid_text(TEXT)]}
    line.encode()
    assert valid_text("ä\ud83d\ude00") == "ä??"


def test_samples_events_numbers_and_dumps_of_any_text_are_written_and_read_again(tmp_path):
    reporter = Reporter(tmp_path, TrainerConfig(), {}, total_steps=1, is_main=True)
    reporter.start(0)
    reporter.event("warning", 0, TEXT)
    row = SampleRow(TEXT, TEXT, TEXT, TEXT, 1.0, "best")
    reporter.samples(1, [row, row])
    names = [f"val-core/{source}/reward/mean" for source in (*SOURCES, TEXT)]
    reporter.log(1, {name: 1.0 for name in names})
    write_dump(tmp_path, 1, prompt=TEXT, text=TEXT, numbers={TEXT: 2.0})
    reporter.close()
    assert valid_text(TEXT) in [event.text for event in read_events(tmp_path)]
    ((_, logged),) = read_history(tmp_path / METRICS)
    assert len(logged) == len(names)
    assert all(name.isprintable() and len(name) <= LONGEST_NAME for name in logged)
    header = read_header_of(tmp_path / "rollouts/step_1")
    assert (header.rows[0].prompt, *header.rows[0].numbers) == (valid_text(TEXT), valid_text(TEXT))
    data = page_data([tmp_path])
    (shown,) = data["runs"]
    assert [each["response"] for each in shown["samples"]] == [valid_text(TEXT)] * 2
    assert not [each for each in shown["tokens"] if "error" in each]
    page_text(data).encode()


def test_the_console_executes_nothing_that_a_text_holds():
    stream = io.StringIO()
    console = StepConsole(1, Console(file=stream, width=400))
    console.start(0)
    console.print_line(f"1 response of {TEXT} has no score")
    console.samples(1, [SampleRow(TEXT, TEXT, TEXT, TEXT, 1.0, "best")])
    console.step(1, {"critic/score/mean": 1.0})
    assert all(char.isprintable() or char == "\n" for char in stream.getvalue())


def test_names_and_answers_of_a_reward_function_are_valid():
    found = read_result({"score": 1, "pred": TEXT, TEXT: 2})
    assert dict(found.numbers) == {valid_text(TEXT): 2.0}
    assert found.answer == valid_text(TEXT)[:ANSWER_CHARACTERS]


def test_a_tool_may_return_what_the_policy_wrote(tmp_path):
    (tmp_path / "own.py").write_text(TOOL)
    path = f"{tmp_path}/own.py:echo"
    tools = [{"path": path, "name": "echo", "description": "", "parameters": PARAMETERS}]
    path = "mppo.agents.hermes:HermesAgent"
    answers = HostedAnswers(AgentConfig(path=path, arguments={"tools": tools}), waits=False)
    call = json.dumps({"name": "echo", "arguments": {"said": TEXT}})
    text = f"<tool_call>{call}</tool_call>"
    messages = ({"role": "user", "content": "q"},)

    async def answer(conversation: Conversation) -> Reply | str:
        try:
            return await answers.answer(conversation)
        finally:
            await answers.stop()

    reply = asyncio.run(answer(Conversation(text, messages, 1, False, False, "s", "g")))
    assert isinstance(reply, Reply)
    said = [{"role": "tool", "content": valid_text(TEXT)}]
    assert reply.environment == said
    tokenizer = byte_tokenizer()
    renderer = ChatRenderer(tokenizer, "rollout.agent")
    assert isinstance(TurnText(tokenizer, renderer).token_ids(said, tokenizer.eos_token_id), list)


TEMPLATE = """{% for m in messages %}{% if 'bad' in m['content'] %}{{ raise_exception('no!') }}
{% elif 'long' in m['content'] %}{% for _ in range(99999) %}{% for _ in range(99999) %}{% endfor %}
{% endfor %}{% endif %}{{ m['content'] }}{% endfor %}"""


def test_messages_that_the_template_cannot_render_end_their_own_conversation_only(monkeypatch):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    monkeypatch.setattr(chat_template, "CPU_S", 1.0)
    renderer = ChatRenderer(tokenizer, "rollout.agent")
    text = TurnText(tokenizer, renderer)
    says = [[{"role": "tool", "content": each}] for each in ("a", "bad", "b", "long", "c")]
    found = [text.token_ids(each, 0) for each in [*says, "text"]]
    renderer.close()
    texts = [each if isinstance(each, str) else tokenizer.decode(each) for each in found]
    assert [texts[i] for i in (0, 2, 4, 5)] == ["a", "b", "c", "text"]
    assert "its messages cannot be rendered" in texts[1]
    assert "no!" in texts[1]
    assert "takes more than" in texts[3]
