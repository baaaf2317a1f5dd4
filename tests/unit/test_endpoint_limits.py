"""Retries, ends, limits and hostile requests at the endpoint."""

from __future__ import annotations

import asyncio
import functools
import json
import socket

import openai
import pytest
from open_endpoint import assert_exact, open_endpoint
from policy_generator import PolicyGenerator

from mppo.agents.endpoint.server import Endpoint
from mppo.agents.endpoint.session import Limits, Session
from mppo.agents.endpoint.sessions import Sessions
from mppo.recipe.sections.rollout import SamplingConfig
from mppo.safety.input_error import InputError

USER = {"role": "user", "content": "2+3="}
BODY = {"model": "m", "messages": [USER]}
CHAT = "/v1/chat/completions"
RETRY_S = 1000.0


class Gated(PolicyGenerator):
    """Samples once ``gate`` is set; ``asked`` counts the calls."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.gate, self.asked = asyncio.Event(), 0

    async def generate(self, token_ids, max_tokens, session):
        self.asked += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        return await super().generate(token_ids, max_tokens, session)


def in_a_loop(function):
    """A test as a coroutine."""

    @functools.wraps(function)
    def run(*arguments, **named):
        return asyncio.run(function(*arguments, **named))

    return run


async def until(condition):
    """Wait for it."""
    for _ in range(60_000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen")


def retry_timers():
    """The timers that run out ``RETRY_S`` after a client has left, which only the test calls."""
    loop, timers = asyncio.get_running_loop(), []
    call_later = loop.call_later

    def held(delay_s, function, *arguments):
        if delay_s != RETRY_S:
            return call_later(delay_s, function, *arguments)
        timers.append(functools.partial(function, *arguments))

    loop.call_later = held
    return timers


def readers(session: Session) -> list[int]:
    """The number of clients that wait for each of the session's answers."""
    return [call.readers for call in session.calls._calls]


# ---- retries


@in_a_loop
async def test_a_marked_retry_gets_the_same_answer_and_others_get_their_own():
    async with open_endpoint() as running, running.http(running.sessions.open().key) as http:
        first = (await http.post(CHAT, json=BODY)).json()
        other = (await http.post(CHAT, json=BODY)).json()
        again = (await http.post(CHAT, json=BODY, headers={"x-stainless-retry-count": "1"})).json()
        assert first["id"] != other["id"] == again["id"]
        named = [
            (await http.post(CHAT, json=BODY, headers={"Idempotency-Key": key})).json()["id"]
            for key in ("a", "b", "a")
        ]
        assert named[0] == named[2] != named[1]
        assert len(running.generator.sampled) == 4


@in_a_loop
async def test_the_clients_own_retry_after_its_timeout_gets_the_running_answer():
    generator = Gated()
    async with open_endpoint(generator, Limits(retry_s=RETRY_S)) as running:
        timers, session = retry_timers(), running.sessions.open()
        client = running.client(session, timeout=0.4, max_retries=50)
        asked = asyncio.ensure_future(client.chat.completions.create(model="m", messages=[USER]))
        await until(lambda: generator.asked)
        client.timeout = 600  # of the next attempt
        await until(lambda: timers and 1 in readers(session))
        generator.gate.set()
        await asked
        (leaf,) = (await running.sessions.close(session.id)).leaves
        assert_exact([leaf], generator.sampled)
        assert generator.asked == len(generator.sampled) == 1


