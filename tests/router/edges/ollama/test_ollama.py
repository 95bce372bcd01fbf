"""Ollama's API: by its official client where that is installed, and line by line."""

import json

import pytest

from sapwood_testing.router.fake_tokenizer import encode

HI = [{"role": "user", "content": "hi"}]
CHAT, GENERATE = "/api/chat", "/api/generate"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}}]
CALLS = '<think>Hm.</think>See: <call weather>{"city": "Rome"}</call><call weather>{"city": "Oslo"}</call>'


@pytest.fixture
async def cluster(make_cluster):
    async with make_cluster(workers=1) as running:
        yield running


@pytest.fixture
async def client(cluster):
    ollama = pytest.importorskip("ollama")
    made = ollama.AsyncClient(host=cluster.url, trust_env=False)
    yield made
    await made._client.aclose()


async def lines(cluster, path: str, **body) -> list[dict]:
    answer = await cluster.http.post(path, json={"model": "fake", **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


async def test_a_chat_streams_lines_unless_asked_otherwise(cluster) -> None:
    *parts, last = await lines(cluster, CHAT, messages=HI)
    assert "".join(part["message"]["content"] for part in parts) == "<user>hi<assistant>"
    assert all(part["done"] is False and part["model"] == "fake" for part in parts)
    assert (last["done"], last["done_reason"], last["message"]) == (True, "stop", {"role": "assistant", "content": ""})
    assert (last["prompt_eval_count"], last["eval_count"]) == (20, 20)
    assert min(last[name] for name in ("total_duration", "prompt_eval_duration", "eval_duration")) > 0
    whole = (await cluster.http.post(CHAT, json={"model": "fake", "messages": HI, "stream": False})).json()
    assert (whole["message"]["content"], whole["done"]) == ("<user>hi<assistant>", True)


async def test_the_official_client_chats(client, cluster) -> None:
    answer = await client.chat("fake", messages=HI)
    assert (answer.message.content, answer.done_reason) == ("<user>hi<assistant>", "stop")
    parts = [part async for part in await client.chat("fake:latest", messages=HI, stream=True)]
    assert "".join(part.message.content for part in parts) == "<user>hi<assistant>"
    assert parts[-1].done


async def test_the_official_client_calls_tools_and_goes_on(client, cluster) -> None:
    def weather(city: str) -> str:
        """The weather.

        Args:
            city: Where.
        """
        return f"sun in {city}"

    cluster.answer_with(CALLS)
    for stream in (False, True):
        if stream:
            parts = [part async for part in await client.chat("fake", messages=HI, tools=[weather], stream=True)]
            messages = [part.message for part in parts]
        else:
            messages = [(await client.chat("fake", messages=HI, tools=[weather], think=True)).message]
        calls = [call for message in messages for call in message.tool_calls or ()]
        assert [(call.function.name, call.function.arguments) for call in calls] == [
            ("weather", {"city": "Rome"}),
            ("weather", {"city": "Oslo"}),
        ]
        assert "".join(message.thinking or "" for message in messages) == "Hm."
        assert "".join(message.content or "" for message in messages) == "See: "
    assert json.loads(cluster.tokenizer.chats[-2].template_variables) == {"enable_thinking": True, "thinking": True}
    results = [
        {"role": "tool", "tool_name": "weather", "content": weather(**call.function.arguments)} for call in calls
    ]
    said = {"role": "assistant", "content": "See: ", "thinking": "Hm.", "tool_calls": calls}
    cluster.answer_with("Sunny.")
    answer = await client.chat("fake", messages=[*HI, said, *results], tools=[weather])
    assert answer.message.content == "Sunny."
    _, assistant, first, second = cluster.tokenizer.chats[-1].messages
    assert [call.id for call in assistant.tool_calls] == [first.tool_call_id, second.tool_call_id]
    assert (assistant.reasoning, first.name, second.content) == ("Hm.", "weather", "sun in Oslo")


async def test_a_text_is_templated_unless_raw(client, cluster) -> None:
    answer = await client.generate("fake", "hi", system="Be kind.")
    assert answer.response == "<system>Be kind.<user>hi<assistant>"
    parts = [part async for part in await client.generate("fake", "hi", raw=True, stream=True)]
    assert "".join(part.response for part in parts) == "hi"
    assert encode("hi") in [list(call.request.token_ids) for call in cluster.calls()]
    cluster.answer_with("<think>Hm.</think>Yes.")
    answer = await client.generate("fake", "hi", think="low")
    assert (answer.thinking, answer.response) == ("Hm.", "Yes.")
    assert json.loads(cluster.tokenizer.chats[-1].template_variables)["reasoning_effort"] == "low"


async def test_options_reach_the_worker(cluster) -> None:
    options = {
        "num_predict": 5, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "seed": 3, "repeat_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": 0.3, "stop": ["X"], "num_ctx": 4096, "num_gpu": 1,
    }  # fmt: skip
    answer = await cluster.http.post(
        CHAT, json={"messages": HI, "options": options, "stream": False, "keep_alive": "5m"}
    )
    assert answer.status_code == 200, answer.text
    assert "x-sapwood-ignored" not in answer.headers
    assert (answer.json()["done_reason"], answer.json()["eval_count"]) == ("length", 5)
    sampling = cluster.calls()[-1].request.sampling
    assert (sampling.max_tokens, sampling.top_k, sampling.seed) == (5, 7, 3)
    assert [round(value, 2) for value in (sampling.temperature, sampling.min_p, sampling.repetition_penalty)] == [
        0.5,
        0.1,
        1.1,
    ]
    stopped = {"messages": HI, "options": {"stop": ["hi"]}, "stream": False}
    assert (await cluster.http.post(CHAT, json=stopped)).json()["message"]["content"] == "<user>"
    answer = await cluster.http.post(CHAT, json={"messages": HI, "options": {"mirostat": 2, "num_predict": -1}})
    assert answer.headers["x-sapwood-ignored"] == "options.mirostat"
    assert not cluster.calls()[-1].request.sampling.HasField("max_tokens")


async def test_a_format_is_enforced(cluster) -> None:
    for given, schema in (("json", {"type": "object"}), (SCHEMA, SCHEMA)):
        answer = await cluster.http.post(CHAT, json={"messages": HI, "format": given, "stream": False})
        assert answer.status_code == 200, answer.text
        assert json.loads(cluster.tokenizer.grammars[-1].grammar.json_schema) == schema
    assert cluster.calls()[-1].request.HasField("grammar")


async def test_models_are_listed_and_described(client, cluster) -> None:
    (model,) = (await client.list()).models
    assert (model.model, len(model.digest)) == ("fake", 64)
    assert [model.model for model in (await client.ps()).models] == ["fake"]
    shown = await client.show("fake")
    assert {"completion", "tools", "thinking", "embedding"} == {*shown.capabilities}
    assert shown.modelinfo["sapwood.context_length"] == 100_000
    assert (await cluster.http.post("/api/show", json={"name": "fake:latest"})).status_code == 200
    assert (await cluster.http.get("/api/version")).json().keys() == {"version"}


async def test_an_empty_request_loads_the_model(client) -> None:
    assert (await client.generate("fake")).done_reason == "load"
    assert (await client.chat("fake")).done_reason == "load"


async def test_texts_are_embedded(client, cluster) -> None:
    answer = await client.embed("fake", ["ab", "abc"])
    assert [vector[0] for vector in answer.embeddings] == [3, 4]
    assert answer.prompt_eval_count == 7
    assert (await client.embed("fake", "ab")).embeddings == [answer.embeddings[0]]
    assert (await client.embed("fake", [])).embeddings == []
    assert list((await client.embeddings("fake", "ab")).embedding) == list(answer.embeddings[0])
    calls = [call for worker in cluster.workers for call in worker.embed_calls]
    assert all(call.request.normalize for call in calls)


WRONG = [
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "images": ["a"]}]}, "messages[0].images[0]"),
    (CHAT, {"messages": [{"role": "assistant", "content": "x", "images": ["aGk="]}]}, "messages[0].images"),
    (CHAT, {"messages": HI, "options": {"temperature": -1}}, "options.temperature"),
    (CHAT, {"messages": HI, "options": {"repeat_penalty": -1}}, "options.repeat_penalty"),
    (CHAT, {"messages": HI, "options": {"stop": [""]}}, "options.stop"),
    (CHAT, {"messages": HI, "format": "xml"}, "format"),
    (CHAT, {"messages": HI, "format": {"bad": 1}}, "format"),
    (CHAT, {"messages": HI, "think": "much"}, "think"),
    (CHAT, {"messages": [*HI, {"role": "system", "content": "late"}]}, "messages[1].role"),
    (GENERATE, {"prompt": "x", "images": [5]}, "images"),
    (GENERATE, {"prompt": "x", "images": ["aGk="], "raw": True}, "images"),
    (GENERATE, {"prompt": 5}, "prompt"),
    ("/api/embed", {}, "input"),
    ("/api/embed", {"input": ["a", ""]}, "input[1]"),
    ("/api/embeddings", {}, "prompt"),
    ("/api/show", {}, "model"),
]


