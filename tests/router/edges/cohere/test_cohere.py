"""Cohere's API: by its official client where that is installed, and event by event."""

import json

import pytest

CHAT, EMBED, RERANK = "/v2/chat", "/v2/embed", "/v2/rerank"
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}}]
CALLS = '<think>Hm.</think>See: <call weather>{"city": "Rome"}</call><call weather>{"city": "Oslo"}</call>'


@pytest.fixture
async def cluster(make_cluster):
    async with make_cluster(workers=1) as running:
        yield running


@pytest.fixture
async def client(cluster):
    cohere = pytest.importorskip("cohere")
    async with cohere.AsyncClientV2(api_key="none", base_url=cluster.url) as made:
        yield made


async def post(cluster, path: str, **body) -> dict:
    answer = await cluster.http.post(path, json={"model": "fake", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_chat_is_answered(cluster) -> None:
    answer = await post(cluster, CHAT, messages=HI)
    assert answer["message"] == {"role": "assistant", "content": [{"type": "text", "text": "<user>hi<assistant>"}]}
    counts = {"input_tokens": 20, "output_tokens": 20}
    assert (answer["finish_reason"], answer["usage"]["tokens"], answer["usage"]["billed_units"]) == (
        "COMPLETE",
        counts,
        counts,
    )


async def test_the_official_client_chats_whole_and_streamed(client, cluster) -> None:
    answer = await client.chat(model="fake", messages=HI)
    assert (answer.message.content[0].text, answer.finish_reason) == ("<user>hi<assistant>", "COMPLETE")
    events = [event async for event in client.chat_stream(model="fake", messages=HI)]
    assert [event.type for event in events][:2] == ["message-start", "content-start"]
    assert [event.type for event in events][-2:] == ["content-end", "message-end"]
    said = "".join(event.delta.message.content.text for event in events if event.type == "content-delta")
    assert said == "<user>hi<assistant>"
    assert (events[-1].delta.finish_reason, events[-1].delta.usage.tokens.output_tokens) == ("COMPLETE", 20)


async def test_the_official_client_calls_tools_and_goes_on(client, cluster) -> None:
    cluster.answer_with(CALLS)
    answer = await client.chat(model="fake", messages=HI, tools=TOOLS)
    assert answer.finish_reason == "TOOL_CALL"
    assert [(call.function.name, json.loads(call.function.arguments)) for call in answer.message.tool_calls] == [
        ("weather", {"city": "Rome"}),
        ("weather", {"city": "Oslo"}),
    ]
    assert [(part.type, getattr(part, part.type)) for part in answer.message.content] == [
        ("thinking", "Hm."),
        ("text", "See: "),
    ]
    calls: dict[int, str] = {}
    kinds = []
    async for event in client.chat_stream(model="fake", messages=HI, tools=TOOLS):
        kinds.append(event.type)
        if event.type == "tool-call-start":
            calls[event.index] = event.delta.message.tool_calls.function.arguments
        elif event.type == "tool-call-delta":
            calls[event.index] += event.delta.message.tool_calls.function.arguments
    assert [json.loads(arguments) for arguments in calls.values()] == [{"city": "Rome"}, {"city": "Oslo"}]
    assert kinds.count("content-start") == kinds.count("content-end") == kinds.count("tool-call-end") == 2
    said = {
        "role": "assistant",
        "tool_plan": "Hm.",
        "tool_calls": [call.model_dump() for call in answer.message.tool_calls],
    }
    results = [
        {
            "role": "tool",
            "tool_call_id": call.id,
            "content": [{"type": "document", "document": {"data": "sun"}}],
        }
        for call in answer.message.tool_calls
    ]
    cluster.answer_with("Sunny.")
    last = await client.chat(model="fake", messages=[*HI, said, *results], tools=TOOLS)
    assert last.message.content[0].text == "Sunny."
    _, assistant, first, _ = cluster.tokenizer.chats[-1].messages
    assert (assistant.reasoning, first.content) == ("Hm.", "sun")
    assert first.tool_call_id == assistant.tool_calls[0].id


async def test_parameters_reach_worker_and_tokenizer(cluster) -> None:
    settings = {"k": 7, "p": 0.5, "seed": 3, "max_tokens": 5, "temperature": 0.5, "stop_sequences": ["X"]}
    answer = await post(cluster, CHAT, messages=HI, **settings, safety_mode="OFF", thinking={"type": "disabled"})
    assert answer["finish_reason"] == "MAX_TOKENS"
    sampling = cluster.calls()[-1].request.sampling
    assert (sampling.top_k, sampling.top_p, sampling.seed, sampling.max_tokens) == (7, 0.5, 3, 5)
    assert json.loads(cluster.tokenizer.chats[-1].template_variables) == {"enable_thinking": False, "thinking": False}
    answer = await post(cluster, CHAT, messages=HI, stop_sequences=["hi"])
    assert (answer["finish_reason"], answer["message"]["content"][0]["text"]) == ("STOP_SEQUENCE", "<user>")
    for form in ({"json_schema": SCHEMA}, {"schema": SCHEMA}):
        await post(cluster, CHAT, messages=HI, response_format={"type": "json_object", **form})
        assert json.loads(cluster.tokenizer.grammars[-1].grammar.json_schema) == SCHEMA
    await post(cluster, CHAT, messages=HI, tools=TOOLS, tool_choice="REQUIRED", strict_tools=True)
    assert cluster.tokenizer.grammars[-1].tool_calls.required
    assert json.loads(cluster.tokenizer.chats[-1].tools)[0]["function"]["strict"] is True
    await post(cluster, CHAT, messages=HI, tools=TOOLS, tool_choice="NONE")
    assert cluster.tokenizer.chats[-1].tools == ""


async def test_texts_are_embedded(client, cluster) -> None:
    answer = await client.embed(
        model="fake", texts=["ab", "abc"], input_type="search_query", embedding_types=["float", "base64"]
    )
    assert [vector[0] for vector in answer.embeddings.float_] == [3, 4]
    assert len(answer.embeddings.base64) == 2
    assert (answer.texts, answer.meta.billed_units.input_tokens) == (["ab", "abc"], 7)
    inputs = [{"content": [{"type": "text", "text": "ab"}]}]
    assert (await post(cluster, EMBED, inputs=inputs))["embeddings"]["float"] == [answer.embeddings.float_[0]]


async def test_documents_are_ranked(client) -> None:
    answer = await client.rerank(model="fake", query="ab", documents=["xyz", "ab"], top_n=1)
    assert [result.index for result in answer.results] in ([0], [1])


WRONG = [
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    (CHAT, {"messages": HI, "p": 2}, "p"),
    (CHAT, {"messages": HI, "k": -5}, "k"),
    (CHAT, {"messages": HI, "stop_sequences": [""]}, "stop_sequences"),
    (CHAT, {"messages": HI, "documents": ["x"]}, "documents"),
    (CHAT, {"messages": HI, "tool_choice": "REQUIRED"}, "tool_choice"),
    (CHAT, {"messages": HI, "response_format": {"type": "json_object", "json_schema": {"bad": 1}}}, "response_format"),
    (CHAT, {"messages": [], "max_tokens": 0}, "max_tokens"),
    (EMBED, {}, "texts"),
    (EMBED, {"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types"),
    (EMBED, {"texts": ["a", ""]}, "texts[1]"),
    (EMBED, {"inputs": [{"content": [{"type": "image_url"}]}]}, "inputs[0].content[0]"),
    (RERANK, {"query": "a"}, "documents"),
]


@pytest.mark.parametrize(("path", "body", "named"), WRONG)
async def test_a_wrong_parameter_is_named_in_a_sentence(cluster, path, body, named) -> None:
    answer = await cluster.http.post(path, json={"model": "fake", **body})
    assert answer.status_code == 400, answer.text
    assert answer.json().keys() == {"message", "id"}
    assert named in answer.json()["message"]


async def test_what_is_not_there_says_so_in_a_sentence(cluster) -> None:
    for method, path in (("POST", "/v2/classify"), ("GET", CHAT)):
        answer = await cluster.http.request(method, path)
        assert answer.status_code in (404, 405)
        assert answer.json().keys() == {"message", "id"}
    answer = await cluster.http.post(CHAT, json={"model": "none", "messages": HI})
    assert (answer.status_code, "'none'" in answer.json()["message"]) == (404, True)


async def test_a_stream_that_fails_says_so_at_its_end(cluster) -> None:
    from sapwood_common.errors import InternalError

    cluster.workers[0].script.fail_after, cluster.workers[0].script.error = 2, InternalError("broken")
    answer = await cluster.http.post(CHAT, json={"model": "fake", "messages": HI, "stream": True})
    last = json.loads(answer.text.strip().split("\n\n")[-1].partition("data: ")[2])
    assert (last["type"], last["delta"]) == ("message-end", {"error": "broken", "finish_reason": "ERROR"})


async def test_inputs_to_embed_that_are_no_lists_of_parts_are_refused_by_name(cluster) -> None:
    for content in (
        5,
        True,
        "text",
        {"a": 1},
        [5],
        [{"text": "x"}],
        [{"type": "text", "text": 5}],
        [{"type": "image"}],
    ):
        answer = await cluster.http.post(EMBED, json={"model": "fake", "inputs": [{"content": content}]})
        assert (answer.status_code, "inputs[0].content" in answer.json()["message"]) == (400, True), answer.text
