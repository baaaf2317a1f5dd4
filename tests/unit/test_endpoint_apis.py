"""Streams, tools, completions, responses and Anthropic's messages, with the unmodified clients."""

from __future__ import annotations

import asyncio
import functools
import json

import anthropic
import openai
import pytest
from open_endpoint import assert_exact, open_endpoint
from policy_generator import DictatedGenerator, PolicyGenerator

from mppo.agents.endpoint.messages import read_messages
from mppo.agents.endpoint.tool_calls import parse_hermes, tool_parser
from mppo.data.chat_template import render_with
from mppo.safety.input_error import InputError

USER = {"role": "user", "content": "2+3="}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "adds", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
HERMES_TEMPLATE = (
    "{{ bos_token }}{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' and not loop.previtem.role in ('assistant', 'tool') %}"
    "{{ raise_exception('no call before') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>"
    "{% endfor %}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def in_a_loop(function):
    """A test as a coroutine."""

    @functools.wraps(function)
    def run(*arguments, **named):
        return asyncio.run(function(*arguments, **named))

    return run


def dictated(*texts):
    return DictatedGenerator(texts=list(texts))


async def one_leaf(running, session):
    """The record's only leaf, which holds all that was sampled."""
    (leaf,) = (await running.sessions.close(session.id)).leaves
    assert_exact([leaf], running.generator.sampled)
    return leaf


# ---- chat completions


@in_a_loop
async def test_a_tool_is_called_and_its_result_continues_the_turn():
    async with open_endpoint(dictated(f"I add.\n{CALL}{CALL}", "5")) as running:
        session = running.sessions.open()
        client = running.client(session)
        answer = await client.chat.completions.create(model="m", messages=[USER], tools=TOOLS)
        choice = answer.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I add.")
        calls = choice.message.tool_calls
        assert [json.loads(call.function.arguments) for call in calls] == [{"a": 2, "b": 3}] * 2
        # as clients send it back: other spaces, no null fields, an id of their own
        back = {
            "role": "assistant",
            "content": "I add.",
            "tool_calls": [
                {
                    "id": "mine",
                    "type": "function",
                    "function": {"name": "add", "arguments": '{"b":3,"a":2}'},
                }
            ]
            * 2,
        }
        results = [{"role": "tool", "tool_call_id": call.id, "content": "5"} for call in calls]
        messages = [USER, back, *results]
        answer = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        assert answer.choices[0].finish_reason == "stop"
        await one_leaf(running, session)


@in_a_loop
async def test_with_a_real_template_a_continuation_is_the_whole_conversation_rendered():
    """Tools, calls and results as the template writes them; no token differs from one rendering."""
    generator = dictated(CALL, "It is 5.", "Yes.")
    tokenizer = generator.tokenizer
    tokenizer.chat_template = HERMES_TEMPLATE
    async with open_endpoint(generator) as running:
        session = running.sessions.open()
        client, messages = running.client(session), [{"role": "system", "content": "Be."}, USER]
        for _ in range(3):
            answer = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
            message = answer.choices[0].message
            expected = render_with(tokenizer, [read_messages(messages)], "key", tools=TOOLS)[0]
            whole = tokenizer(expected, add_special_tokens=False)["input_ids"]
            assert list(generator.sampled[-1].given) == whole
            said = {"role": "user", "content": "sure?"}
            if message.tool_calls:
                call_id = message.tool_calls[0].id
                said = {"role": "tool", "tool_call_id": call_id, "content": "5"}
            messages = [*messages, message.model_dump(exclude_none=True), said]
        await one_leaf(running, session)
        refused = [USER, {"role": "tool", "content": "5"}]
        client = running.client(running.sessions.open())
        with pytest.raises(openai.BadRequestError, match="no call before"):
            await client.chat.completions.create(model="m", messages=refused)


@in_a_loop
async def test_what_is_no_valid_call_is_text():
    texts = ("<tool_call>{</tool_call>", '<tool_call>{"name": "rm"}</tool_call>', CALL)
    async with open_endpoint(dictated(*texts)) as running:
        client = running.client(running.sessions.open())
        for tools in (TOOLS, TOOLS, openai.NOT_GIVEN):
            answer = await client.chat.completions.create(model="m", messages=[USER], tools=tools)
            choice, text = answer.choices[0], texts[len(running.generator.sampled) - 1]
            assert (choice.message.content, choice.message.tool_calls) == (text, None)
            assert choice.finish_reason == "stop"


@in_a_loop
async def test_a_call_with_half_a_surrogate_pair_is_answered():
    call = '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>'
    async with open_endpoint(dictated(call, "5")) as running:
        session = running.sessions.open()
        client = running.client(session)
        answer = await client.chat.completions.create(model="m", messages=[USER], tools=TOOLS)
        messages = [USER, answer.choices[0].message.model_dump(), {"role": "tool", "content": "5"}]
        await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        await one_leaf(running, session)


@in_a_loop
async def test_a_stream_holds_what_the_answer_holds():
    async with open_endpoint(dictated("so", f"I add.{CALL}")) as running:
        client = running.client(running.sessions.open())
        stream = await client.chat.completions.create(
            model="m", messages=[USER], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "so"
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage.completion_tokens == 3
        tools = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
        async with client.chat.completions.stream(
            model="m", messages=[USER], tools=tools
        ) as stream:
            answer = await stream.get_final_completion()
        message = answer.choices[0].message
        assert (message.content, message.tool_calls[0].function.name) == ("I add.", "add")
        assert json.loads(message.tool_calls[0].function.arguments) == {"a": 2, "b": 3}
        assert answer.choices[0].finish_reason == "tool_calls"


# ---- completions


@in_a_loop
async def test_completions_continue_their_own_text_and_token_ids():
    async with open_endpoint(PolicyGenerator(longest=5)) as running:
        for kind in ("text", "ids"):
            running.generator.sampled.clear()
            session = running.sessions.open()
            client, extra = running.client(session), {"return_token_ids": True}
            prompt = "2+3=" if kind == "text" else [5, 40, 70]
            for _ in range(3):
                answer = await client.completions.create(
                    model="m", prompt=prompt, max_tokens=5, logprobs=1, extra_body=extra
                )
                choice = answer.choices[0]
                assert choice.logprobs.token_logprobs == choice.generation_log_probs
                if kind == "text":
                    prompt = f"{prompt}{choice.text} and "
                else:
                    prompt = [*choice.prompt_token_ids, *choice.generation_token_ids, 9]
            await one_leaf(running, session)


@in_a_loop
async def test_completions_stream_and_refuse():
    async with open_endpoint(dictated("so")) as running:
        session = running.sessions.open()
        client = running.client(session)
        stream = await client.completions.create(model="m", prompt="a", stream=True)
        assert "".join([c.choices[0].text async for c in stream if c.choices]) == "so"
        for prompt in ("", [], ["a", "b"], [10**9], [-1], [True]):
            with pytest.raises(openai.BadRequestError):
                await client.completions.create(model="m", prompt=prompt)


# ---- responses


@in_a_loop
async def test_responses_call_tools_with_all_items_or_the_previous_id():
    tools = [{"type": "function", **FUNCTION, "strict": False}]
    for by_id in (False, True):
        async with open_endpoint(dictated(f"I add.{CALL}", "5")) as running:
            session = running.sessions.open()
            client = running.client(session)
            first = await client.responses.create(
                model="m", instructions="Add.", input=[USER], tools=tools
            )
            text, call = first.output
            assert (text.content[0].text, call.name) == ("I add.", "add")
            assert json.loads(call.arguments) == {"a": 2, "b": 3}
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
            items = [USER, *(item.model_dump() for item in first.output), result]
            options = {"previous_response_id": first.id} if by_id else {}
            second = await client.responses.create(
                model="m",
                instructions="Add.",
                input=[result] if by_id else items,
                tools=tools,
                **options,
            )
            assert (second.output_text, second.status) == ("5", "completed")
            await one_leaf(running, session)


@in_a_loop
async def test_a_stream_of_responses():
    async with open_endpoint(dictated(f"I add.{CALL}")) as running:
        client = running.client(running.sessions.open())
        tools = [{"type": "function", **FUNCTION, "strict": False}]
        async with client.responses.stream(model="m", input="2+3=", tools=tools) as stream:
            kinds = [event.type async for event in stream]
            answer = await stream.get_final_response()
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
        assert answer.output_text == "I add."
        assert answer.output[1].name == "add"
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="m", input="a", previous_response_id="resp_none")


# ---- Anthropic's messages


def anthropic_client(session):
    return anthropic.AsyncAnthropic(
        base_url=session.anthropic_url, api_key=session.key, max_retries=0
    )


@in_a_loop
async def test_anthropics_client_calls_a_tool():
    tools = [{"name": "add", "description": "adds", "input_schema": SCHEMA}]
    async with open_endpoint(dictated(f"I add.{CALL}", "5")) as running:
        session = running.sessions.open()
        options = {"model": "m", "max_tokens": 50, "system": "Add.", "tools": tools}
        async with anthropic_client(session) as client:
            answer = await client.messages.create(messages=[USER], **options)
            text, call = answer.content
            assert (text.text, call.input, answer.stop_reason) == (
                "I add.", {"a": 2, "b": 3}, "tool_use",
            )  # fmt: skip
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "5"}
            messages = [
                USER,
                {"role": "assistant", "content": answer.content},
                {"role": "user", "content": [result]},
            ]
            count = await client.messages.count_tokens(
                model="m", messages=messages, system="Add.", tools=tools
            )
            answer = await client.messages.create(messages=messages, **options)
            assert answer.content[0].text == "5"
            assert answer.stop_reason == "end_turn"
            assert answer.usage.input_tokens == count.input_tokens
        await one_leaf(running, session)


