"""What an answer must match: both edges' words for it, and what of it reaches tokenizer and worker."""

import asyncio
import json

import grpc

from sapwood.v1 import common_pb2, router_pb2, tokenizer_pb2
from sapwood_testing.router.fake_tokenizer import encode

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def schema_format(**fields) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, **fields}}


async def test_a_format_becomes_a_grammar_for_the_worker(cluster) -> None:
    tag = {"type": "structural_tag", "triggers": ["<a>"], "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}]}
    for fields, kind, text, lenient in (
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}', False),
        ({"response_format": schema_format(strict=True)}, "json_schema", SCHEMA, False),
        ({"response_format": schema_format()}, "json_schema", SCHEMA, True),
        ({"response_format": schema_format(schema=None)}, "json_schema", '{"type": "object"}', False),
        ({"response_format": tag}, "structural_tag", tag, False),
        ({"regex": "[0-9]+"}, "regex", "[0-9]+", False),
        ({"ebnf": 'root ::= "a"'}, "ebnf", 'root ::= "a"', False),
    ):
        for path, prompt in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "hi"})):
            response = await cluster.http.post(path, json={**prompt, **fields})
            assert response.status_code == 200, response.text
            asked = cluster.tokenizer.grammars[-1]
            assert asked.grammar.WhichOneof("grammar") == kind
            found = getattr(asked.grammar, kind)
            assert (found if isinstance(text, str) else json.loads(found)) == text
            if isinstance(text, dict):
                assert found.index('"b"') < found.index('"a"') if kind == "json_schema" else True
            assert asked.grammar.options.lenient == lenient
            assert asked.reasoning_parser == ("fake_thoughts" if path == CHAT else "")
            assert not asked.HasField("tool_calls")
            name = f"compiled {len(cluster.tokenizer.grammars)}".encode()
            (request,) = [c.request for c in cluster.calls() if c.request.grammar.compiled == name]
            assert request.output_tokens == 0


async def test_text_is_no_format(cluster) -> None:
    for neutral in (None, {"type": "text"}):
        for path, prompt in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "hi"})):
            assert (await cluster.http.post(path, json={**prompt, "response_format": neutral})).status_code == 200
    assert not cluster.tokenizer.grammars
    assert not any(call.request.HasField("grammar") for call in cluster.calls())


async def test_what_is_wrong_is_named(cluster) -> None:
    name = "response_format.json_schema"
    for fields, param in (
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, name),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, f"{name}.name"),
        ({"response_format": schema_format(schema=[])}, f"{name}.schema"),
        ({"response_format": schema_format(strict="yes")}, f"{name}.strict"),
        ({"response_format": schema_format(schema={"type": "bad"})}, f"{name}.schema"),
        ({"regex": "bad"}, "regex"),
        ({"ebnf": "bad"}, "ebnf"),
        ({"regex": 5}, "regex"),
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex"),
        ({"response_format": {"type": "structural_tag", "format": "bad"}}, "response_format"),
    ):
        for path, prompt in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "hi"})):
            response = await cluster.http.post(path, json={**prompt, **fields})
            assert (response.status_code, response.json()["error"]["param"]) == (400, param), fields
    assert not cluster.calls()


async def test_grpc_takes_grammars_and_tools_and_names_what_is_wrong(cluster, expect_error) -> None:
    grammar = common_pb2.Grammar(regex="a+", options=common_pb2.GrammarOptions(any_whitespace=False, lenient=True))
    assert await cluster.generate("hi", grammar=grammar)
    assert cluster.tokenizer.grammars[-1].grammar == grammar
    messages = router_pb2.ChatMessages(messages=[common_pb2.ChatMessage(role="user", content="hi")])
    tools = '[{"type": "function", "function": {"name": "f"}}]'

    def chat(**fields) -> router_pb2.RouterGenerateRequest:
        return router_pb2.RouterGenerateRequest(messages=messages, **fields)

    required = chat(tools=tools, tool_choice=router_pb2.TOOL_CHOICE_REQUIRED, parallel_tool_calls=False)
    assert [response async for response in cluster.stub.Generate(required)]
    asked = cluster.tokenizer.grammars[-1].tool_calls
    assert (asked.required, asked.parallel, asked.name) == (True, False, "")
    assert [response async for response in cluster.stub.Generate(chat(tools=tools, tool_choice_function="f"))]
    assert cluster.tokenizer.grammars[-1].tool_calls.name == "f"
    assert [r async for r in cluster.stub.Generate(chat(tools=tools, tool_choice=router_pb2.TOOL_CHOICE_NONE))]
    assert len(cluster.tokenizer.grammars) == 3
    for request, field in (
        (chat(grammar=common_pb2.Grammar()), "grammar"),
        (chat(grammar=common_pb2.Grammar(compiled=b"x")), "grammar.compiled"),
        (chat(grammar=common_pb2.Grammar(regex="bad")), "grammar.regex"),
        (chat(tool_choice=router_pb2.TOOL_CHOICE_REQUIRED), "tools"),
        (chat(tools=tools, tool_choice=router_pb2.TOOL_CHOICE_AUTO, tool_choice_function="f"), "tool_choice_function"),
    ):
        assert (await expect_error(cluster.stub.Generate(request).read(), INVALID))[1] == field