@in_a_loop
async def test_a_request_whose_client_left_is_aborted_unless_it_is_asked_again():
    generator = Gated()
    async with open_endpoint(generator, Limits(retry_s=RETRY_S)) as running:
        timers, session = retry_timers(), running.sessions.open()
        async with running.http(session.key) as http:
            for number, asked_again in enumerate((False, True), 1):
                asked = asyncio.ensure_future(http.post(CHAT, json=BODY))
                await until(lambda number=number: generator.asked == number)
                asked.cancel()
                await until(lambda: timers)
                if asked_again:  # not marked as a retry, but nobody has read the first answer
                    again = asyncio.ensure_future(http.post(CHAT, json=BODY))
                    await until(lambda: 1 in readers(session))
                    timers.pop()()
                    generator.gate.set()
                    assert (await again).status_code == 200
                else:
                    assert generator.aborted == 0
                    timers.pop()()
                    await until(lambda: generator.aborted == 1)
        assert generator.asked == 2
        assert generator.aborted == len(generator.sampled) == 1
        record = await running.sessions.close(session.id)
        assert_exact(record.leaves, generator.sampled)


@in_a_loop
async def test_an_answer_that_nobody_reads_is_in_no_leaf():
    generator = Gated()
    async with open_endpoint(generator, Limits(retry_s=RETRY_S)) as running:
        timers, session = retry_timers(), running.sessions.open()
        async with running.http(session.key) as http:
            generator.gate.set()
            await http.post(CHAT, json=BODY)
            generator.gate.clear()
            asked = asyncio.ensure_future(http.post(CHAT, json=BODY))
            await until(lambda: generator.asked == 2)
            asked.cancel()
            await until(lambda: timers)
            generator.gate.set()
        await until(lambda: all(call.task.done() for call in session.calls._calls))
        assert len(generator.sampled) == 2
        record = await running.sessions.close(session.id)
        assert_exact(record.leaves, generator.sampled[:1])


@in_a_loop
async def test_a_failed_request_is_tried_again():
    class Failing(PolicyGenerator):
        async def generate(self, token_ids, max_tokens, session):
            self.version += 1
            if self.version == 1:
                raise RuntimeError("the server died")
            return await super().generate(token_ids, max_tokens, session)

    async with open_endpoint(Failing()) as running:
        session = running.sessions.open()
        client = running.client(session, max_retries=1)
        await client.chat.completions.create(model="m", messages=[USER])
        record = await running.sessions.close(session.id)
        assert (record.turns, record.error) == (1, None)
        dead, running.generator.version = running.sessions.open(), 0
        with pytest.raises(openai.InternalServerError, match="the server died"):
            await running.client(dead).chat.completions.create(model="m", messages=[USER])
        record = await running.sessions.close(dead.id)
        assert (record.turns, record.leaves) == (0, ())
        assert record.error == "RuntimeError: the server died"


# ---- the life of a session


@in_a_loop
async def test_a_session_over_http_from_its_opening_to_its_record():
    async with open_endpoint() as running:
        owner = running.http(running.endpoint.admin_key)
        async with owner, running.http() as nobody:
            assert (await nobody.post("/sessions")).status_code == 401
            opened = (await owner.post("/sessions", json={"messages": [USER]})).json()
            assert opened["base_url"].startswith(running.endpoint.url)
            place = f"/sessions/{opened['id']}"
            async with running.http(opened["key"]) as agent:
                answer = await agent.post(f"{place}{CHAT}", json=BODY)
                assert answer.status_code == 200
                told = await agent.post(
                    f"{place}/reward_info", json={"reward": 0.5, "numbers": {"tools": 2}}
                )
                assert told.json() == {"reward": 0.5, "numbers": {"tools": 2.0}}
                for bad in ({"reward": "much"}, {"reward": True}, {"numbers": [1]}):
                    told = await agent.post(f"{place}/reward_info", json=bad)
                    assert told.status_code == 400
                assert (await nobody.delete(place)).status_code == 401
                assert (await agent.delete(place)).json() == {"id": opened["id"], "turns": 1}
                assert (await agent.post(f"{place}{CHAT}", json=BODY)).status_code == 409
            record = (await owner.delete(place)).json()
            assert record["reward"] == 0.5
            sampled = running.generator.sampled[0]
            assert record["leaves"][0]["ids"] == sampled.turn.ids.tolist()
            assert record["leaves"][0]["context_ids"] == list(sampled.given)
            assert (await owner.delete(place)).status_code == 409
            assert (await owner.delete("/sessions/none")).status_code == 404


