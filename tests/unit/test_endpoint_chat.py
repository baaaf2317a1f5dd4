"""Chat completions through the endpoint, with OpenAI's unmodified clients."""

from __future__ import annotations

import asyncio
import functools

import openai
import pytest
import torch
from open_endpoint import assert_exact, open_endpoint
from policy_generator import PolicyGenerator

from mppo.agents.endpoint.session import Limits

USER = {"role": "user", "content": "2+3="}


def in_a_loop(function):
    """A test as a coroutine."""

    @functools.wraps(function)
    def run(*arguments, **named):
        return asyncio.run(function(*arguments, **named))

    return run


@in_a_loop
async def test_a_conversation_is_one_leaf_with_the_sampled_tokens():
    async with open_endpoint() as running:
        session = running.sessions.open()
        client, messages = running.client(session), [USER]
        for turn in range(3):
            answer = await client.chat.completions.create(model="any", messages=messages)
            choice = answer.choices[0]
            assert choice.finish_reason in ("stop", "length")
            messages.append(choice.message.model_dump())
            messages.append({"role": "user", "content": f"and {turn}?"})
        record = await running.sessions.close(session.id)
        (leaf,) = record.leaves
        assert_exact(record.leaves, running.generator.sampled)
        assert record.turns == 3
        assert [each["role"] for each in record.messages] == ["user", "assistant"] * 3
        whole = torch.cat([leaf.context_ids, leaf.ids]).tolist()
        again = running.generator.logprobs(whole)[len(leaf.context_ids) - 1 :]
        own = leaf.logprobs != 0
        torch.testing.assert_close(again[own], leaf.logprobs[own], atol=1e-4, rtol=0)


@in_a_loop
async def test_the_first_request_has_the_prompts_own_tokens():
    async with open_endpoint() as running:
        session = running.sessions.open([USER], token_ids=[1, 50, 60, 70])
        await running.client(session).chat.completions.create(model="any", messages=[USER])
        assert running.generator.sampled[0].given == (1, 50, 60, 70)


@in_a_loop
async def test_a_rewritten_history_is_a_branch_that_keeps_what_is_known():
    async with open_endpoint() as running:
        session = running.sessions.open()
        client = running.client(session)

        async def ask(messages):
            answer = await client.chat.completions.create(model="any", messages=messages)
            return {"role": "assistant", "content": answer.choices[0].message.content}

        first = await ask([USER])
        follow = [USER, first, {"role": "user", "content": "why?"}]
        second = await ask(follow)
        await ask([*follow, second, {"role": "user", "content": "how?"}])
        changed = {"role": "assistant", "content": "something else"}
        await ask([*follow, changed, {"role": "user", "content": "how?"}])
        await ask([{"role": "user", "content": "a summary"}])
        given = [each.given for each in running.generator.sampled]
        kept = given[0] + tuple(running.generator.sampled[0].turn.ids.tolist())
        assert given[3][: len(kept)] == kept
        record = await running.sessions.close(session.id)
        assert len(record.leaves) == 3
        assert_exact(record.leaves, running.generator.sampled)
        assert record.leaves[1].context_ids.tolist() == list(given[3])
        assert record.messages[0]["content"] == "a summary"


@in_a_loop
async def test_n_and_parallel_calls_are_branches():
    async with open_endpoint() as running:
        session = running.sessions.open()
        client = running.client(session)

        def ask(**options):
            return client.chat.completions.create(model="any", messages=[USER], **options)

        answer = await ask(n=3)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        await asyncio.gather(*(ask() for _ in range(4)))
        record = await running.sessions.close(session.id)
        assert len(record.leaves) == len(running.generator.sampled) == record.turns == 7
        assert_exact(record.leaves, running.generator.sampled)


@in_a_loop
async def test_both_forms_of_address_reach_the_session():
    async with open_endpoint() as running:
        session = running.sessions.open()
        for base, key in [
            (session.base_url, session.key),
            (session.base_url, session.id),
            (f"{running.endpoint.url}/v1", session.key),
            (f"{running.endpoint.url}/v1", session.id),
        ]:
            client = running.client(session, base_url=base, api_key=key)
            await client.chat.completions.create(model="any", messages=[USER])
            assert [model.id async for model in client.models.list()] == ["policy"]
        assert len(session.tree) == 4
        wrong = running.client(session, api_key="no")
        with pytest.raises(openai.AuthenticationError):
            await wrong.chat.completions.create(model="any", messages=[USER])