async def test_a_generation_that_its_grammar_ends_keeps_its_last_token(cluster) -> None:
    for worker in cluster.workers:
        worker.script.tokens = lambda prompt: encode('{"b": 1}')[1:]
        worker.script.ends_with_token = False
    answer = await cluster.openai.chat.completions.create(
        model="fake", messages=HI, response_format=schema_format(strict=True)
    )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ('{"b": 1}', "stop")
    assert answer.usage.completion_tokens == len('{"b": 1}')


async def test_a_resumed_generation_tells_how_far_its_grammar_is(cluster) -> None:
    text = '{"a": "' + "x" * 200 + '"}'
    for worker in cluster.workers:
        worker.script.tokens = lambda prompt: encode(text)[1:][max(0, len(prompt) - len(encode("hi"))) :]
        worker.script.delay = 0.002
    call = cluster.stub.Generate(router_pb2.RouterGenerateRequest(text="hi", grammar=common_pb2.Grammar(regex=".+")))
    stream = aiter(call)
    responses = [await anext(stream) for _ in range(20)]
    running = next(worker for worker in cluster.workers if any(c.outcome == "running" for c in worker.calls))
    await running.kill()
    responses += [response async for response in stream]
    assert "".join(response.text for response in responses) == text
    (resumed,) = [call.request for worker in cluster.workers if worker is not running for call in worker.calls]
    assert 0 < resumed.output_tokens == len(resumed.token_ids) - len(encode("hi"))


async def test_a_requests_choices_that_ask_together_have_one_grammar_compiled(cluster) -> None:
    for path, prompt in ((CHAT, {"messages": HI, "n": 32}), (COMPLETIONS, {"prompt": ["hi"] * 32})):
        before = len(cluster.tokenizer.grammars)
        response = await cluster.http.post(path, json={**prompt, "regex": "[0-9]+"})
        assert response.status_code == 200, response.text
        assert len(response.json()["choices"]) == 32
        assert len(cluster.tokenizer.grammars) - before <= 4
        assert len({call.request.grammar.compiled for call in cluster.calls()[-32:]}) <= 4


async def test_requests_to_which_clients_gave_one_id_keep_to_their_own_deadlines(cluster, monkeypatch) -> None:
    client = cluster.router._tokenizers.of(None).client
    deadlines, gate = [], asyncio.Event()

    async def call(method: object, request: object, request_id: str, deadline: float) -> object:
        if request is asked_for:  # the router may still be reading the vocabulary
            deadlines.append(deadline)
        await gate.wait()
        return tokenizer_pb2.CompileGrammarResponse(compiled=b"c")

    monkeypatch.setattr(client, "_call", call)
    asked_for = tokenizer_pb2.CompileGrammarRequest(grammar=common_pb2.Grammar(regex="a"))
    asked = [asyncio.ensure_future(client.compile_grammar(asked_for, "id", deadline)) for deadline in (1.0, 1.0, 2.0)]
    await asyncio.sleep(0.01)
    gate.set()
    assert {(await each).compiled for each in asked} == {b"c"}
    assert deadlines == [1.0, 2.0]


async def test_what_goes_with_each_of_many_choices_is_counted_with_their_prompts(cluster) -> None:
    for more, fits, too_much in (
        ({"regex": "a" * 3000}, 1000, 1024 * 4),
        ({"stop": ["a" * 4000] * 2}, 256, 1024),
        ({"allowed_token_ids": list(range(2000))}, 256, 1024),
    ):
        for count in (fits, too_much):
            prompts = {"prompt": "hi", "n": 128} if count > 1024 else {"prompt": ["hi"] * count}
            more_text = {"regex": "a" * 40_000} if count > 1024 else more
            answer = await cluster.http.post(COMPLETIONS, json={**prompts, **more_text, "max_tokens": 1})
            assert answer.status_code == (200 if count == fits else 400), (more.keys(), count, answer.text)
            if count != fits:
                assert "the prompts and what goes with each" in answer.json()["error"]["message"]


async def test_log_probabilities_of_a_prompt_count_with_it_as_often_as_it_is_continued(cluster) -> None:
    asked = {"prompt": "a" * 4000, "max_tokens": 1, "prompt_logprobs": 20}
    assert (await cluster.http.post(COMPLETIONS, json=asked | {"n": 2})).status_code == 200
    answer = await cluster.http.post(COMPLETIONS, json=asked | {"n": 100})
    assert (
        answer.status_code == 400 and "20 log probabilities of it as often again" in answer.json()["error"]["message"]
    )