@in_a_loop
async def test_requests_to_an_ended_session_get_409_also_those_that_run():
    generator = Gated()
    async with open_endpoint(generator) as running:
        session = running.sessions.open()
        client = running.client(session, max_retries=3)
        asked = asyncio.ensure_future(client.chat.completions.create(model="m", messages=[USER]))
        await until(lambda: generator.asked)
        await running.sessions.close(session.id)
        with pytest.raises(openai.ConflictError):
            await asked
        assert generator.aborted == 1
        for base in (session.base_url, f"{running.endpoint.url}/v1"):
            late = running.client(session, base_url=base)
            with pytest.raises(openai.ConflictError):
                await late.chat.completions.create(model="m", messages=[USER])


@in_a_loop
async def test_unknown_sessions_keys_and_routes():
    async with open_endpoint() as running, running.http("sk-nobody") as http:
        assert (await http.post(CHAT, json=BODY)).status_code == 401
        assert (await http.post(f"/sessions/abc{CHAT}", json=BODY)).status_code == 404
        assert (await http.get("/v1/models")).status_code == 401
        assert (await http.get("/health")).json() == {"status": "ok"}
        for path in ("/", "/v1/embeddings", "/v1/chat/completions/x", "/sessions/../../etc"):
            answer = await http.post(path, json=BODY)
            assert answer.status_code == 404, path
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


# ---- limits


@in_a_loop
async def test_turns_calls_and_sessions_are_limited():
    limits, generator = Limits(turns=3, concurrent_calls=2, sessions=2), Gated()
    async with open_endpoint(generator, limits) as running:
        session = running.sessions.open()
        client = running.client(session)

        async def status(**options):
            try:
                await client.chat.completions.create(model="m", messages=[USER], **options)
            except openai.APIStatusError as error:
                return error.status_code, error.response.headers.get("x-should-retry")
            return 200, None

        assert await status(n=4) == (429, "false")
        asked = [asyncio.ensure_future(status()) for _ in range(3)]
        await until(lambda: generator.asked == 3 or any(each.done() for each in asked))
        generator.gate.set()
        found = await asyncio.gather(*asked)
        assert sorted(found) == [(200, None), (200, None), (429, None)]
        assert await status() == (200, None)
        assert await status() == (429, "false")
        running.sessions.open()
        async with running.http(running.endpoint.admin_key) as owner:
            assert (await owner.post("/sessions")).status_code == 429


@in_a_loop
async def test_sampling_other_than_trainings_is_refused_by_name():
    async with open_endpoint() as running, running.http(running.sessions.open().key) as http:
        for same in ({"temperature": 1}, {"top_p": 1.0, "top_k": -1, "presence_penalty": 0}):
            assert (await http.post(CHAT, json=BODY | same)).status_code == 200
        for key, value in {
            "temperature": 0, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "presence_penalty": 0.5,
            "frequency_penalty": -1, "repetition_penalty": 1.1, "logit_bias": {"5": 1},
            "response_format": {"type": "json_object"}, "tool_choice": "required",
            "guided_json": {"type": "object"}, "top_logprobs": 3,
        }.items():  # fmt: skip
            answer = await http.post(CHAT, json=BODY | {key: value})
            assert answer.status_code == 400, key
            assert answer.json()["error"]["param"] == key
        greedy = running.sessions.open(sampling=SamplingConfig(temperature=0.0))
        async with running.http(greedy.key) as validation:
            for value, status in ((0, 200), (1, 400)):
                answer = await validation.post(CHAT, json=BODY | {"temperature": value})
                assert answer.status_code == status


# ---- hostile requests


def deep(levels: int) -> bytes:
    return json.dumps(BODY)[:-1].encode() + b', "x": ' + b"[" * levels + b"]" * levels + b"}"


