"""The process that renders one conversation after the other: equal texts, and limits for each."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest

from mppo.data import chat_template
from mppo.data.chat_template import ChatRenderer, render_with
from mppo.hub.builtin import byte_tokenizer
from mppo.recipe.errors import ConfigError

KEY = "rollout.agent"
TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' and loop.first %}{{ raise_exception('no call') }}{% endif %}"
    "{% if m.content == 'forever' %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}"
    "{% if m.content == 'memory' %}{% set x = 'x' * 4000000000 %}{{ x }}{% endif %}"
    "{% if m.content == 'long' %}{{ 'x' * 5000000 }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CONVERSATIONS = [
    [{"role": "user", "content": "2+3="}],
    [{"role": "system", "content": "a\nb\u2028c"}, {"role": "user", "content": "\u00e9\U0001f600"}],
    [{"role": "tool", "content": "5"}],
    [{"role": "user", "content": "forever"}],
    [{"role": "user", "content": "long"}],
    [{"role": "user", "content": "memory"}],
    [{"role": "user", "content": ""}],
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "\u00e9"}}]


@pytest.fixture
def tokenizer():
    found = byte_tokenizer()
    found.chat_template = TEMPLATE
    return found


@pytest.fixture
def renderer(tokenizer):
    found = ChatRenderer(tokenizer, KEY)
    yield found
    found.close()


def test_the_texts_are_those_of_a_process_of_its_own(tokenizer, renderer):
    good = [CONVERSATIONS[i] for i in (0, 1, 6)]
    assert [renderer.render(each) for each in good] == render_with(tokenizer, good, KEY)
    with_tools = render_with(tokenizer, good, KEY, tools=TOOLS)
    assert [renderer.render(each, TOOLS) for each in good] == with_tools


def test_a_conversation_that_fails_or_exceeds_a_limit_stops_no_other(tokenizer, renderer):
    found = []
    while len(found) < len(CONVERSATIONS):
        found += renderer.render_some(CONVERSATIONS[len(found) :])
    texts = {i: each for i, each in enumerate(found) if isinstance(each, str)}
    good = render_with(tokenizer, [CONVERSATIONS[i] for i in (0, 1, 6)], KEY)
    assert texts == dict(zip((0, 1, 6), good, strict=True))
    errors = [str(each) for each in found if isinstance(each, ConfigError)]
    assert ["no call" in errors[0], "takes more than" in errors[1]] == [True, True]
    assert "5000" in errors[2]


def test_the_first_failing_prompt_of_a_data_set_ends_the_process(tokenizer):
    fails, good = CONVERSATIONS[2], CONVERSATIONS[0]
    with closing(ChatRenderer(tokenizer, KEY, together=3)) as renderer:
        found = renderer.render_some([good, fails, good])
    assert [type(each) for each in found] == [str, ConfigError, ConfigError]
    with pytest.raises(ConfigError, match=r"fails: .* in prompt 2: no call"):
        render_with(tokenizer, [good, fails, good], KEY)


def test_threads_share_it_and_it_starts_again_after_its_end(renderer):
    found = {}

    def work(number):
        messages = [{"role": "user", "content": str(number)}]
        found[number] = renderer.render(messages)

    for _ in range(2):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {n: f"<bos>[user]{n}[assistant]" for n in range(20)}
        found.clear()
        renderer.close()


def test_no_process_is_started_for_a_conversation(renderer):
    """A start takes longer than a hundred conversations."""
    renderer.render(CONVERSATIONS[0])
    first = renderer._process
    assert first is not None
    for _ in range(200):
        renderer.render(CONVERSATIONS[1])
    assert renderer._process is first


def test_a_tokenizer_without_a_template_is_told(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        ChatRenderer(tokenizer, KEY).render(CONVERSATIONS[0])


def test_the_limit_of_time_of_a_data_set_holds_for_all_prompts_together(tokenizer, monkeypatch):
    monkeypatch.setattr(chat_template, "CPU_S", 0.0)
    tokenizer.chat_template = (
        "{% for a in range(20) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    )
    with pytest.raises(ConfigError, match=r"takes more than 1 s .*killed by 24"):
        render_with(tokenizer, CONVERSATIONS[:1] * 100, KEY)
