"""The OpenAI API over HTTP, with the official client as the judge of shapes."""

import asyncio
import json

import openai
import pytest

from sapwood_testing.router.fake_tokenizer import encode

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def events_of(body: str) -> list:
    assert body.endswith("\n\n")
    data = [event.removeprefix("data: ") for event in body.split("\n\n")[:-1]]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


async def test_a_completion(cluster) -> None:
    answer = await cluster.openai.completions.create(model="fake", prompt="hello", max_tokens=100)
    assert answer.object == "text_completion"
    assert answer.model == "fake"
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, "hello", "stop", None)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, 6, 12)
    assert usage.prompt_tokens_details.cached_tokens == 0


async def test_a_completion_has_sixteen_tokens_unless_told_and_a_chat_as_many_as_fit(cluster) -> None:
    text = "x" * 50
    answer = await cluster.openai.completions.create(model="fake", prompt=text)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("x" * 16, "length")
    messages = [{"role": "user", "content": text}]
    answer = await cluster.openai.chat.completions.create(model="fake", messages=messages)
    assert answer.choices[0].message.content == f"<user>{text}<assistant>"
    assert [call.request.sampling.HasField("max_tokens") for call in cluster.calls()].count(False) == 1


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("abc", ["abc"]),
        (["abc"], ["abc"]),
        (["abc", "de", "f"], ["abc", "de", "f"]),
        (encode("abc"), ["abc"]),
        ([encode("abc"), encode("de")], ["abc", "de"]),
    ],
)
async def test_every_kind_of_prompt_gives_its_choices_whole_and_streamed(cluster, prompt, texts) -> None:
    answer = await cluster.openai.completions.create(model="fake", prompt=prompt)
    assert [(c.index, c.text) for c in answer.choices] == list(enumerate(texts))
    assert answer.usage.completion_tokens == sum(len(text) + 1 for text in texts)
    streamed: dict[int, str] = {}
    finishes = []
    async for chunk in await cluster.openai.completions.create(model="fake", prompt=prompt, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + choice.text
            finishes += [choice.finish_reason] if choice.finish_reason else []
    assert [streamed[index] for index in range(len(texts))] == texts
    assert finishes == ["stop"] * len(texts)


async def test_a_streamed_completion_is_sse_with_usage_last_and_done(cluster) -> None:
    for worker in cluster.workers:
        worker.script.delay = 0.02
    body = {"model": "fake", "prompt": "héllo", "stream": True, "stream_options": {"include_usage": True}}
    response = await cluster.http.post("/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = events_of(response.text)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "héllo"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 14
    assert len(chunks) > 2


async def test_a_streamed_chat_says_who_speaks_first_and_why_it_ended_last(cluster) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    stream = await cluster.openai.chat.completions.create(
        model="fake", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].object == "chat.completion.chunk"
    assert chunks[0].choices[0].delta.role == "assistant"
    *body, last, usage = chunks
    text = "".join(chunk.choices[0].delta.content for chunk in body)
    assert text == "<system>be brief<user>hi<assistant>"
    assert last.choices[0].finish_reason == "stop"
    assert last.choices[0].delta.content is None
    assert usage.usage.completion_tokens == len(text) + 1
    async with cluster.openai.chat.completions.stream(model="fake", messages=messages) as helper:
        assert (await helper.get_final_completion()).choices[0].message.content == text


async def test_parameters_reach_the_worker(cluster) -> None:
    await cluster.openai.completions.create(
        model="fake",
        prompt="abc",
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        seed=-1,
        user="someone",
        extra_body={"top_k": 3, "min_p": 0.25, "stop_token_ids": [77], "ignore_eos": True},
    )
    sampling = cluster.calls()[0].request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (7, 0.5, 2**64 - 1)
    assert (round(sampling.top_p, 6), sampling.top_k, sampling.min_p) == (0.9, 3, 0.25)
    assert (list(sampling.stop_token_ids), sampling.ignore_eos) == ([77], True)
    await cluster.openai.completions.create(model="fake", prompt="abcd", extra_body={"top_k": -1})
    sampling = next(call.request.sampling for call in cluster.calls() if call.request.sampling.max_tokens != 7)
    assert not any(sampling.HasField(name) for name in ("temperature", "top_p", "min_p", "ignore_eos"))
    assert (sampling.HasField("top_k"), sampling.top_k) == (True, 0), "a model's own default does not take its place"
    assert sampling.HasField("seed")  # drawn by the router, so that another worker can continue with the stream


async def test_stop_strings(cluster) -> None:
    for stop in ("c", ["zz", "c"]):
        answer = await cluster.openai.completions.create(model="fake", prompt="abcdef", stop=stop)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("ab", "stop")
        assert answer.usage.completion_tokens == 3
    await cluster.idle()


@pytest.mark.parametrize("name", ["include_stop_str_in_output", "no_stop_trim"])
async def test_what_an_answer_ended_at_may_stay_in_its_text(cluster, name) -> None:
    """A stop string, and a token that is no special one, whole and in a stream."""
    last = encode("f")[1]
    for worker in cluster.workers:
        worker.script.tokens = lambda prompt: encode("abcdef")[1:]
        worker.script.ends_with_token = False
    for asked, shown, kept in (({"stop": ["zz", "cd"]}, "ab", "abcd"), ({"stop_token_ids": [last]}, "abcde", "abcdef")):
        body = {"prompt": "a", **asked}
        for wanted, text in ((False, shown), (True, kept)):
            answer = (await cluster.http.post(COMPLETIONS, json={**body, name: wanted})).json()
            assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (text, "stop")
            assert answer["usage"]["completion_tokens"] == len(kept)
            *chunks, _ = events_of(
                (await cluster.http.post(COMPLETIONS, json={**body, name: wanted, "stream": True})).text
            )
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    await cluster.idle()


async def test_both_limits_of_a_chat_are_understood_but_not_together(cluster) -> None:
    messages = [{"role": "user", "content": "hello"}]
    for name in ("max_tokens", "max_completion_tokens"):
        answer = await cluster.openai.chat.completions.create(model="fake", messages=messages, **{name: 3})
        assert answer.choices[0].message.content == "<us"
        with pytest.raises(openai.BadRequestError) as caught:
            await cluster.openai.chat.completions.create(model="fake", messages=messages, **{name: 0})
        assert caught.value.param == name
    with pytest.raises(openai.BadRequestError):
        await cluster.openai.chat.completions.create(
            model="fake", messages=messages, max_tokens=3, max_completion_tokens=3
        )


async def test_models(cluster) -> None:
    models = [model async for model in cluster.openai.models.list()]
    assert [(model.id, model.object, model.owned_by) for model in models] == [("fake", "model", "sapwood")]
    found = await cluster.openai.models.retrieve("fake")
    assert (found.id, found.root, found.parent, found.max_model_len) == ("fake", "fake", None, 100_000)
    with pytest.raises(openai.NotFoundError) as caught:
        await cluster.openai.models.retrieve("no/such")
    assert caught.value.code == "model_not_found"


async def test_a_base_url_may_lack_v1(cluster) -> None:
    client = cluster.openai.with_options(base_url=cluster.url)
    chat = await client.chat.completions.create(model="fake", messages=HI)
    assert chat.choices[0].message.content
    assert [model.id async for model in client.models.list()] == ["fake"]
    assert (await client.models.retrieve("fake")).id == "fake"
    first = await client.responses.create(model="fake", input="hi")
    assert (await client.responses.retrieve(first.id)).id == first.id
    assert (await client.completions.create(model="fake", prompt="hi")).choices[0].text
    assert (await client.embeddings.create(model="fake", input="hi")).data
    streamed = await client.chat.completions.create(model="fake", messages=HI, stream=True)
    assert [chunk async for chunk in streamed]
    with pytest.raises(openai.NotFoundError, match="there is no /uploads: nothing is kept here of that kind"):
        await client.uploads.create(bytes=1, filename="x", mime_type="text/plain", purpose="batch")
    answer = await cluster.http.get("/chat/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


async def test_a_path_that_is_nearly_right_is_told_the_right_one(cluster) -> None:
    for path, told in (
        ("/v1/v1/chat/completions", "there is no /v1/v1/chat/completions; there is /v1/chat/completions"),
        ("/v1/tokenize", "there is no /v1/tokenize; there is /tokenize"),
        ("/chat", "there is no /chat; /openapi.json lists what there is"),
    ):
        response = await cluster.http.post(path, json={})
        assert (response.status_code, response.json()["error"]["message"]) == (404, told)


async def test_a_wrong_method_is_told_the_right_one(cluster) -> None:
    response = await cluster.http.get("/v1/completions")
    assert response.status_code == 405
    assert response.json()["error"]["message"] == "/v1/completions takes POST, not GET"


async def test_an_unknown_model_is_404_and_names_the_parameter(cluster) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await cluster.openai.completions.create(model="gpt-99", prompt="a")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


async def test_usage_so_far_is_told_in_every_chunk_where_asked(cluster) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": ["hello", "hi"], "n": 2}), (CHAT, {"messages": HI, "n": 2})):
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {**prompt, "stream": True, "stream_options": options, "max_tokens": 9}
        answer = await cluster.http.post(path, json=body)
        *events, done = [line[6:] for line in answer.text.split("\n\n") if line]
        assert done == "[DONE]"
        usages = [json.loads(event)["usage"] for event in events]
        told = [usage["completion_tokens"] for usage in usages]
        assert told == sorted(told) and told[0] < told[-1]
        assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)
        assert usages[-1] == usages[-2]  # the last chunk with a choice knows all
        options["include_usage"] = False
        answer = await cluster.http.post(path, json=body)
        assert "usage" not in answer.text
    wrong = {"messages": HI, "stream": True, "stream_options": {"include_usage": "yes"}}
    assert (await cluster.http.post(CHAT, json=wrong)).json()["error"]["param"] == "stream_options.include_usage"


async def test_what_openai_would_add_to_an_answer_is_left_out_and_named(cluster) -> None:
    padded = {"stream": True, "stream_options": {"include_obfuscation": True}}
    asked = [
        (COMPLETIONS, {"prompt": "a", **padded}, "stream_options.include_obfuscation"),
        (CHAT, {"messages": HI, **padded}, "stream_options.include_obfuscation"),
        ("/v1/responses", {"input": "a", **padded}, "stream_options.include_obfuscation"),
        (CHAT, {"messages": HI, "modalities": ["text"], "audio": {"format": "wav", "voice": "alloy"}}, "audio"),
    ]
    for path, body, name in asked:
        answer = await cluster.http.post(path, json=body)
        assert (answer.status_code, answer.headers.get("x-sapwood-ignored")) == (200, name), answer.text
    spoken = {"messages": HI, "modalities": ["text", "audio"], "audio": {"format": "wav", "voice": "alloy"}}
    assert (await cluster.http.post(CHAT, json=spoken)).json()["error"]["param"] == "modalities"


async def test_listing_kept_chat_completions_is_refused_with_the_reason(cluster) -> None:
    answer = await cluster.http.get(CHAT)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert "chat completions are not kept" in answer.json()["error"]["message"]


BROKEN = [
    (b"", None),
    (b"{", None),
    (b"[]", None),
    (b"null", None),
    (b'{"prompt": NaN}', None),
    (b"[" * 100_000, None),
    (b'{"prompt": "a\xff"}', "prompt"),
    (b'{"prompt": "a\\ud800"}', "prompt"),
    (b'{"prompt": "\\udc00 and more text here"}', "prompt"),
    (b'{"prompt": "a", "stop": ["b", "\\ud83dx"]}', "stop[1]"),
    (b'{"messages": [{"role": "user", "content": "\xc3("}]}', "messages[0].content"),
    (b'{"pr\xffompt": "a"}', None),
]


async def test_a_body_that_is_not_json_or_not_unicode_is_refused(cluster) -> None:
    for raw, param in BROKEN:
        path = CHAT if b"messages" in raw else COMPLETIONS
        response = await cluster.http.post(path, content=raw)
        assert response.status_code == 400, (raw, response.text)
        assert response.json()["error"]["param"] == param, raw


async def test_a_body_over_the_limit_is_413(make_cluster) -> None:
    async with make_cluster(1, max_body_bytes=2000) as cluster:
        assert (await cluster.http.post(COMPLETIONS, json={"prompt": "x" * 2000})).status_code == 413

        async def pieces():
            for _ in range(10):
                yield b"x" * 500

        response = await cluster.http.post(COMPLETIONS, content=pieces())
        assert response.status_code == 413
        assert response.json()["error"]["type"] == "invalid_request_error"
        assert (await cluster.http.post(COMPLETIONS, json={"prompt": "ok"})).status_code == 200


async def test_unknown_paths_and_wrong_methods_are_json_too(cluster) -> None:
    response = await cluster.http.get("/v3/nothing")
    assert (response.status_code, response.json()["error"]["type"]) == (404, "invalid_request_error")
    response = await cluster.http.get(COMPLETIONS)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert "error" in response.json()
    assert response.headers["x-request-id"]


async def test_the_request_id_is_echoed_on_every_response_and_handed_on(cluster) -> None:
    headers = {"x-request-id": "id-1"}
    for call in (
        cluster.http.post(COMPLETIONS, json={"prompt": "a"}, headers=headers),
        cluster.http.post(COMPLETIONS, json={"prompt": "a", "stream": True}, headers=headers),
        cluster.http.post(COMPLETIONS, json={"prompt": ""}, headers=headers),
        cluster.http.get("/nowhere", headers=headers),
        cluster.http.get("/health", headers=headers),
    ):
        assert (await call).headers["x-request-id"] == "id-1"
    assert {call.request_id for call in cluster.calls()} == {"id-1"}
    assert set(cluster.tokenizer.request_ids) == {"id-1"}
    assert (await cluster.http.get("/health")).headers["x-request-id"]
    response = await cluster.http.get("/health", headers={"x-request-id": "a b"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "x-request-id")


async def test_sixty_four_streams_at_once_get_their_own_text(cluster) -> None:
    for worker in cluster.workers:
        worker.script.delay = 0.001

    async def one(number: int) -> None:
        text = f"[{number}] " + chr(0x4E00 + number) * 20
        stream = await cluster.openai.completions.create(model="fake", prompt=text, max_tokens=500, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == text

    await asyncio.gather(*(one(number) for number in range(64)))
    await cluster.idle()
    assert len(cluster.calls()) == 64


async def test_a_body_that_does_not_come_is_504(make_cluster) -> None:
    async with make_cluster(1, request_timeout=0.2) as cluster:
        reader, writer = await asyncio.open_connection("127.0.0.1", cluster.router.http_port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
        assert b" 504 " in await reader.readline()
        writer.close()
