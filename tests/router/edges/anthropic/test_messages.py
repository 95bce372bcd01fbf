"""Anthropic's API, with its own client as the judge of shapes."""

from __future__ import annotations

import asyncio
import json

import anthropic
import msgspec
import pytest

from sapwood.v1 import common_pb2
from sapwood_common.errors import InternalError
from sapwood_common.tenants.api_keys import hash_key, make_key
from sapwood_net.pacing.steps import all_at_once
from sapwood_router.edges.anthropic.conversation import prompt_of
from sapwood_router.edges.anthropic.messages import IGNORED, NEUTRAL
from sapwood_router.edges.anthropic.types import MessagesRequest
from sapwood_router.edges.http.left_out import LeftOut, LeftOutLog
from sapwood_testing.router.fake_tokenizer import encode

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"name": "weather", "description": "tells it", "input_schema": SCHEMA}, {"name": "time", "input_schema": {}}]
PROMPT = len(encode("<user>hi<assistant>"))
CALLS = 'Let me see.<call weather>{"city": "Köln"}</call> <call time>{}</call>'


@pytest.fixture
async def client(cluster):
    async with make_client(cluster) as made:
        yield made


def make_client(cluster, **settings) -> anthropic.AsyncAnthropic:
    http = anthropic.DefaultAsyncHttpxClient(trust_env=False)
    settings = {"api_key": "none", "max_retries": 0, "timeout": 120, **settings}
    return anthropic.AsyncAnthropic(base_url=cluster.url, http_client=http, **settings)


async def test_a_message_is_answered(cluster, client) -> None:
    answer = await client.messages.create(model="fake", max_tokens=99, messages=HI, system="Be kind.")
    assert (answer.type, answer.role, answer.model, answer.stop_reason) == ("message", "assistant", "fake", "end_turn")
    assert [(block.type, block.text) for block in answer.content] == [("text", "<system>Be kind.<user>hi<assistant>")]
    prompt = len(encode("<system>Be kind.<user>hi<assistant>"))
    usage = answer.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (prompt, 0, prompt)
    again = await client.messages.with_raw_response.create(model="fake", max_tokens=5, messages=HI, system="Be kind.")
    cut = await again.parse()
    assert (cut.stop_reason, cut.usage.output_tokens, cut.id) == ("max_tokens", 5, f"msg_{again.request_id}")
    assert again.headers["x-sapwood-worker"]


async def test_a_stop_sequence_is_named_and_settings_reach_the_worker(cluster, client) -> None:
    cluster.answer_with("one, two, three")
    settings = {"temperature": 0.5, "top_p": 0.25, "top_k": 3, "seed": 7}
    answer = await client.messages.create(
        model="fake", max_tokens=50, messages=HI, stop_sequences=["zz", "two"], extra_body=settings
    )
    assert (answer.stop_reason, answer.stop_sequence, answer.content[0].text) == ("stop_sequence", "two", "one, ")
    (call,) = cluster.calls()
    sampling = call.request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.25, 3, 7)
    assert sampling.max_tokens == 50


