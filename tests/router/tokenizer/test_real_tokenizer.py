"""Tool calls and reasoning from end to end: a tokenizer process with a Qwen-style template, the router, a scripted worker."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator

import grpc
import openai
import pytest
from tokenizers import Tokenizer

from sapwood.v1 import common_pb2, router_pb2, router_pb2_grpc
from sapwood_common.grammar.artefact import GrammarArtefact
from sapwood_common.network.channel import open_channel
from sapwood_router.app import RouterApplication
from sapwood_router.config import RouterConfig
from sapwood_testing.router.fake_worker import FakeWorker

TEMPLATE = """\
{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
</tools>
Return each call within <tool_call></tool_call> tags.<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
ARGUMENTS = '{"city": "Köln", "days": 2}'
THOUGHTS = "The user wants the weather 🌦. I call a tool."
CALLING = (
    f'{THOUGHTS}\n</think>\n\nLet me see.\n<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
)
ANSWER = "Sun, it says.\n</think>\n\nIt is sunny in Köln."
GAP = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"]
QUESTION = [{"role": "user", "content": "How is the weather in Köln?"}]


@pytest.fixture(scope="module")
def tokenizer_address(start_tokenizer) -> Iterator[str]:
    """Where ``python -m sapwood_tokenizer`` listens."""
    with start_tokenizer(TEMPLATE) as process:
        yield process.address


@pytest.fixture
async def worker(byte_tokenizer: Tokenizer) -> AsyncIterator[FakeWorker]:
    """Calls the tool first, and answers once the prompt has a tool's response."""

    def script(prompt: list[int]) -> list[int]:
        called = "<tool_response>" in byte_tokenizer.decode(list(prompt), skip_special_tokens=False)
        return byte_tokenizer.encode(ANSWER if called else CALLING).ids

    fake = FakeWorker()
    fake.script.tokens = script
    fake.script.delay = 0.001
    await fake.start()
    yield fake
    await fake.kill()


@pytest.fixture
async def router(tokenizer_address: str, worker: FakeWorker, wait_until) -> AsyncIterator[RouterApplication]:
    config = RouterConfig(
        port=0, http_port=0, tokenizer=tokenizer_address, workers=(worker.address,), health_interval=0.1, worker_silence=60,
        tokenizer_grace=60,
    )  # fmt: skip
    running = RouterApplication(config)
    await running.start()
    await wait_until(lambda: running.problem() is None)
    yield running
    await running.stop()


@pytest.fixture
async def client(router: RouterApplication) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"http://127.0.0.1:{router.http_port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as made:
        yield made


async def test_a_call_is_made_answered_and_followed_up(client, worker, byte_tokenizer) -> None:
    first = (await client.chat.completions.create(model="fake", messages=QUESTION, tools=TOOLS)).choices[0]
    assert first.finish_reason == "tool_calls"
    assert (first.message.reasoning_content, first.message.content) == (THOUGHTS, "Let me see.")
    (call,) = first.message.tool_calls
    assert (call.type, call.function.name, call.function.arguments) == ("function", "weather", ARGUMENTS)
    assert call.id.startswith("call_")
    messages = [*QUESTION, first.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "sun"}]
    second = (await client.chat.completions.create(model="fake", messages=messages, tools=TOOLS)).choices[0]
    assert (second.finish_reason, second.message.tool_calls) == ("stop", None)
    assert (second.message.reasoning_content, second.message.content) == ("Sun, it says.", "It is sunny in Köln.")
    prompt = byte_tokenizer.decode(list(worker.calls[-1].request.token_ids), skip_special_tokens=False)
    assert f"<tools>{json.dumps(TOOLS[0])}</tools>" in prompt
    assert f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>' in prompt
    assert f"<think>{THOUGHTS}</think>Let me see." in prompt
    assert prompt.endswith("<tool_response>sun</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n")


async def test_a_stream_joins_to_the_whole_answer(client, worker) -> None:
    for delay in (0.001, 0.02, 0.2):  # what the tokenizer is late with comes in one piece
        worker.script.delay = delay
        stream = await client.chat.completions.create(model="fake", messages=QUESTION, tools=TOOLS, stream=True)
        chunks = [chunk async for chunk in stream]
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert "".join(delta.model_extra.get("reasoning_content") or "" for delta in deltas) == THOUGHTS
        assert "".join(delta.content or "" for delta in deltas) == "Let me see."
        first, *rest = [part for delta in deltas for part in delta.tool_calls or ()]
        assert (first.index, first.type, first.function.name) == (0, "function", "weather")
        assert first.function.arguments == ""
        assert first.id.startswith("call_")
        assert "".join(part.function.arguments for part in rest) == ARGUMENTS
        assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["tool_calls"]
        if len(rest) > 1:
            break
    assert len(rest) > 1
    worker.script.delay = 0.001
    async with client.chat.completions.stream(model="fake", messages=QUESTION, tools=TOOLS) as helper:
        final = (await helper.get_final_completion()).choices[0]
    assert [(c.function.name, c.function.arguments) for c in final.message.tool_calls] == [("weather", ARGUMENTS)]