def with_messages(messages) -> bytes:
    return json.dumps({"messages": messages}).encode()


HOSTILE = {
    "empty": b"",
    "not JSON": b"{",
    "not an object": b"[1]",
    "not UTF-8": b'{"messages": "\xff\xfe"}',
    "half a pair": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "NaN": b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
    "deep": deep(200),
    "very deep": deep(100_000),
    "long integer": b'{"messages": [{"role": "user", "content": "a"}], "seed": '
    + b"9" * 5000
    + b"}",
    "no messages": b"{}",
    "no message": with_messages([]),
    "messages a text": with_messages("hello"),
    "message a text": with_messages(["hello"]),
    "role a list": with_messages([{"role": ["user"], "content": "a"}]),
    "unknown role": with_messages([{"role": "king", "content": "a"}]),
    "content a number": with_messages([{"role": "user", "content": 5}]),
    "a picture": with_messages([{"role": "user", "content": [{"type": "image_url"}]}]),
    "calls a text": with_messages([{"role": "assistant", "tool_calls": "x"}]),
    "call without function": with_messages([{"role": "assistant", "tool_calls": [{}]}]),
    "n 0": json.dumps(BODY | {"n": 0}).encode(),
    "n huge": json.dumps(BODY | {"n": 10**6}).encode(),
    "max_tokens negative": json.dumps(BODY | {"max_tokens": -1}).encode(),
    "max_tokens a text": json.dumps(BODY | {"max_tokens": "many"}).encode(),
    "stop a number": json.dumps(BODY | {"stop": 3}).encode(),
    "temperature infinite": json.dumps(BODY).encode()[:-1] + b', "temperature": 1e999}',
    "tools a text": json.dumps(BODY | {"tools": "all"}).encode(),
    "tool without name": json.dumps(BODY | {"tools": [{"type": "function"}]}).encode(),
}


@in_a_loop
async def test_hostile_bodies_are_refused_and_the_server_goes_on():
    limits = Limits(body_bytes=1 << 20, context_tokens=200)
    async with open_endpoint(limits=limits) as running:
        session = running.sessions.open()
        async with running.http(session.key) as http:
            for name, body in HOSTILE.items():
                answer = await http.post(CHAT, content=body)
                assert answer.status_code == 400, (name, answer.text)
                error = answer.json()["error"]
                assert error["message"], name
                assert error["type"] == "invalid_request_error"
            large = await http.post(CHAT, content=b" " * ((1 << 20) + 1))
            assert large.status_code == 413
            long = await http.post(CHAT, content=with_messages([USER | {"content": "x" * 1000}]))
            assert long.json()["error"]["code"] == "context_length_exceeded"
            assert (await http.post(CHAT, json=BODY)).status_code == 200
        record = await running.sessions.close(session.id)
        assert record.turns == 1
        assert_exact(record.leaves, running.generator.sampled)


@in_a_loop
async def test_a_client_that_sends_no_http_or_only_half_of_it_disturbs_nobody():
    async with open_endpoint() as running:
        session = running.sessions.open()
        port = int(running.endpoint.url.rpartition(":")[2])
        for sent in (
            b"\x16\x03\x01\x02\x00",
            b"GET / HTTP/9.9\r\n\r\n",
            b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{",
            b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
            b"A" * 200_000,
        ):
            with socket.create_connection(("127.0.0.1", port)) as peer:
                peer.sendall(sent)
                await asyncio.sleep(0.02)
        client = running.client(session)
        await client.chat.completions.create(model="m", messages=[USER])


@in_a_loop
async def test_a_port_that_is_taken_is_told_with_the_fix():
    generator = PolicyGenerator()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sessions = Sessions(generator.tokenizer, generator)
        with pytest.raises(InputError, match=f"127.0.0.1:{port}.*free port"):
            await Endpoint(sessions, port=port).start()