async def test_a_stream_has_anthropics_events(cluster) -> None:
    cluster.answer_with("<think>hm</think>Yes.", delay=0.002)
    answer = await cluster.http.post(MESSAGES, json={"model": "fake", "max_tokens": 99, "messages": HI, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    named = [event.split("\n", 1) for event in answer.text.split("\n\n") if event]
    events = [json.loads(data.removeprefix("data: ")) for _, data in named]
    assert [name.removeprefix("event: ") for name, _ in named] == [event["type"] for event in events]
    order = [event["type"] for event in events if event["type"] != "content_block_delta"]
    block = ["content_block_start", "content_block_stop"]
    assert order == ["message_start", "ping", *block, *block, "message_delta", "message_stop"]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert start["usage"]["input_tokens"] == len(encode("<user>hi<assistant>"))
    assert {event["index"] for event in events if "index" in event} == {0, 1}
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


async def test_the_clients_stream_puts_thoughts_text_and_calls_together(cluster, client) -> None:
    cluster.answer_with("<think>hm … so</think>" + CALLS, delay=0.002)
    whole = await client.messages.create(model="fake", max_tokens=999, messages=HI, tools=TOOLS)
    async with client.messages.stream(model="fake", max_tokens=999, messages=HI, tools=TOOLS) as stream:
        deltas = [event async for event in stream if event.type == "content_block_delta"]
        final = await stream.get_final_message()
    assert len(deltas) > 3
    for answer in (whole, final):
        assert answer.stop_reason == "tool_use"
        assert answer.content[0].type == "thinking" and answer.content[0].thinking == "hm … so"
        assert answer.content[0].signature
        assert "".join(block.text for block in answer.content if block.type == "text") == "Let me see. "
        calls = [block for block in answer.content if block.type == "tool_use"]
        assert [(call.name, call.input) for call in calls] == [("weather", {"city": "Köln"}), ("time", {})]
        assert len({call.id for call in calls}) == 2
    assert final.usage.output_tokens == whole.usage.output_tokens


async def test_a_conversation_with_calls_and_results_reaches_the_tokenizer(cluster, client) -> None:
    cluster.answer_with("<think>Again.</think>" + CALLS)
    first = await client.messages.create(model="fake", max_tokens=99, messages=HI, tools=TOOLS)
    first, (weather, time) = first.content, [block for block in first.content if block.type == "tool_use"]
    messages = [
        *HI,
        {"role": "user", "content": [{"type": "text", "text": "there", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [block.model_dump() for block in first]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": weather.id, "content": "sun"},
                {"type": "tool_result", "tool_use_id": time.id, "content": [{"type": "text", "text": "noon"}]},
                {"type": "text", "text": "And?"},
            ],
        },
        {"role": "assistant", "content": "It is"},
    ]
    await client.messages.create(
        model="fake", max_tokens=9, messages=messages, tools=TOOLS, thinking={"type": "disabled"}
    )
    seen = cluster.tokenizer.chats[-1]
    user, assistant, one, other, more, last = seen.messages
    assert (user.content, more.content, last.content) == ("hi\nthere", "And?", "It is")
    assert seen.continue_final_message
    assert (assistant.content, assistant.reasoning) == ("Let me see. ", "Again.")
    assert [(call.id, call.name, json.loads(call.arguments)) for call in assistant.tool_calls] == [
        (weather.id, "weather", {"city": "Köln"}),
        (time.id, "time", {}),
    ]
    assert one == common_pb2.ChatMessage(role="tool", content="sun", name="weather", tool_call_id=weather.id)
    assert (other.content, other.name) == ("noon", "time")
    assert json.loads(seen.tools)[0]["function"] == {"name": "weather", "description": "tells it", "parameters": SCHEMA}
    assert json.loads(seen.template_variables) == {"enable_thinking": False, "thinking": False}


def test_thousands_of_texts_are_one_turn() -> None:
    """Each put behind what came before would take a minute: 130 GB would be copied."""
    texts = [f"{number:4}" + "a" * 900 for number in range(16_000)]
    said = [{"role": "user", "content": [{"type": "text", "text": text} for text in texts]}]
    answered = [
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    asked = {"model": "fake", "max_tokens": 1, "messages": said + answered}
    prompt, paths = all_at_once(prompt_of(msgspec.convert(asked, MessagesRequest), LeftOut(LeftOutLog())))
    assert [turn.content for turn in prompt.turns] == ["\n".join(texts), "b", "c\nd"]
    assert paths == ("messages[0]", "messages[1]", "messages[2]")


async def test_calls_can_be_forced_forbidden_and_kept_to_one(cluster, client) -> None:
    cluster.answer_with(CALLS)

    async def ask(**choice):
        return await client.messages.create(model="fake", max_tokens=99, messages=HI, tools=TOOLS, tool_choice=choice)

    for choice, name in (({"type": "any"}, ""), ({"type": "tool", "name": "time"}, "time")):
        await ask(**choice)
        asked = cluster.tokenizer.grammars[-1].tool_calls
        assert (asked.required, asked.name) == (True, name)
    assert (await ask(type="none")).content[0].text == CALLS
    assert cluster.tokenizer.chats[-1].tools == ""
    one = await ask(type="auto", disable_parallel_tool_use=True)
    assert [block.name for block in one.content if block.type == "tool_use"] == ["weather"]


async def test_a_schema_is_enforced(cluster, client) -> None:
    config = {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}
    await client.messages.create(model="fake", max_tokens=9, messages=HI, output_config=config)
    assert json.loads(cluster.tokenizer.grammars[-1].grammar.json_schema) == SCHEMA
    assert json.loads(cluster.tokenizer.chats[-1].template_variables) == {"reasoning_effort": "low"}


async def test_tokens_are_counted_without_a_worker(cluster, client) -> None:
    found = await client.messages.count_tokens(model="fake", messages=HI, system=[{"type": "text", "text": "S"}])
    assert found.input_tokens == len(encode("<system>S<user>hi<assistant>"))
    assert not cluster.calls()


async def test_models_are_listed_as_the_client_reads_them(cluster, client) -> None:
    models = [model async for model in client.models.list()]
    assert [(model.id, model.type, model.display_name, model.max_input_tokens) for model in models] == [
        ("fake", "model", "fake", 100_000)
    ]
    found = await client.models.retrieve("fake")
    assert (found.created_at, found.lifecycle) == (models[0].created_at, "active")
    with pytest.raises(anthropic.NotFoundError):
        await client.models.retrieve("claude")


def said(*content: dict, role: str = "user") -> dict:
    return {"messages": [*HI, {"role": role, "content": list(content)}]}


WRONG = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [*HI, {"role": "system", "content": "late"}], "system": "early"}, "messages[1].role"),
    (said({"type": "image"}), "messages[1].content[0].source"),
    (said({"type": "image", "source": {"type": "file", "file_id": "x"}}), "messages[1].content[0].source"),
    (said({"type": "image", "source": {"type": "url"}}), "messages[1].content[0].source.url"),
    (said({"type": "image", "source": {"type": "base64", "data": "?"}}), "messages[1].content[0].source.data"),
    (said({"type": "text"}), "messages[1].content[0].text"),
    (said({"type": "tool_result", "content": "x"}), "messages[1].content[0].tool_use_id"),
    (said({"type": "tool_use", "id": "1", "input": {}}, role="assistant"), "messages[1].content[0].name"),
    (said({"type": "tool_use", "id": "1", "name": "f", "input": []}, role="assistant"), "messages[1].content[0].input"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "bad", "input_schema": {}}], "tool_choice": {"type": "any"}}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "rain"}}, "tool_choice.name"),
    ({"temperature": -1}, "temperature"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"bad": 1}}}}, "output_config.format.schema"),
    ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
    ({"max_token": 1}, "max_token"),
    *(({name: "wanted"}, name) for name in NEUTRAL),
]


