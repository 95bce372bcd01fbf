"""Templates that never end, or grow, are ended; others are answered meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from tokenizers import Tokenizer

from sapwood.v1 import tokenizer_pb2
from sapwood_common.errors import ConfigError, InvalidArgumentError, ResourceExhaustedError
from sapwood_testing.hostile_templates import HOSTILE, switched
from sapwood_tokenizer.serve.renderer import Renderer, start_renderer
from sapwood_tokenizer.vocab.loader import LoadedTokenizer

Start = Callable[..., Awaitable[Renderer]]


@pytest.fixture
async def start(byte_level: Tokenizer) -> AsyncIterator[Start]:
    made: list[Renderer] = []

    async def start_(template: str, timeout: float = 60.0, **more: object) -> Renderer:
        loaded = LoadedTokenizer(byte_level, "origin", 300, None, (), frozenset(), template, "x.jinja", {})
        renderer = await start_renderer(loaded, timeout)
        assert renderer is not None
        made.append(renderer)
        return renderer

    yield start_
    for renderer in made:
        await renderer.close()


def chat(*texts: str, salt: str = "", variables: str = "") -> tokenizer_pb2.ApplyChatTemplateRequest:
    messages = [{"role": "user", "content": text} for text in texts or ("x",)]
    return tokenizer_pb2.ApplyChatTemplateRequest(messages=messages, cache_salt=salt, template_variables=variables)


async def test_every_hostile_template_is_ended_and_others_are_answered_meanwhile(start: Start) -> None:
    renderer = await start(switched(), timeout=3.0)

    async def hostile(name: str) -> None:
        request = chat(salt="alice", variables=f'{{"what": "{name}"}}')
        with pytest.raises((InvalidArgumentError, ResourceExhaustedError)) as caught:
            await renderer.render(request, prompted=True)
        if isinstance(caught.value, InvalidArgumentError):
            assert caught.value.field == "messages", name
            assert "stopped" in caught.value.message or "refuses" in caught.value.message, (name, caught.value)

    for names in (list(HOSTILE)[:8], list(HOSTILE)[8:24], list(HOSTILE)[24:]):
        flood = [asyncio.create_task(hostile(name)) for name in names]
        for number in range(3):
            text = await renderer.render(chat(f"other {number}", salt="bob"), prompted=True)
            assert text == f"other {number}"
        await asyncio.gather(*flood)


@pytest.mark.parametrize("name", ["tojson", "equality", "width", "power", "macros"])
async def test_a_template_that_only_does_a_hostile_thing_is_started_and_ended(start: Start, name: str) -> None:
    renderer = await start(HOSTILE[name], timeout=0.5)
    with pytest.raises(InvalidArgumentError, match="stopped") as caught:
        await renderer.render(chat(), prompted=True)
    assert caught.value.field == "messages"


async def test_the_reason_is_time_or_memory_or_length(start: Start) -> None:
    renderer = await start(switched(), timeout=5.0)
    for name, reason in (("loops", r"within 5 s"), ("width", "memory"), ("long text", "too long")):
        with pytest.raises(InvalidArgumentError, match=reason):
            await renderer.render(chat(variables=f'{{"what": "{name}"}}'), prompted=True)
    assert await renderer.render(chat("fine"), prompted=True) == "fine"


async def test_a_rendering_that_nobody_waits_for_costs_no_process(start: Start) -> None:
    renderer = await start("{{ messages[0].content }}")
    for _ in range(20):
        task = asyncio.create_task(renderer.render(chat("gone"), prompted=True))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        assert await renderer.render(chat("here"), prompted=True) == "here"
    endless = await start("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
    task = asyncio.create_task(endless.render(chat(), prompted=True))
    await asyncio.sleep(0.1)
    task.cancel()
    while endless._pool._busy:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("source", ["ok\n{% endfor %}", "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}"])
async def test_a_template_that_cannot_be_compiled_is_named_at_the_start(start: Start, source: str) -> None:
    with pytest.raises(ConfigError, match=r"x\.jinja"):
        await start(source)


async def test_what_a_request_says_reaches_the_template(start: Start) -> None:
    source = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}:{{ m.reasoning }}{{ m.reasoning_content }}{{ m.thinking }};"
        "{% endfor %}{{ enable_thinking }}{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{{ add_generation_prompt }}"
    )
    renderer = await start(source)
    assert renderer.variables == ["enable_thinking"]
    assert renderer.shows_tools
    request = tokenizer_pb2.ApplyChatTemplateRequest(
        messages=[
            {"role": "user", "content": "one\ntwo", "parts": ["one", "two"]},
            {"role": "assistant", "reasoning": "r", "tool_calls": [{"id": "1", "name": "f", "arguments": "{}"}]},
        ],
        tools='[{"type": "function", "function": {"name": "g"}}]',
        template_variables='{"enable_thinking": false}',
    )
    assert await renderer.render(request, prompted=False) == "user:one\ntwo:;assistant::rrr;FalsegFalse"
    request.messages[1].tool_calls[0].arguments = "["
    with pytest.raises(InvalidArgumentError) as caught:
        await renderer.render(request, prompted=False)
    assert caught.value.field == "messages[1].tool_calls[0].arguments"
    with pytest.raises(InvalidArgumentError) as caught:
        await renderer.render(chat(variables="["), prompted=False)
    assert caught.value.field == "template_variables"