@in_a_loop
async def test_a_stream_of_anthropics_messages_and_its_errors():
    tools = [{"name": "add", "description": "adds", "input_schema": SCHEMA}]
    async with open_endpoint(dictated(f"I add.{CALL}", "a STOP b")) as running:
        session = running.sessions.open()
        async with anthropic_client(session) as client:
            options = {"model": "m", "max_tokens": 50, "messages": [USER]}
            async with client.messages.stream(**options, tools=tools) as stream:
                answer = await stream.get_final_message()
            assert [block.type for block in answer.content] == ["text", "tool_use"]
            assert answer.content[1].input == {"a": 2, "b": 3}
            answer = await client.messages.create(**options, stop_sequences=["STOP"])
            assert (answer.content[0].text, answer.stop_reason) == ("a ", "stop_sequence")
            assert answer.stop_sequence == "STOP"
            with pytest.raises(anthropic.BadRequestError, match="differs from training"):
                await client.messages.create(**options, extra_body={"temperature": 0.5})
            last = [USER, {"role": "assistant", "content": "so"}]
            with pytest.raises(anthropic.BadRequestError, match="last message"):
                await client.messages.create(model="m", max_tokens=50, messages=last)
            await running.sessions.close(session.id)
            with pytest.raises(anthropic.ConflictError):
                await client.messages.create(**options)