async def test_a_wrong_parameter_is_named_in_anthropics_way(strict) -> None:
    for body, field in WRONG:
        answer = await strict.http.post(MESSAGES, json={"model": "fake", "max_tokens": 9, "messages": HI, **body})
        told = answer.json()
        assert (answer.status_code, told["type"], told["error"]["type"]) == (400, "error", "invalid_request_error"), (
            body
        )
        assert field in told["error"]["message"], (body, told)
        assert told["request_id"] == answer.headers["request-id"]
    assert not strict.calls()
    neutral = {name: values[0] for name, values in NEUTRAL.items() if values}
    body = {"max_tokens": 1, "messages": HI, **dict.fromkeys(NEUTRAL), **neutral, **dict.fromkeys(IGNORED, "x")}
    assert (await strict.http.post(MESSAGES, json=body)).status_code == 200


async def test_no_value_of_any_parameter_is_the_servers_fault(cluster) -> None:
    junk = [{"x": 1}, [[]], 1.5, "\ud800", -1, 2**70, True, [{"type": "x"}]]
    for name in (*MessagesRequest.__struct_fields__, "temperature"):
        for value in junk:
            body = json.dumps({"max_tokens": 1, "messages": HI, name: value})
            answer = await cluster.http.post(COUNT if value == 1.5 else MESSAGES, content=body)
            assert answer.status_code in (200, 400, 404), (body, answer.text)
    await cluster.idle()


async def test_errors_have_the_clients_classes(cluster, client, wait_until) -> None:
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(model="claude", max_tokens=9, messages=HI)
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.count_tokens(model="claude", messages=HI)
    for worker in cluster.workers:
        await worker.kill()
    await wait_until(lambda: cluster.router.problem() is not None)
    with pytest.raises(anthropic.OverloadedError) as caught:
        await client.messages.create(model="fake", max_tokens=9, messages=HI)
    assert caught.value.response.headers["retry-after"]


async def test_a_key_comes_in_either_header(make_cluster, tmp_path) -> None:
    key, keys = make_key(), tmp_path / "keys"
    keys.write_text(f"alice {hash_key(key)}\n")
    async with make_cluster(1, api_keys=keys) as cluster:
        for settings in ({"api_key": key}, {"auth_token": key, "api_key": None}):
            async with make_client(cluster, **settings) as client:
                await client.messages.create(model="fake", max_tokens=1, messages=HI)
        async with make_client(cluster, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(model="fake", max_tokens=1, messages=HI)


async def test_a_stream_that_fails_ends_with_an_error_event(cluster, client) -> None:
    cluster.answer_with("abcdefgh", goes_on_after=PROMPT, fail_after=1, error=InternalError("it broke"))
    text = ""
    with pytest.raises(anthropic.APIStatusError, match="it broke"):
        async for event in await client.messages.create(model="fake", max_tokens=9, messages=HI, stream=True):
            if event.type == "content_block_delta":
                text += event.delta.text
    assert "abcdefgh".startswith(text)
    await cluster.idle()


async def test_a_client_that_leaves_and_a_deadline_end_the_request(cluster, client) -> None:
    gate = asyncio.Event()
    cluster.answer_with("abcdef", gate=gate, gate_after=1)
    stream = await client.messages.create(model="fake", max_tokens=9, messages=HI, stream=True)
    assert (await anext(aiter(stream))).type == "message_start"
    await stream.close()
    await cluster.idle()
    assert [call.outcome for call in cluster.calls()] == ["cancelled"]
    late = await cluster.http.post(
        MESSAGES, json={"max_tokens": 9, "messages": HI}, headers={"x-request-timeout": "0.05"}
    )
    assert (late.status_code, late.json()["error"]["type"]) == (504, "timeout_error")
    await cluster.idle()


async def test_a_lost_worker_costs_a_stream_nothing_but_a_pause(cluster, client) -> None:
    gate = asyncio.Event()
    cluster.answer_with("abcdef", goes_on_after=PROMPT, gate=gate, gate_after=2)
    stream = await client.messages.create(model="fake", max_tokens=9, messages=HI, stream=True)
    events = aiter(stream)
    first = await anext(events)
    (worker,) = [worker for worker in cluster.workers if worker.calls]
    await worker.kill()
    gate.set()
    rest = [event async for event in events]
    text = "".join(event.delta.text for event in rest if event.type == "content_block_delta")
    assert (first.type, text, rest[-1].type) == ("message_start", "abcdef", "message_stop")
