"""OpenAI's Responses API, with its own client as the judge of shapes."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import openai
import pytest
from pydantic import BaseModel

from sapwood.v1 import common_pb2
from sapwood_common.errors import InternalError
from sapwood_common.tenants.api_keys import hash_key, make_key
from sapwood_router.edges.openai.other_parameters import IGNORED
from sapwood_router.edges.responses.create import NEUTRAL
from sapwood_router.edges.responses.types import ResponsesRequest
from sapwood_testing.router.fake_tokenizer import encode

RESPONSES = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {"type": "function", "name": "weather", "description": "tells it", "parameters": SCHEMA, "strict": False},
    {"type": "function", "name": "time", "parameters": {}},
]
PROMPT = len(encode("<user>hi<assistant>"))
CALLS = 'Let me see.<call weather>{"city": "Köln"}</call><call time>{}</call>'


async def test_a_text_is_answered(cluster) -> None:
    answer = await cluster.openai.responses.create(
        model="fake", input="hi", instructions="Be kind.", metadata={"a": "b"}, temperature=0.5
    )
    text = "<system>Be kind.<user>hi<assistant>"
    assert (answer.object, answer.status, answer.model, answer.output_text) == ("response", "completed", "fake", text)
    assert (answer.metadata, answer.temperature, answer.instructions) == ({"a": "b"}, 0.5, "Be kind.")
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens) == (len(encode(text)), len(encode(text)))
    cut = await cluster.openai.responses.create(model="fake", input="hi", instructions="Be kind.", max_output_tokens=4)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (cut.output[0].status, cut.output_text) == ("incomplete", text[:4])


async def test_the_clients_stream_puts_reasoning_text_and_calls_together(cluster) -> None:
    cluster.answer_with("<think>hm … so</think>" + CALLS, delay=0.002)
    whole = await cluster.openai.responses.create(model="fake", input="hi", tools=TOOLS)
    async with cluster.openai.responses.stream(model="fake", input="hi", tools=TOOLS) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events if not event.type.endswith(".delta")]
    parts = ["response.content_part.done", "response.output_item.done"]
    opened = ["response.output_item.added", "response.content_part.added"]
    called = ["response.output_item.added", "response.function_call_arguments.done", "response.output_item.done"]
    assert kinds == [
        *("response.created", "response.in_progress"),
        *(*opened, "response.reasoning_text.done", *parts),
        *(*opened, "response.output_text.done", *parts),
        *(*called, *called, "response.completed"),
    ]
    assert len(events) - len(kinds) > 3
    for answer in (whole, final):
        reasoning, message, weather, time = answer.output
        assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "hm … so")
        assert (message.content[0].text, answer.output_text) == ("Let me see.", "Let me see.")
        assert [(call.name, call.arguments) for call in (weather, time)] == [
            ("weather", '{"city": "Köln"}'),
            ("time", "{}"),
        ]
        assert len({item.id for item in answer.output}) == 4
        assert {item.status for item in answer.output} == {"completed"}
    assert final.usage.output_tokens == whole.usage.output_tokens


async def test_a_conversation_of_items_reaches_the_tokenizer(cluster) -> None:
    cluster.answer_with("<think>Again.</think>" + CALLS)
    first = await cluster.openai.responses.create(model="fake", input="hi", tools=TOOLS)
    weather, time = first.output[2:]
    items = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        *(item.model_dump() for item in first.output),
        {"type": "function_call_output", "call_id": weather.call_id, "output": "sun"},
        {"type": "function_call_output", "call_id": time.call_id, "output": [{"type": "input_text", "text": "noon"}]},
    ]
    reasoning = {"effort": "none"}
    await cluster.openai.responses.create(
        model="fake", input=items, instructions="Always.", tools=TOOLS, reasoning=reasoning, text={"verbosity": "low"}
    )
    seen = cluster.tokenizer.chats[-1]
    system, user, assistant, one, other = seen.messages
    assert (system.content, user.content) == ("Always.\nBe kind.", "hi")
    assert assistant == common_pb2.ChatMessage(
        role="assistant",
        content="Let me see.",
        reasoning="Again.",
        tool_calls=[
            common_pb2.ToolCall(id=weather.call_id, name="weather", arguments='{"city": "Köln"}'),
            common_pb2.ToolCall(id=time.call_id, name="time", arguments="{}"),
        ],
    )
    assert one == common_pb2.ChatMessage(role="tool", content="sun", tool_call_id=weather.call_id)
    assert other.content == "noon"
    function = {"name": "weather", "description": "tells it", "parameters": SCHEMA, "strict": False}
    assert json.loads(seen.tools)[0] == {"type": "function", "function": function}
    variables = {"reasoning_effort": "none", "enable_thinking": False, "thinking": False, "verbosity": "low"}
    assert json.loads(seen.template_variables) == variables


async def test_a_response_is_kept_gone_on_from_and_forgotten(cluster) -> None:
    client = cluster.openai.responses
    cluster.answer_with("<think>hm</think>One.")
    first = await client.create(model="fake", input="hi", instructions="only here")
    assert first.store is True
    assert await client.retrieve(first.id) == first
    for stream in (False, True):
        second = await client.create(model="fake", input="more", previous_response_id=first.id, stream=stream)
        if stream:
            second = [event async for event in second][-1].response
        assert second.previous_response_id == first.id
        said = [(turn.role, turn.content) for turn in cluster.tokenizer.chats[-1].messages]
        assert said == [("user", "hi"), ("assistant", "One."), ("user", "more")]
        assert cluster.tokenizer.chats[-1].messages[1].reasoning == "hm"
        await client.create(model="fake", input="and", previous_response_id=second.id)
        assert len(cluster.tokenizer.chats[-1].messages) == 5
    await client.delete(first.id)
    for lost in (first.id, second.id, "resp_unknown"):
        with pytest.raises(openai.NotFoundError) as caught:
            await client.create(model="fake", input="x", previous_response_id=lost)
        assert caught.value.param == "previous_response_id"
    for call in (client.retrieve, client.delete):
        with pytest.raises(openai.NotFoundError):
            await call(first.id)
    unkept = await client.create(model="fake", input="hi", store=False)
    assert unkept.store is False
    with pytest.raises(openai.NotFoundError):
        await client.retrieve(unkept.id)


async def test_items_of_kept_answers_are_referred_to_by_their_ids(cluster) -> None:
    cluster.answer_with("<think>hm</think>" + CALLS)
    first = await cluster.openai.responses.create(model="fake", input="hi", tools=TOOLS)
    references = [{"type": "item_reference", "id": item.id} for item in first.output[:3]]
    output = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "sun"}
    items = [{"role": "user", "content": "hi"}, *references, output]
    await cluster.openai.responses.create(model="fake", input=items)
    _, assistant, result = cluster.tokenizer.chats[-1].messages
    assert (assistant.reasoning, assistant.content, result.content) == ("hm", "Let me see.", "sun")
    assert [call.name for call in assistant.tool_calls] == ["weather"]
    for unknown in (f"{first.output[0].id[:-4]}00ff", "msg_x", "msg_", "x", "rs_" + "0" * 36):
        with pytest.raises(openai.NotFoundError) as caught:
            await cluster.openai.responses.create(model="fake", input=[{"type": "item_reference", "id": unknown}])
        assert caught.value.param == "input[0].id"


async def test_a_response_is_its_tenants_alone(make_cluster, tmp_path) -> None:
    keys, path = {name: make_key() for name in ("alice", "bob")}, tmp_path / "keys"
    path.write_text("".join(f"{name} {hash_key(key)}\n" for name, key in keys.items()))
    async with make_cluster(1, api_keys=path) as cluster:
        alice, bob = (cluster.openai.with_options(api_key=keys[name]) for name in keys)
        answer = await alice.responses.create(model="fake", input="hi")
        assert (await alice.responses.retrieve(answer.id)).id == answer.id
        with pytest.raises(openai.NotFoundError):
            await bob.responses.retrieve(answer.id)
        with pytest.raises(openai.NotFoundError):
            await bob.responses.create(model="fake", input="hi", previous_response_id=answer.id)
        with pytest.raises(openai.AuthenticationError):
            await cluster.openai.responses.retrieve(answer.id)


async def test_none_is_kept_where_the_router_is_told_so(make_cluster) -> None:
    async with make_cluster(1, store="memory,responses=0") as cluster:
        answer = await cluster.openai.responses.create(model="fake", input="hi")
        assert answer.store is False
        with pytest.raises(openai.NotFoundError):
            await cluster.openai.responses.retrieve(answer.id)


class City(BaseModel):
    city: str


async def test_an_answer_is_parsed_as_its_schema_says(cluster) -> None:
    cluster.answer_with('{"city": "Köln"}')
    answer = await cluster.openai.responses.parse(model="fake", input="hi", text_format=City)
    assert answer.output_parsed == City(city="Köln")
    asked = json.loads(cluster.tokenizer.grammars[-1].grammar.json_schema)
    assert asked["required"] == ["city"]
    await cluster.openai.responses.create(model="fake", input="hi", text={"format": {"type": "json_object"}})
    assert cluster.tokenizer.grammars[-1].grammar.json_schema == '{"type": "object"}'


async def test_calls_can_be_forced_forbidden_and_kept_to_some(cluster) -> None:
    cluster.answer_with(CALLS)

    async def ask(choice, **more):
        return await cluster.openai.responses.create(model="fake", input="hi", tools=TOOLS, tool_choice=choice, **more)

    for choice, name in (("required", ""), ({"type": "function", "name": "time"}, "time")):
        await ask(choice)
        asked = cluster.tokenizer.grammars[-1].tool_calls
        assert (asked.required, asked.name) == (True, name)
    await ask({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]})
    assert [tool["function"]["name"] for tool in json.loads(cluster.tokenizer.chats[-1].tools)] == ["time"]
    assert (await ask("none")).output_text == CALLS
    one = await ask("auto", parallel_tool_calls=False)
    assert [item.name for item in one.output if item.type == "function_call"] == ["weather"]


def choosing(*names: str, mode: str = "auto") -> dict:
    tools = [{"type": "function", "name": name} for name in names]
    return {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": mode, "tools": tools}}


def formed(**form) -> dict:
    return {"text": {"format": form}}


CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
WRONG = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
    ({"input": [{"role": "assistant", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"role": "user", "content": "a"}, {"role": "system", "content": "late"}]}, "input[1].role"),
    ({"input": [{"type": "item_reference"}]}, "input[0].id"),
    ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0].type"),
    ({"input": [{**CALL, "arguments": 5}]}, "input[0].arguments"),
    ({"input": [{**CALL, "name": None}]}, "input[0].name"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "bad"}], "tool_choice": "required"}, "tools[0].parameters"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "rain"}}, "tool_choice.name"),
    (choosing("rain"), "tool_choice.tools"),
    (choosing(), "tool_choice"),
    (formed(type="json_schema", schema={}), "text.format.name"),
    (formed(type="json_schema", name="x"), "text.format.schema"),
    (formed(type="json_schema", name="x", schema={"bad": 1}), "text.format.schema"),
    (formed(type="grammar"), "text.format.type"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": 1}}, "stream_options.include_obfuscation"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"metadata": {"a": "b" * 513}}, "metadata"),
    ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
    ({"inputs": "x"}, "inputs"),
    *(({name: "wanted"}, name) for name in NEUTRAL),
]


async def test_a_wrong_parameter_is_named(strict) -> None:
    for body, param in WRONG:
        answer = await strict.http.post(RESPONSES, json={"model": "fake", "input": "hi", **body})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (body, answer.text)
    metadata = {"input": "hi", "metadata": {"a": "b", "c": 1, "d": []}}
    assert (await strict.http.post(RESPONSES, json=metadata)).json()["error"]["message"].endswith("at 'c', 'd'")
    assert not strict.calls()
    neutral = {name: values[0] for name, values in NEUTRAL.items() if values}
    ignored = dict.fromkeys(IGNORED - {"metadata", "store"}, "x")
    body = {"input": "hi", **dict.fromkeys(NEUTRAL), **neutral, **ignored, "max_tool_calls": 3}
    assert (await strict.http.post(RESPONSES, json=body)).status_code == 200


async def test_no_value_of_any_parameter_is_the_servers_fault(cluster) -> None:
    junk = [{"x": 1}, [[]], 1.5, "\ud800", -1, 2**70, True, [{"type": "x"}]]
    for name in (*ResponsesRequest.__struct_fields__, "temperature"):
        for value in junk:
            body = json.dumps({"input": "hi", "max_output_tokens": 1, name: value})
            answer = await cluster.http.post(RESPONSES, content=body)
            assert answer.status_code in (200, 400, 404), (body, answer.text)
    await cluster.idle()


async def test_a_stream_that_fails_ends_with_a_failed_response(cluster) -> None:
    cluster.answer_with("abcdefgh", goes_on_after=PROMPT, fail_after=1, error=InternalError("it broke"))
    stream = await cluster.openai.responses.create(model="fake", input="hi", stream=True)
    *events, last = [event async for event in stream]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text and "abcdefgh".startswith(text)
    assert (last.type, last.response.status, last.sequence_number) == ("response.failed", "failed", len(events))
    assert (last.response.error.code, last.response.error.message) == ("server_error", "it broke")
    await cluster.idle()
    with pytest.raises(openai.NotFoundError):
        await cluster.openai.responses.retrieve(last.response.id)


async def test_a_client_that_leaves_and_a_deadline_end_the_request(cluster) -> None:
    cluster.answer_with("abcdef", gate=asyncio.Event(), gate_after=1)
    stream = await cluster.openai.responses.create(model="fake", input="hi", stream=True)
    assert (await anext(aiter(stream))).type == "response.created"
    await stream.close()
    await cluster.idle()
    assert [call.outcome for call in cluster.calls()] == ["cancelled"]
    late = await cluster.http.post(RESPONSES, json={"input": "hi"}, headers={"x-request-timeout": "0.05"})
    assert late.status_code == 504
    await cluster.idle()


async def test_a_lost_worker_costs_a_stream_nothing_but_a_pause(cluster) -> None:
    gate = asyncio.Event()
    cluster.answer_with("abcdef", goes_on_after=PROMPT, gate=gate, gate_after=2)
    events = aiter(await cluster.openai.responses.create(model="fake", input="hi", stream=True))
    first = await anext(events)
    (worker,) = [worker for worker in cluster.workers if worker.calls]
    await worker.kill()
    gate.set()
    rest = [event async for event in events]
    assert (first.type, rest[-1].type, rest[-1].response.output_text) == (
        "response.created",
        "response.completed",
        "abcdef",
    )


def test_the_documentation_names_what_is_not_served() -> None:
    text = (Path(__file__).parents[4] / "docs" / "clients.md").read_text()
    (row,) = re.findall(r"^\| the same: responses \|(.*)\|$", text, re.M)
    assert {*re.findall(r"`(\w+)`", row)} == {*NEUTRAL}
