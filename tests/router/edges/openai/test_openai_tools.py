"""Tool calls and reasoning in chats, with the official client as the judge of shapes."""

import json

import pytest

from sapwood.v1 import common_pb2, router_pb2
from sapwood_testing.router.fake_tokenizer import encode

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": False, "x": [1.0]}}]
CALLS = 'Let me see.<call weather>{"city": "Köln"}</call><call time>{}</call>'


async def streamed(cluster, **request) -> list:
    return [
        chunk
        async for chunk in await cluster.openai.chat.completions.create(
            model="fake", messages=HI, stream=True, **request
        )
    ]


async def test_an_answer_has_its_calls(cluster) -> None:
    cluster.answer_with(CALLS)
    answer = await cluster.openai.chat.completions.create(model="fake", messages=HI, tools=TOOLS)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert [(c.type, c.function.name, c.function.arguments) for c in choice.message.tool_calls] == [
        ("function", "weather", '{"city": "Köln"}'),
        ("function", "time", "{}"),
    ]
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert answer.usage.completion_tokens == len(encode(CALLS))
    cluster.answer_with("<call time>{}</call>")
    response = await cluster.http.post(CHAT, json={"messages": HI, "tools": TOOLS, "tool_choice": "auto"})
    message = response.json()["choices"][0]["message"]
    assert message["content"] is None
    assert "reasoning_content" not in message


async def test_a_stream_has_first_a_calls_id_and_name_then_its_arguments_in_pieces(cluster) -> None:
    cluster.answer_with(CALLS, delay=0.003)
    chunks = await streamed(cluster, tools=TOOLS)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["tool_calls"]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Let me see."
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    assert max(len(chunk.choices[0].delta.tool_calls or ()) for chunk in chunks) == 1
    for index, (name, arguments) in enumerate([("weather", '{"city": "Köln"}'), ("time", "{}")]):
        first, *rest = [part for part in parts if part.index == index]
        assert first.id
        assert (first.type, first.function.name, first.function.arguments) == ("function", name, "")
        assert all(part.id is None and part.type is None and part.function.name is None for part in rest)
        assert "".join(part.function.arguments for part in rest) == arguments
    assert len(parts) > 6
    async with cluster.openai.chat.completions.stream(model="fake", messages=HI, tools=TOOLS) as helper:
        final = (await helper.get_final_completion()).choices[0]
    assert [call.function.arguments for call in final.message.tool_calls] == ['{"city": "Köln"}', "{}"]
    assert final.finish_reason == "tool_calls"


async def test_calls_are_looked_for_only_where_tools_are_on_offer(cluster) -> None:
    cluster.answer_with(CALLS)
    for request in ({}, {"tools": []}, {"tools": None}, {"tools": TOOLS, "tool_choice": "none"}):
        response = await cluster.http.post(CHAT, json={"messages": HI, **request})
        choice = response.json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALLS, "stop"), request
        assert "tool_calls" not in choice["message"]
        assert cluster.tokenizer.chats[-1].tools == ""
        assert cluster.tokenizer.parsed[-1].tool_parser == ""
    await cluster.http.post(CHAT, json={"messages": HI, "tools": TOOLS})
    assert json.loads(cluster.tokenizer.chats[-1].tools) == TOOLS
    assert list(cluster.tokenizer.parsed[-1].tools) == [tool["function"]["name"] for tool in TOOLS]


async def test_variables_for_the_chat_template_reach_the_tokenizer(cluster) -> None:
    variables = {"enable_thinking": False, "greeting": "Grüße", "nested": {"a": [1, None]}}
    for given in (variables, {}, None):
        response = await cluster.http.post(CHAT, json={"messages": HI, "chat_template_kwargs": given})
        assert response.status_code == 200, response.text
        assert json.loads(cluster.tokenizer.chats[-1].template_variables or "null") == (given or None)
    await cluster.openai.chat.completions.create(
        model="fake", messages=HI, extra_body={"chat_template_kwargs": variables}
    )
    assert json.loads(cluster.tokenizer.chats[-1].template_variables) == variables
    for wrong in ([], "x", 5, {"messages": []}):
        response = await cluster.http.post(CHAT, json={"messages": HI, "chat_template_kwargs": wrong})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template_kwargs"), wrong
    response = await cluster.http.post("/v1/completions", json={"prompt": "a", "chat_template_kwargs": variables})
    assert response.headers["x-sapwood-ignored"] == "chat_template_kwargs", "completions have no template"


