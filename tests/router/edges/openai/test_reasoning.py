"""Reasoning by both of its names, its tokens counted, and what vLLM has as null."""

import json

import pytest

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]
THOUGHT = "<think>Well now.</think>Yes."
COUNT = len("Well now.")


async def test_reasoning_comes_by_both_names(cluster) -> None:
    cluster.answer_with(THOUGHT)
    answer = (await cluster.http.post(CHAT, json={"messages": HI})).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == (
        "Well now.",
        "Well now.",
        "Yes.",
    )
    answer = (await cluster.http.post(CHAT, json={"messages": HI, "include_reasoning": False})).json()
    assert not {"reasoning", "reasoning_content"} & answer["choices"][0]["message"].keys()


async def test_reasoning_streams_by_both_names(cluster) -> None:
    cluster.answer_with(THOUGHT)
    answer = await cluster.http.post(CHAT, json={"messages": HI, "stream": True})
    deltas = [
        json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
        for line in answer.text.split("\n\n")
        if line.startswith("data: {")
    ]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == "Well now."


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_tokens_are_counted_in_usage(cluster, stream) -> None:
    cluster.answer_with(THOUGHT)
    if stream:
        chunks = await cluster.openai.chat.completions.create(
            model="fake", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        usage = [chunk.usage async for chunk in chunks][-1]
    else:
        usage = (await cluster.openai.chat.completions.create(model="fake", messages=HI)).usage
    assert usage.completion_tokens_details.reasoning_tokens == COUNT
    async with cluster.openai.responses.stream(model="fake", input="hi") as events:
        final = await events.get_final_response()
    assert final.usage.output_tokens_details.reasoning_tokens == COUNT
    cluster.answer_with("Yes.")
    usage = (await cluster.openai.chat.completions.create(model="fake", messages=HI)).usage
    assert usage.completion_tokens_details is None


async def test_prompt_logprobs_are_null_where_nobody_asked(cluster) -> None:
    answer = await cluster.openai.chat.completions.create(model="fake", messages=HI)
    assert answer.prompt_logprobs is None  # raises AttributeError where it is not there
    answer = await cluster.openai.completions.create(model="fake", prompt="hi")
    assert answer.choices[0].prompt_logprobs is None
    answer = await cluster.openai.completions.create(model="fake", prompt="hi", extra_body={"prompt_logprobs": 0})
    assert answer.choices[0].prompt_logprobs[0] is None
    assert answer.choices[0].prompt_logprobs[1]


async def test_a_prediction_changes_nothing(cluster) -> None:
    prediction = {"type": "content", "content": "Yes."}
    answer = await cluster.openai.chat.completions.with_raw_response.create(
        model="fake", messages=HI, prediction=prediction
    )
    assert "x-sapwood-ignored" not in answer.headers
    assert answer.parse().choices[0].finish_reason == "stop"


async def test_a_conversation_is_embedded(cluster) -> None:
    async def prompt(**body) -> str:
        answer = await cluster.http.post("/v1/embeddings", json={"messages": HI, **body})
        assert answer.status_code == 200, answer.text
        (call,) = [call for worker in cluster.workers for call in worker.embed_calls][-1:]
        return bytes(token - 3 for token in call.request.inputs[0].ids if token >= 3).decode()

    for worker in cluster.workers[1:]:
        await worker.kill()
    assert await prompt(chat_template_kwargs={"a": 1}) == "<user>hi<assistant>"
    assert json.loads(cluster.tokenizer.chats[-1].template_variables) == {"a": 1}
    assert cluster.tokenizer.chats[-1].add_generation_prompt is False
    await prompt(add_generation_prompt=True)
    assert cluster.tokenizer.chats[-1].add_generation_prompt is True
    for wrong, param in (({"input": "hi"}, "messages"), ({"messages": []}, "messages"), ({"messages": None}, "input")):
        answer = await cluster.http.post("/v1/embeddings", json={"messages": HI, **wrong})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("names", [("data_1", "data_2"), ("queries", "documents"), ("queries", "items")])
async def test_texts_to_score_have_several_names(cluster, names) -> None:
    one, other = names
    usual = (await cluster.http.post("/score", json={"text_1": "a", "text_2": ["b", "c"]})).json()["data"]
    answer = await cluster.http.post("/score", json={one: "a", other: ["b", "c"]})
    assert answer.status_code == 200, answer.text
    assert answer.json()["data"] == usual
    for body, param in (({one: "a"}, "documents" if one == "queries" else other), ({one: ["a", "b"], other: "c"}, one)):
        answer = await cluster.http.post("/score", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    answer = await cluster.http.post("/score", json={})
    assert answer.json()["error"]["param"] == "text_1"