async def test_without_tools_a_call_is_text(client) -> None:
    for choice in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        answer = (await client.chat.completions.create(model="fake", messages=QUESTION, **choice)).choices[0]
        assert (answer.finish_reason, answer.message.tool_calls) == ("stop", None)
        assert "</tool_call>" in answer.message.content
        assert answer.message.reasoning_content == THOUGHTS


async def test_grpc_calls_tools_and_names_faults_in_tools(router, expect_error) -> None:
    turns = [common_pb2.ChatMessage(role="user", content="hi")]
    messages = router_pb2.ChatMessages(messages=turns)
    async with open_channel(f"127.0.0.1:{router.grpc_port}") as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        request = router_pb2.RouterGenerateRequest(messages=messages, tools=json.dumps(TOOLS))
        responses = [response async for response in stub.Generate(request)]
        assert "".join(response.reasoning for response in responses) == THOUGHTS
        assert "".join(response.text for response in responses) == "Let me see."
        first, *rest = [delta for response in responses for delta in response.tool_calls]
        assert first.name == "weather"
        assert first.arguments + "".join(delta.arguments for delta in rest) == ARGUMENTS
        for tools, field in (("[1]", "tools"), ('[{"function": {}}]', "tools[0].function.name")):
            request = router_pb2.RouterGenerateRequest(messages=messages, tools=tools)
            calls = stub.Generate(request)
            assert (await expect_error(calls.read(), grpc.StatusCode.INVALID_ARGUMENT))[1] == field


async def test_a_forced_call_is_compiled_in_the_models_own_format(client, worker, byte_tokenizer) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
    worker.script.tokens = lambda prompt: byte_tokenizer.encode(f"{THOUGHTS}</think>\n\n{call}").ids
    worker.script.ends_with_token = False
    answer = await client.chat.completions.create(model="fake", messages=QUESTION, tools=TOOLS, tool_choice="required")
    (found,) = answer.choices[0].message.tool_calls
    assert (found.function.name, found.function.arguments) == ("weather", '{"city": "Bonn"}')
    assert answer.choices[0].message.model_extra["reasoning_content"] == THOUGHTS
    lark = GrammarArtefact.from_bytes(worker.calls[-1].request.grammar.compiled).lark
    assert "<tool_call>" in lark
    assert "think>" in lark
    strict = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"minProperties": 3}}}]
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="fake", messages=QUESTION, tools=strict)
    assert caught.value.param == "tools[0].function.parameters"


async def test_a_gap_is_filled_and_ends_where_such_answers_end(client, router, worker, byte_tokenizer) -> None:
    prefix, suffix, middle, file = map(byte_tokenizer.token_to_id, GAP)

    def prompt(before: str, after: str) -> list[int]:
        first, last = (byte_tokenizer.encode(text).ids for text in (before, after))
        return [prefix, *first, suffix, *last, middle]

    worker.script.tokens = lambda prompt: [*byte_tokenizer.encode(" return").ids, file]
    asked = {"model": "fake", "suffix": " x\n"}
    answer = await client.completions.create(**asked, prompt=["def f(x):", ""], extra_body={"stop_token_ids": [7]})
    assert [choice.text for choice in answer.choices] == [" return"] * 2
    calls = [call.request for call in worker.calls]
    assert sorted(list(call.token_ids) for call in calls) == sorted([prompt("def f(x):", " x\n"), prompt("", " x\n")])
    assert {tuple(call.sampling.stop_token_ids) for call in calls} == {(7, prefix, suffix, middle, file)}
    stream = await client.completions.create(**asked, prompt="def", stream=True, extra_body={"ignore_eos": True})
    assert "".join([chunk.choices[0].text async for chunk in stream]) == " return"
    assert list(worker.calls[-1].request.token_ids) == prompt("def", " x\n")
    assert not worker.calls[-1].request.sampling.stop_token_ids
    async with open_channel(f"127.0.0.1:{router.grpc_port}") as channel:
        request = router_pb2.RouterGenerateRequest(text="def f(x):", suffix=" x\n")
        await router_pb2_grpc.RouterStub(channel).ExplainRoute(router_pb2.ExplainRouteRequest(request=request))
        found = [response async for response in router_pb2_grpc.RouterStub(channel).Generate(request)]
    assert "".join(response.text for response in found) == " return"
    assert list(worker.calls[-1].request.token_ids) == prompt("def f(x):", " x\n")


async def test_a_stop_string_does_not_end_an_answer_before_its_fewest_tokens(client, worker, byte_tokenizer) -> None:
    worker.script.tokens = lambda prompt: byte_tokenizer.encode("one. two. three.").ids
    asked = {"model": "fake", "prompt": "count", "stop": ".", "max_tokens": 99}
    for fewest, text in ((0, "one"), (3, "one"), (4, "one. two"), (9, "one. two. three"), (16, "one. two. three.")):
        answer = await client.completions.create(**asked, extra_body={"min_tokens": fewest})
        assert answer.choices[0].text == text, fewest