def test_the_synchronous_client_works_from_another_thread():
    async def run():
        async with open_endpoint() as running:
            session = running.sessions.open()

            def talk():
                client = openai.OpenAI(base_url=session.base_url, api_key=session.key)
                return client.chat.completions.create(model="any", messages=[USER])

            answer = await asyncio.to_thread(talk)
            assert answer.usage.completion_tokens == len(running.generator.sampled[0].turn.ids)

    asyncio.run(run())


@in_a_loop
async def test_tokens_and_logprobs_are_in_the_answer_when_asked_for():
    async with open_endpoint() as running:
        session = running.sessions.open()
        answer = await running.client(session).chat.completions.create(
            model="any", messages=[USER], logprobs=True, extra_body={"return_token_ids": True}
        )
        sampled = running.generator.sampled[0]
        message = answer.choices[0].message.model_dump()
        assert message["prompt_token_ids"] == list(sampled.given)
        assert message["generation_token_ids"] == sampled.turn.ids.tolist()
        told = [each.logprob for each in answer.choices[0].logprobs.content]
        assert told == message["generation_log_probs"] == sampled.turn.logprobs.tolist()


@in_a_loop
async def test_a_stop_text_cuts_text_and_tokens():
    """What the engine sampled after the text is dropped; the rest is what it sampled."""
    async with open_endpoint(PolicyGenerator(longest=40, stop_share=0.001)) as running:
        session = running.sessions.open()
        client = running.client(session)
        for letter in "aeiou":
            answer = await client.chat.completions.create(
                model="any", messages=[USER], stop=["x", letter]
            )
            assert not {"x", letter} & set(answer.choices[0].message.content)
        record = await running.sessions.close(session.id)
        cut = 0
        for leaf, sampled, letter in zip(
            record.leaves, running.generator.sampled, "aeiou", strict=True
        ):
            count = len(leaf.ids)
            assert leaf.ids.equal(sampled.turn.ids[:count])
            assert leaf.logprobs.equal(sampled.turn.logprobs[:count])
            if count < len(sampled.turn.ids):
                cut += 1
                assert running.generator.tokenizer.decode(leaf.ids)[-1] in ("x", letter)
                assert leaf.finish_reason == "stop"
        assert cut


@in_a_loop
async def test_an_interrupted_turn_goes_on_with_new_weights():
    """An engine that answers "abort" is asked for the rest: one turn of two versions."""

    class Interrupted(PolicyGenerator):
        async def generate(self, token_ids, max_tokens, session):
            first = len(self.sampled) == 0
            turn = await super().generate(token_ids, 2 if first else max_tokens, session)
            self.version += first
            return type(turn)(turn.ids, turn.logprobs, "abort" if first else "stop", turn.version)

    async with open_endpoint(Interrupted(stop_share=0.001)) as running:
        session = running.sessions.open()
        client = running.client(session)
        await client.chat.completions.create(model="any", messages=[USER], max_tokens=5)
        (leaf,) = (await running.sessions.close(session.id)).leaves
        assert leaf.parts == ((0, 2), (1, 3))
        assert_exact([leaf], running.generator.sampled)


@in_a_loop
async def test_the_context_window_and_max_tokens_bound_a_turn():
    async with open_endpoint(
        PolicyGenerator(longest=50, stop_share=0.001), Limits(context_tokens=20, max_tokens=8)
    ) as running:
        session = running.sessions.open()
        client = running.client(session)
        answer = await client.chat.completions.create(model="any", messages=[USER])
        assert answer.usage.completion_tokens == 8
        assert answer.choices[0].finish_reason == "length"
        answer = await client.chat.completions.create(
            model="any", messages=[USER], max_completion_tokens=3
        )
        assert answer.usage.completion_tokens == 3
        with pytest.raises(openai.BadRequestError) as told:
            await client.chat.completions.create(
                model="any", messages=[{"role": "user", "content": "x" * 30}]
            )
        assert told.value.code == "context_length_exceeded"