HOSTILE = [
    {"messages": [USER], "max_tokens": "a"},
    {"messages": [[]]},
    {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": [[]]}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    {"messages": [USER], "system": 5},
    {"messages": [USER], "tools": [{"name": 3, "input_schema": {}}]},
    {"messages": [USER], "stop_sequences": "STOP"},
    {"messages": []},
    {"input": 5},
    {"input": [5]},
    {"input": []},
    {"input": [{"type": "function_call"}]},
    {"input": [{"type": "computer_call"}]},
    {"input": [{"role": "king", "content": "a"}]},
    {"input": "a", "tools": [{"type": "web_search"}]},
    {"input": "a", "text": {"format": {"type": "json_object"}}},
    {"input": "a", "max_output_tokens": 0},
    {"prompt": {}},
    {"prompt": "a", "echo": True},
    {},
]


@in_a_loop
async def test_hostile_bodies_of_every_api_are_refused():
    async with open_endpoint() as running, running.http(running.sessions.open().key) as http:
        for body in HOSTILE:
            for path in ("messages", "messages/count_tokens", "responses", "completions"):
                answer = await http.post(f"/v1/{path}", json=body)
                assert answer.status_code == 400, (path, body, answer.text)
                error = answer.json()
                assert error["type"] == "error"
                assert error["error"]["type"] == "invalid_request_error"


# ---- parsers of tool calls


TEXTS = [
    "nothing",
    CALL,
    f"I add.\n{CALL}\n{CALL}",
    f"{CALL} and then",
    '<tool_call>{"name": "none", "arguments": {}}</tool_call>',
    f'<tool_call>{{"name": "none"}}</tool_call>{CALL}',
    f"<tool_call>{{</tool_call>{CALL}",
    '<tool_call>{"name": "add"}</tool_call>',
    '<tool_call>[{"name": "add", "parameters": {"a": "\u00e9"}}]</tool_call>',
]


@pytest.mark.parametrize("text", TEXTS)
def test_hermes_calls_are_read_as_sglang_reads_them(text):
    pytest.importorskip("sglang")
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    rest, calls = parse_hermes(text, TOOLS)
    parser = FunctionCallParser([Tool(**tool) for tool in TOOLS], "hermes")
    theirs, found = parser.parse_non_stream(text)
    read = [(call.name, json.loads(call.parameters)) for call in found]
    assert [(name, json.loads(arguments)) for name, arguments in calls] == read
    assert not calls or rest == theirs


def test_other_formats_are_sglangs():
    pytest.importorskip("sglang")
    parse = tool_parser("qwen25")
    text = 'so\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert parse(text, TOOLS) == ("so", [("add", '{"a": 1}')])
    assert parse("so", TOOLS) == ("so", [])
    pythonic = tool_parser("llama3")('<|python_tag|>{"name": "add", "parameters": {}}', TOOLS)
    assert pythonic == ("", [("add", "{}")])
    with pytest.raises(InputError, match="use hermes"):
        tool_parser("hermess")