async def test_a_call_cut_short_by_the_limit_ends_with_length(cluster) -> None:
    cluster.answer_with(CALLS)
    answer = await cluster.openai.chat.completions.create(model="fake", messages=HI, tools=TOOLS, max_tokens=32)
    assert answer.choices[0].finish_reason == "length"
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.arguments == '{"city"'


async def test_one_call_at_most_where_parallel_ones_are_not_wanted(cluster) -> None:
    cluster.answer_with(CALLS)
    answer = await cluster.openai.chat.completions.create(
        model="fake", messages=HI, tools=TOOLS, parallel_tool_calls=False
    )
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["weather"]
    chunks = await streamed(cluster, tools=TOOLS, parallel_tool_calls=False)
    assert {part.index for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()} == {0}


async def test_the_ids_of_calls_differ_even_where_a_request_id_is_used_again(cluster) -> None:
    cluster.answer_with(CALLS)
    ids = [
        call.id
        for _ in range(2)
        for call in (
            await cluster.openai.chat.completions.create(
                model="fake", messages=HI, tools=TOOLS, extra_headers={"x-request-id": "same"}
            )
        )
        .choices[0]
        .message.tool_calls
    ]
    assert len(set(ids)) == 4
    assert cluster.tokenizer.parsed[-1].id_seed.startswith("same.")


@pytest.mark.parametrize("opened", [None, True])
async def test_reasoning_is_told_from_the_answer(cluster, opened) -> None:
    cluster.tokenizer.reasoning_open = opened
    thoughts = "hm … </thi> so"
    cluster.answer_with(f"{'' if opened else '<think>'}{thoughts}</think>Yes.", delay=0.003)
    answer = await cluster.openai.chat.completions.create(model="fake", messages=HI)
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content, message.tool_calls) == (thoughts, "Yes.", None)
    assert answer.choices[0].finish_reason == "stop"
    deltas = [chunk.choices[0].delta for chunk in await streamed(cluster)]
    reasoning = [delta.model_extra.get("reasoning_content") for delta in deltas]
    assert "".join(filter(None, reasoning)) == thoughts
    assert "".join(delta.content or "" for delta in deltas) == "Yes."
    assert len(list(filter(None, reasoning))) > 2
    assert cluster.tokenizer.parsed[-1].reasoning_open == opened


@pytest.mark.parametrize("extra", [{}, {"return_token_ids": True}, {"logprobs": True}])
async def test_reasoning_is_left_out_if_the_client_wants_none(cluster, extra) -> None:
    cluster.answer_with("<think>hm</think>Yes.", delay=0.001)
    body = {"messages": HI, "include_reasoning": False, **extra}
    answer = (await cluster.http.post(CHAT, json=body)).json()
    assert answer["choices"][0]["message"] == {"content": "Yes.", "role": "assistant", "refusal": None}
    assert answer["usage"]["completion_tokens"] == len(encode("<think>hm</think>Yes."))
    events = (await cluster.http.post(CHAT, json={**body, "stream": True})).text
    assert "reasoning" not in events
    chunks = [json.loads(line[6:]) for line in events.split("\n\n") if line.startswith("data: {")]
    (first, *others), last = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]], chunks[-1]["choices"][0]
    assert first == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in others) == "Yes."
    assert last["finish_reason"] == "stop"
    told = (await cluster.http.post(CHAT, json={**body, "include_reasoning": True})).json()
    assert told["choices"][0]["message"]["reasoning_content"] == "hm"


async def test_completions_are_not_parsed(cluster) -> None:
    text = "<think>a</think><call f>{}</call>"
    assert (await cluster.openai.completions.create(model="fake", prompt=text, max_tokens=99)).choices[0].text == text


async def test_a_conversation_with_calls_answers_and_reasoning_reaches_the_tokenizer(cluster) -> None:
    cluster.answer_with("<think>Again.</think>" + CALLS)
    first = (await cluster.openai.chat.completions.create(model="fake", messages=HI, tools=TOOLS)).choices[0].message
    messages = [
        *HI,
        first.model_dump(),
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "sun", "name": "weather"},
        {"role": "tool", "tool_call_id": first.tool_calls[1].id, "content": [{"type": "text", "text": "noon"}]},
        {"role": "assistant", "content": None, "tool_calls": [first.tool_calls[1].model_dump()]},
    ]
    await cluster.openai.chat.completions.create(model="fake", messages=messages, tools=TOOLS)
    _, assistant, weather, time, empty = cluster.tokenizer.chats[-1].messages
    ids = [call.id for call in first.tool_calls]
    assert assistant == common_pb2.ChatMessage(
        role="assistant",
        content="Let me see.",
        reasoning="Again.",
        tool_calls=[
            common_pb2.ToolCall(id=ids[0], name="weather", arguments='{"city": "Köln"}'),
            common_pb2.ToolCall(id=ids[1], name="time", arguments="{}"),
        ],
    )
    assert weather == common_pb2.ChatMessage(role="tool", content="sun", name="weather", tool_call_id=ids[0])
    assert time == common_pb2.ChatMessage(role="tool", content="noon", tool_call_id=ids[1])
    assert not empty.HasField("content")