@pytest.mark.parametrize(("path", "body", "named"), WRONG)
async def test_a_wrong_parameter_is_named_in_a_sentence(cluster, path, body, named) -> None:
    answer = await cluster.http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json().keys() == {"error"}
    assert named in answer.json()["error"]


async def test_what_is_not_there_says_so_in_a_sentence(client, cluster) -> None:
    import ollama

    with pytest.raises(ollama.ResponseError) as caught:
        await client.chat("none", messages=HI)
    assert (caught.value.status_code, "'none'" in caught.value.error) == (404, True)
    for method, path in (("POST", "/api/pull"), ("DELETE", "/api/delete"), ("GET", CHAT), ("POST", "/api/blobs/x")):
        answer = await cluster.http.request(method, path, json={})
        assert answer.status_code in (404, 405)
        assert answer.json().keys() == {"error"}


async def test_a_stream_that_fails_ends_with_an_error(cluster) -> None:
    from sapwood_common.errors import InternalError

    for worker in cluster.workers:
        worker.script.fail_after, worker.script.error = 2, InternalError("broken")
    *_, last = await lines(cluster, CHAT, messages=HI)
    assert last == {"error": "broken"}


async def test_a_prompt_that_is_too_long_says_so(cluster) -> None:
    answer = await cluster.http.post(CHAT, json={"messages": [{"role": "user", "content": "x" * 100_001}]})
    assert (answer.status_code, "context length" in answer.json()["error"]) == (400, True)
