"""What vLLM and SGLang add to OpenAI's API: taken by their names, over gRPC too, and answered in their shapes."""

import json

import grpc
import pytest

from sapwood.v1 import common_pb2, router_pb2
from sapwood_testing.router.fake_tokenizer import encode

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
HI = [{"role": "user", "content": "hi"}]
INVALID = grpc.StatusCode.INVALID_ARGUMENT
GOOD = {CHAT: {"messages": HI}, COMPLETIONS: {"prompt": "hello"}, EMBEDDINGS: {"input": "hello"}}


@pytest.fixture
async def one(make_cluster):
    async with make_cluster(workers=1) as cluster:
        yield cluster


async def post(cluster, path: str, **body) -> dict:
    answer = await cluster.http.post(path, json={**GOOD[path], **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refused(cluster, path: str, param: str, **body) -> str:
    answer = await cluster.http.post(path, json={**GOOD[path], **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    return answer.json()["error"]["message"]


async def streamed(cluster, path: str, **body) -> list[dict]:
    answer = await cluster.http.post(path, json={**GOOD[path], **body, "stream": True})
    assert answer.status_code == 200, answer.text
    *events, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


async def test_the_body_may_name_the_request(one) -> None:
    for path, good in GOOD.items():
        for name in ("request_id", "rid"):
            answer = await one.http.post(path, json={**good, name: "mine-1"})
            assert answer.headers["x-request-id"] == "mine-1"
            assert "mine-1" in (answer.json().get("id") or "mine-1")
        answer = await one.http.post(path, json={**good, "rid": "mine"}, headers={"x-request-id": "header"})
        assert answer.headers["x-request-id"] == "header"
        await refused(one, path, "request_id", request_id="not fit")
        await refused(one, path, "rid", rid=["a"])


async def test_the_body_may_say_priority_and_salt(one) -> None:
    for path in GOOD:
        await post(one, path, priority=-7, cache_salt="s")
        await post(one, path, priority=10**9, cache_salt="t")
        await post(one, path)
        first, second, plain = [call.request for call in (one.calls() or one.workers[0].embed_calls)[-3:]]
        assert [first.priority, second.priority, plain.priority] == [7, -100, 0]  # vLLM's lowest goes first
        assert len({first.cache_salt, second.cache_salt, plain.cache_salt}) == 3
        assert plain.cache_salt == ""
        one.workers[0].calls.clear()
        await refused(one, path, "priority", priority="high")


async def test_a_long_prompt_is_cut(one, expect_error) -> None:
    ids = encode("hello")
    for body, left in (
        ({"truncate_prompt_tokens": 3}, ids[-3:]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, ids[:3]),
        ({"truncate_prompt_tokens": 300}, ids),
        ({"truncate_prompt_tokens": -1}, ids),
    ):
        answer = await post(one, COMPLETIONS, **body)
        assert list(one.calls()[-1].request.token_ids) == left
        assert answer["usage"]["prompt_tokens"] == len(left)
    context = one.router.registry.context_length("fake")
    await post(one, COMPLETIONS, prompt="x" * 2 * context, truncate_prompt_tokens=-1, max_tokens=10)
    assert len(one.calls()[-1].request.token_ids) == context - 10
    await post(one, CHAT, truncate_prompt_tokens=2)
    assert len(one.calls()[-1].request.token_ids) == 2
    for wrong in (0, -2, 2**31):
        await refused(one, COMPLETIONS, "truncate_prompt_tokens", truncate_prompt_tokens=wrong)
        await refused(one, EMBEDDINGS, "truncate_prompt_tokens", truncate_prompt_tokens=wrong)
    await refused(one, COMPLETIONS, "truncation_side", truncate_prompt_tokens=2, truncation_side="middle")
    await one.generate("hello", truncate_prompt_tokens=3, truncate_right=True)
    assert list(one.calls()[-1].request.token_ids) == ids[:3]
    request = router_pb2.RouterGenerateRequest(text="hello", truncate_prompt_tokens=0)
    assert (await expect_error(one.stub.Generate(request).read(), INVALID))[1] == "truncate_prompt_tokens"


async def test_a_text_may_have_its_special_tokens_already(one, expect_error) -> None:
    bare = encode("hello")[1:]
    for body in ({}, {"prompt": ["hello"]}, {"prompt": bare}):
        await post(one, COMPLETIONS, **body, add_special_tokens=False)
        assert list(one.calls()[-1].request.token_ids) == bare
    await one.stub.Generate(router_pb2.RouterGenerateRequest(text="hello", add_special_tokens=False)).read()
    assert list(one.calls()[-1].request.token_ids) == bare
    await post(one, COMPLETIONS, add_special_tokens=True)
    assert list(one.calls()[-1].request.token_ids) == encode("hello")
    await refused(one, COMPLETIONS, "add_special_tokens", suffix="z", add_special_tokens=False)
    for wrong in ({"tokens": common_pb2.TokenIds(ids=bare)}, {"text": "a", "suffix": "z"}):
        request = router_pb2.RouterGenerateRequest(**wrong, add_special_tokens=False)
        assert (await expect_error(one.stub.Generate(request).read(), INVALID))[1] == "add_special_tokens"


async def test_embeddings_are_cut_in_both_directions(one) -> None:
    await post(one, EMBEDDINGS, truncate_prompt_tokens=3)
    await post(one, EMBEDDINGS, input=[5] * 200_000, truncate_prompt_tokens=-1)
    asked = [call.request.max_tokens for call in one.workers[0].embed_calls]
    assert asked == [3, one.router.registry.context_length("fake")]
    await refused(one, EMBEDDINGS, "truncation_side", truncate_prompt_tokens=3, truncation_side="left")
    assert "files" in await refused(one, EMBEDDINGS, "dimensions", dimensions=2)


async def test_an_empty_name_means_the_only_model_and_embeddings_have_ids(one) -> None:
    """As vLLM has it: clients that must name a model send an empty name, and Mistral's refuses embeddings without an id."""
    for path, body in ((COMPLETIONS, {"prompt": "a", "max_tokens": 1}), (EMBEDDINGS, {"input": "a"})):
        answer = (await one.http.post(path, json={"model": "", **body}, headers={"x-request-id": "id-7"})).json()
        assert answer["model"] == "fake"
        assert answer["id"].endswith("-id-7") and answer["created"] > 1_700_000_000


async def test_ping_is_health(one) -> None:
    assert (await one.http.get("/ping")).json() == (await one.http.get("/health")).json() == {"status": "ok"}


async def test_embeddings_of_a_model_that_shortens_them_have_fewer_dimensions(make_cluster, wait_until) -> None:
    async with make_cluster(workers=1) as cluster:
        worker = cluster.workers[0]
        await worker.kill()
        worker.shortened = [1, 2]
        await worker.start()
        await wait_until(lambda: cluster.router.problem() is None and cluster.router.registry.all()[0].available)
        assert len((await post(cluster, EMBEDDINGS, dimensions=2))["data"][0]["embedding"]) == 2
        request = router_pb2.RouterEmbedRequest(input=[router_pb2.EmbedInput(text="a")], dimensions=1)
        assert len((await cluster.stub.Embed(request)).embeddings[0].values) == 1
        for wrong in (4, 0, -1, 2**40):
            await refused(cluster, EMBEDDINGS, "dimensions", dimensions=wrong)


async def test_a_very_long_chat_is_answered_whole(one) -> None:
    """It is written for the tokenizer in several turns of the event loop."""
    said = [f"turn {number}" for number in range(1100)]
    await post(one, CHAT, messages=[{"role": "user", "content": text} for text in said], max_tokens=1)
    assert [turn.content for turn in one.tokenizer.chats[-1].messages] == said


async def test_chats_show_their_tokens(one) -> None:
    text = "<think>no</think>yes"
    answer_ids = encode(text)[1:]
    one.workers[0].script.tokens = lambda prompt: answer_ids
    answer = await post(one, CHAT, return_token_ids=True, n=2)
    prompt = list(one.calls()[-1].request.token_ids)
    assert answer["prompt_token_ids"] == prompt
    assert [choice["token_ids"][:-1] for choice in answer["choices"]] == [answer_ids] * 2
    assert "token_ids" not in (await post(one, CHAT))["choices"][0]
    events = await streamed(one, CHAT, return_token_ids=True, n=2)
    assert [event.get("prompt_token_ids") for event in events] == [prompt] + [None] * (len(events) - 1)
    for index in (0, 1):
        choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        assert [token for choice in choices for token in choice.get("token_ids", ())][:-1] == answer_ids
        assert "".join(choice["delta"].get("content") or "" for choice in choices) == "yes"
    completion = await post(one, COMPLETIONS, return_token_ids=True)
    assert completion["choices"][0]["prompt_token_ids"] == encode("hello")


async def test_tokens_may_be_shown_by_their_ids(one) -> None:
    one.workers[0].script.tokens = lambda prompt: encode("é")[1:]
    names = [f"token_id:{token}" for token in encode("é")[1:]]
    answer = await post(one, CHAT, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)
    content = answer["choices"][0]["logprobs"]["content"]
    assert [item["token"] for item in content] == names
    assert [item["top_logprobs"][0]["token"] for item in content] == names
    answer = await post(one, COMPLETIONS, logprobs=0, return_tokens_as_token_ids=True)
    found = answer["choices"][0]["logprobs"]
    assert found["tokens"] == names
    assert [list(alternatives) for alternatives in found["top_logprobs"]] == [[name] for name in names]


async def test_a_prompts_probabilities_are_told(one) -> None:
    for path, prompt in ((COMPLETIONS, encode("hello")), (CHAT, None)):
        answer = await post(one, path, prompt_logprobs=1)
        found = answer["choices"][0]["prompt_logprobs"] if path == COMPLETIONS else answer["prompt_logprobs"]
        ids = prompt or list(one.calls()[-1].request.token_ids)
        assert found[0] is None
        assert [set(item) for item in found[1:]] == [{str(token)} for token in ids[1:]]
        assert found[1][str(ids[1])] == {"logprob": -ids[1] / 8, "rank": 1, "decoded_token": chr(ids[1] - 3)}
        answer = await post(one, path, prompt_logprobs=0)
        found = answer["choices"][0]["prompt_logprobs"] if path == COMPLETIONS else answer["prompt_logprobs"]
        assert found[1][str(ids[1])]["rank"] is None
        await refused(one, path, "prompt_logprobs", prompt_logprobs=-1)


async def test_a_streams_first_chunk_tells_its_prompts_probabilities(one) -> None:
    one.workers[0].script.tokens = lambda prompt: encode("yes")[1:]
    for extra in ({}, {"return_token_ids": True}, {"logprobs": 1}):
        whole = await post(one, COMPLETIONS, prompt=["ab", "c"], prompt_logprobs=1)
        events = await streamed(one, COMPLETIONS, prompt=["ab", "c"], prompt_logprobs=1, **extra)
        for index in (0, 1):
            first, *others = [choice for event in events for choice in event["choices"] if choice["index"] == index]
            assert first["prompt_logprobs"] == whole["choices"][index]["prompt_logprobs"]
            assert ("prompt_token_ids" in first) == ("return_token_ids" in extra)
            assert not any("prompt_logprobs" in choice for choice in others)
            assert "".join(choice["text"] for choice in [first, *others]) == "yes"
    for extra in ({}, {"return_token_ids": True}):
        whole = await post(one, CHAT, prompt_logprobs=0)
        first, *others = await streamed(one, CHAT, prompt_logprobs=0, n=2, **extra)
        assert first["prompt_logprobs"] == whole["prompt_logprobs"]
        assert ("prompt_token_ids" in first) == bool(extra)
        assert not any("prompt_logprobs" in event for event in others)


async def test_bad_words_and_allowed_tokens_reach_the_worker(one, expect_error) -> None:
    def banned() -> list[list[int]]:
        return [list(sequence.ids) for sequence in one.calls()[-1].request.sampling.bad_words_ids]

    forms = [encode("no")[1:], encode(" no")[1:]]
    for path in (CHAT, COMPLETIONS):
        await post(one, path, bad_words=[" no"], bad_words_ids=[[7], [8, 9]], allowed_token_ids=[5, 6])
        assert banned() == [[7], [8, 9], *forms]
        assert list(one.calls()[-1].request.sampling.allowed_token_ids) == [5, 6]
        await refused(one, path, "bad_words", bad_words=["x" * 40])
        await refused(one, path, "bad_words", bad_words=["a", " "])
        await refused(one, path, "bad_words", bad_words=["a"] * 129)
        await refused(one, path, "bad_words", bad_words="no")
        await refused(one, path, "bad_words_ids", bad_words_ids=[[]])
        await refused(one, path, "allowed_token_ids", allowed_token_ids=[-1])
    await one.generate("hello", bad_words=["no"])
    assert banned() == forms
    request = router_pb2.RouterGenerateRequest(text="hello", bad_words=[""])
    assert (await expect_error(one.stub.Generate(request).read(), INVALID))[1] == "bad_words"


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
STRUCTURED = [
    (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        "json_schema",
        json.dumps(SCHEMA, separators=(",", ":")),
    ),
    ({"guided_json": SCHEMA}, "json_schema", json.dumps(SCHEMA, separators=(",", ":"))),
    ({"guided_json": json.dumps(SCHEMA)}, "json_schema", json.dumps(SCHEMA)),
    ({"guided_regex": "a+"}, "regex", "a+"),
    ({"guided_grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
    ({"guided_choice": ["a", 'b"\\']}, "ebnf", 'start: CHOICE\nCHOICE: "a" | "b\\"\\\\"'),
    ({"json_schema": SCHEMA}, "json_schema", json.dumps(SCHEMA, separators=(",", ":"))),
    ({"json_schema": json.dumps(SCHEMA), "grammar": ""}, "json_schema", json.dumps(SCHEMA)),
    ({"grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
    ({"grammar": {"type": "json", "value": SCHEMA}}, "json_schema", json.dumps(SCHEMA, separators=(",", ":"))),
    ({"grammar": {"type": "regex", "value": "a+"}}, "regex", "a+"),
    ({"structural_tag": '{"type": "structural_tag"}'}, "structural_tag", '{"type": "structural_tag"}'),
    ({"structured_outputs": {"json": SCHEMA}}, "json_schema", json.dumps(SCHEMA, separators=(",", ":"))),
    ({"structured_outputs": {"json_object": True, "regex": None}}, "json_schema", '{"type": "object"}'),
    ({"structured_outputs": {"regex": "a+", "disable_any_whitespace": True}}, "regex", "a+"),
    ({"structured_outputs": {"choice": ["é"]}}, "ebnf", 'start: CHOICE\nCHOICE: "é"'),
    ({"structured_outputs": {"grammar": 'start: "a"', "json_object": False}}, "ebnf", 'start: "a"'),
    ({"structured_outputs": {"grammar": 'start: "a"'}, "guided_grammar": 'start: "a"'}, "ebnf", 'start: "a"'),
    ({"structured_outputs": {"structural_tag": "{}", "disable_fallback": False}}, "structural_tag", "{}"),
]
WRONG = [
    ({"response_format": {"type": "json_object", "schema": []}}, "response_format.schema"),
    ({"guided_json": 42}, "guided_json"),
    ({"guided_regex": 1}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a", ""]}, "guided_choice"),
    ({"guided_choice": "a"}, "guided_choice"),
    ({"guided_choice": ["a"] * 4097}, "guided_choice"),
    ({"guided_json": "{}", "guided_regex": "a"}, "guided_regex"),
    ({"guided_json": "{}", "response_format": {"type": "json_object"}}, "guided_json"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
    ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"regex": "a", "disable_any_whitespace": 1}}, "structured_outputs.disable_any_whitespace"),
    ({"structured_outputs": "a"}, "structured_outputs"),
    ({"structured_outputs": {"grammar": "a"}, "guided_grammar": "b"}, "structured_outputs"),
    ({"guided_regex": "bad"}, "guided_regex"),
    ({"structured_outputs": {"regex": "bad"}}, "structured_outputs.regex"),
]


async def test_structured_outputs_by_vllms_names(one) -> None:
    for path in (CHAT, COMPLETIONS):
        for body, kind, text in STRUCTURED:
            await post(one, path, **body)
            asked = one.tokenizer.grammars[-1].grammar
            assert (asked.WhichOneof("grammar"), getattr(asked, kind)) == (kind, text), body
            strict = body.get("structured_outputs", {}).get("disable_any_whitespace", False)
            assert asked.options.any_whitespace is not strict
        for body, param in WRONG:
            await refused(one, path, param, **body)


async def test_templates_are_told_how_to_reason_and_how_much_to_say(one, expect_error) -> None:
    def told() -> dict:
        return json.loads(one.tokenizer.chats[-1].template_variables or "{}")

    await post(one, CHAT, reasoning_effort="high", verbosity="low")
    assert told() == {"reasoning_effort": "high", "enable_thinking": True, "thinking": True, "verbosity": "low"}
    await post(one, CHAT, reasoning_effort="none", chat_template_kwargs={"thinking": True})
    assert told() == {"reasoning_effort": "none", "enable_thinking": False, "thinking": True}
    await post(one, CHAT)
    assert told() == {}
    await refused(one, CHAT, "reasoning_effort", reasoning_effort="much")
    await refused(one, CHAT, "verbosity", verbosity="much")

    last = [*HI, {"role": "assistant", "content": "Well,"}]
    await post(one, CHAT, messages=last, continue_final_message=True, add_generation_prompt=False)
    asked = one.tokenizer.chats[-1]
    assert (asked.continue_final_message, asked.add_generation_prompt, asked.HasField("add_generation_prompt")) == (
        True, False, True,
    )  # fmt: skip
    await post(one, CHAT, messages=last, continue_final_message=True)
    assert not one.tokenizer.chats[-1].HasField("add_generation_prompt")
    await refused(one, CHAT, "continue_final_message", continue_final_message=True, add_generation_prompt=True)
    messages = router_pb2.ChatMessages(messages=[common_pb2.ChatMessage(role="user", content="hi")])
    request = router_pb2.RouterGenerateRequest(messages=messages, continue_final_message=True)
    assert [response async for response in one.stub.Generate(request)]
    assert one.tokenizer.chats[-1].continue_final_message
    request.add_generation_prompt = True
    assert (await expect_error(one.stub.Generate(request).read(), INVALID))[1] == "continue_final_message"
    for name in ("continue_final_message", "add_generation_prompt"):
        request = router_pb2.RouterGenerateRequest(text="hi", **{name: True})
        assert (await expect_error(one.stub.Generate(request).read(), INVALID))[1] == name


async def test_the_best_of_several_is_the_likeliest(one) -> None:
    # Tokens are the less likely the higher they are; which answer a run gets, its seed says.
    one.workers[0].script.tokens = lambda prompt: encode("zazb"[one.workers[0].calls[-1].request.sampling.seed % 4])[1:]
    answer = await post(one, COMPLETIONS, prompt="x", n=2, best_of=4, seed=0)
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, "a"), (1, "b")]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 8  # of all that were generated
    assert len(one.calls()) == 4
    answer = await post(one, COMPLETIONS, prompt=["x", "y"], best_of=3, seed=0, logprobs=1)
    assert [choice["text"] for choice in answer["choices"]] == ["a", "a"]
    assert answer["choices"][0]["logprobs"]["tokens"] == ["a"]
    await refused(one, COMPLETIONS, "best_of", n=2, best_of=3, stream=True)
    for wrong in (0, 1, 129):
        await refused(one, COMPLETIONS, "best_of", n=2, best_of=wrong)


async def test_a_gap_that_cannot_be_filled_is_refused_by_name(one, expect_error) -> None:
    await post(one, COMPLETIONS, suffix="")
    for wrong, param in (
        ({}, "suffix"),  # the fake's vocabulary has no tokens for it
        ({"prompt": [5, 6]}, "suffix"),
        ({"prompt": ["a", [5, 6]]}, "suffix"),
        ({"prompt": ["a"] * 17}, "suffix"),
        ({"echo": True}, "echo"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
    ):
        await refused(one, COMPLETIONS, param, **wrong, suffix="z")
    messages = router_pb2.ChatMessages(messages=[common_pb2.ChatMessage(role="user", content="hi")])
    for prompt in ({"text": "a"}, {"tokens": common_pb2.TokenIds(ids=[5])}, {"messages": messages}):
        request = router_pb2.RouterGenerateRequest(**prompt, suffix="z")
        assert (await expect_error(one.stub.Generate(request).read(), INVALID))[1] == "suffix"


async def test_the_client_is_told_what_of_a_schema_is_not_enforced(one) -> None:
    schema = {"type": "array", "uniqueItems": True}
    chat = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    for schema_, notice in ((schema, "not enforced: uniqueItems"), ({"type": "array"}, None)):
        form = {"type": "json_object", "schema": schema_}
        answer = await one.http.post(CHAT, json={**chat, "response_format": form})
        assert answer.status_code == 200
        assert answer.headers.get("x-sapwood-notice") == notice


async def test_texts_of_one_message_reach_the_template_as_lines_and_as_parts(one) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    body = {"model": "fake", "messages": [{"role": "user", "content": parts}], "max_tokens": 2}
    assert (await one.http.post(CHAT, json=body)).status_code == 200
    (message,) = one.tokenizer.chats[-1].messages
    assert (message.content, [*message.parts]) == ("one\ntwo", ["one", "two"])
    body["messages"] = [{"role": "user", "content": parts[:1]}]
    assert (await one.http.post(CHAT, json=body)).status_code == 200
    (message,) = one.tokenizer.chats[-1].messages
    assert (message.content, [*message.parts]) == ("one", [])
    given = [{"role": "user", "content": [{"type": "input_text", "text": text} for text in ("one", "two")]}]
    assert (await one.http.post("/v1/responses", json={"model": "fake", "input": given})).status_code == 200
    assert one.tokenizer.chats[-1].messages[0].content == "one\ntwo"