def assistant(**fields) -> dict:
    return {"messages": [*HI, {"role": "assistant", "content": None, **fields}]}


def called(**fields) -> dict:
    function = {"name": "f", "arguments": "{}", **fields.pop("function", {})}
    return assistant(tool_calls=[{"id": "1", "type": "function", "function": function, **fields}])


def allowing(mode: str, *names: str) -> dict:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


FORCED = {"type": "function", "function": {"name": "weather"}}
WRONG = [
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": {}}, "tools"),
    ({"tools": [*TOOLS, {"type": "web_search"}]}, "tools[1].type"),
    ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "custom", "function": {"name": "weather"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "rain"}}}, "tool_choice.function.name"),
    ({"tools": TOOLS, "tool_choice": allowing("never", "weather")}, "tool_choice.allowed_tools.mode"),
    ({"tools": TOOLS, "tool_choice": allowing("auto", "rain")}, "tool_choice.allowed_tools.tools"),
    ({"tools": TOOLS, "tool_choice": allowing("auto")}, "tool_choice.allowed_tools.tools"),
    ({"tool_choice": allowing("auto", "weather")}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [], "tool_choice": FORCED}, "tool_choice"),
    (
        {"tools": [{"type": "function", "function": {"name": "bad"}}], "tool_choice": "required"},
        "tools[0].function.parameters",
    ),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    (called(type="custom"), "messages[1].tool_calls[0].type"),
    (called(function={"arguments": []}), "messages[1].tool_calls[0].function.arguments"),
    (called(function={"name": None}), "messages[1].tool_calls[0].function.name"),
    (called(id=None), "messages[1].tool_calls[0].id"),
    ({"messages": [{"role": "user", "content": "a", "reasoning_content": "b"}]}, "messages[0].reasoning_content"),
    ({"messages": [{**called()["messages"][1], "role": "user"}]}, "messages[0].tool_calls"),
    ({"messages": [*HI, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
    ({"messages": [*HI, {"role": "tool", "tool_call_id": "1"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
]


async def test_a_wrong_parameter_is_named(strict) -> None:
    for body, param in WRONG:
        response = await strict.http.post(CHAT, json={"messages": HI, **body})
        assert response.status_code == 400, (body, response.text)
        assert response.json()["error"]["param"] == param, body
    assert not strict.calls()


async def test_what_asks_for_nothing_is_taken(cluster) -> None:
    for neutral in (
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
        {"tools": None, "tool_choice": "auto", "parallel_tool_calls": False},
    ):
        assert (await cluster.http.post(CHAT, json={"messages": HI, **neutral})).status_code == 200


async def test_what_no_parser_finds_is_text(cluster) -> None:
    cluster.tokenizer.tool_parser = ""
    cluster.ask_tokenizer_again()
    text = "<call weather>{}</call>"
    cluster.answer_with(text)
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    for tools in (TOOLS, strict):
        answer = await cluster.openai.chat.completions.create(model="fake", messages=HI, tools=tools)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text, "stop")
        assert cluster.tokenizer.chats[-1].tools  # the template may show them all the same
    assert not cluster.tokenizer.grammars
    await cluster.openai.chat.completions.create(
        model="fake", messages=HI, tools=TOOLS, response_format={"type": "json_object"}
    )
    assert not cluster.tokenizer.grammars[-1].HasField("tool_calls")


async def test_a_tokenizer_that_comes_back_with_other_parsers_is_asked_again(cluster, wait_until) -> None:
    cluster.answer_with("<think>a</think>b")
    assert (await cluster.openai.chat.completions.create(model="fake", messages=HI)).choices[0].message.content == "b"
    await cluster.tokenizer.kill()
    cluster.tokenizer.reasoning_parser = ""
    await wait_until(lambda: cluster.router.problem() is not None)
    await cluster.tokenizer.start()
    answer = await cluster.openai.chat.completions.create(model="fake", messages=HI)
    assert answer.choices[0].message.content == "<think>a</think>b"


async def test_a_forced_call_has_a_grammar(cluster) -> None:
    cluster.answer_with("<call weather>{}</call>")
    for choice, name, parallel in (("required", "", True), (FORCED, "weather", False)):
        answer = await cluster.openai.chat.completions.create(
            model="fake", messages=HI, tools=TOOLS, tool_choice=choice
        )
        assert answer.choices[0].finish_reason == "tool_calls"
        asked = cluster.tokenizer.grammars[-1]
        assert not asked.HasField("grammar")
        assert json.loads(asked.tool_calls.tools) == TOOLS
        assert (asked.tool_calls.name, asked.tool_calls.required, asked.tool_calls.parallel) == (name, True, parallel)
        assert (asked.tool_calls.tool_parser, asked.reasoning_parser) == ("fake_calls", "fake_thoughts")
        name = f"compiled {len(cluster.tokenizer.grammars)}".encode()
        assert [call for call in cluster.calls() if call.request.grammar.compiled == name]
    await cluster.openai.chat.completions.create(
        model="fake", messages=HI, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    )
    assert not cluster.tokenizer.grammars[-1].tool_calls.parallel


async def test_a_call_can_be_forced_where_the_model_has_no_format_of_its_own(cluster) -> None:
    cluster.tokenizer.tool_parser = ""
    cluster.ask_tokenizer_again()
    cluster.answer_with("<call weather>{}</call>")
    answer = await cluster.openai.chat.completions.create(
        model="fake", messages=HI, tools=TOOLS, tool_choice="required"
    )
    assert cluster.tokenizer.grammars[-1].tool_calls.tool_parser == ""
    assert cluster.tokenizer.parsed[-1].tool_parser == "fake_calls"
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["weather"]


async def test_strict_tools_and_an_answers_format_are_enforced_together(cluster) -> None:
    cluster.answer_with("{}")
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    await cluster.openai.chat.completions.create(model="fake", messages=HI, tools=strict)
    asked = cluster.tokenizer.grammars[-1]
    assert (asked.tool_calls.required, asked.HasField("grammar")) == (False, False)
    await cluster.openai.chat.completions.create(
        model="fake", messages=HI, tools=TOOLS, response_format={"type": "json_object"}
    )
    asked = cluster.tokenizer.grammars[-1]
    assert asked.HasField("tool_calls")
    assert asked.grammar.json_schema == '{"type": "object"}'
    await cluster.openai.chat.completions.create(model="fake", messages=HI, tools=strict, tool_choice="none")
    assert len(cluster.tokenizer.grammars) == 2


async def test_only_the_allowed_tools_are_offered(cluster) -> None:
    rain = {"type": "function", "function": {"name": "rain"}}
    for mode in ("auto", "required"):
        body = {"messages": HI, "tools": [*TOOLS, rain], "tool_choice": allowing(mode, "rain")}
        assert (await cluster.http.post(CHAT, json=body)).status_code == 200
        assert json.loads(cluster.tokenizer.chats[-1].tools) == [rain]
    (asked,) = cluster.tokenizer.grammars
    assert (asked.tool_calls.required, json.loads(asked.tool_calls.tools)) == (True, [rain])


async def test_an_assistant_that_said_nothing_is_taken_back(cluster) -> None:
    for silent in (assistant(), assistant(content=None), assistant(tool_calls=[])):
        assert (await cluster.http.post(CHAT, json={"messages": HI, **silent})).status_code == 200


async def test_who_offers_tools_to_a_template_without_any_is_told(make_cluster) -> None:
    chat, claude = {"messages": HI, "tools": TOOLS}, {"name": "weather", "input_schema": PARAMETERS}
    messages = {"model": "fake", "messages": HI, "max_tokens": 8, "tools": [claude]}
    async with make_cluster(workers=1) as one:
        assert "x-sapwood-notice" not in (await one.http.post(CHAT, json=chat)).headers
    async with make_cluster(workers=1) as one:
        one.tokenizer.hides_tools = True
        one.ask_tokenizer_again()
        for path, body in ((CHAT, chat), ("/v1/messages", messages)):
            for stream in (False, True):
                answer = await one.http.post(path, json={**body, "stream": stream})
                assert "does not show tools" in answer.headers["x-sapwood-notice"], (path, stream)
                plain = {name: value for name, value in body.items() if name != "tools"}
                answer = await one.http.post(path, json={**plain, "stream": stream})
                assert answer.status_code == 200
                assert "x-sapwood-notice" not in answer.headers
        turns = router_pb2.ChatMessages(messages=[common_pb2.ChatMessage(role="user", content="hi")])
        call = one.stub.Generate(router_pb2.RouterGenerateRequest(messages=turns, tools=json.dumps(TOOLS)))
        async for _ in call:
            pass
        assert "does not show tools" in dict(await call.trailing_metadata())["x-sapwood-notice"]
