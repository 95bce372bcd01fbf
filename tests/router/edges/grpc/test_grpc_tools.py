"""Tool calls and reasoning over gRPC, also while the tokenizer restarts."""

import asyncio

import grpc

from sapwood.v1 import common_pb2, router_pb2
from sapwood_testing.router.fake_tokenizer import encode
from sapwood_text.tool_parser.tools import Tools

TOOLS = '[{"type": "function", "function": {"name": "f"}}]'
INVALID = grpc.StatusCode.INVALID_ARGUMENT
THOUGHTS = "Überlegung 🌲 " * 30
ARGUMENTS = ['{"a": "' + "wörd " * 40 + '"}', '{"b": ' + "9" * 200 + "}"]
OUTPUT = (
    f"<think>{THOUGHTS}</think>" + "Text é. " * 30 + f"<call f>{ARGUMENTS[0]}</call>mid<call g>{ARGUMENTS[1]}</call>!"
)


def chat(content: str = "hi", tools: str = TOOLS, **fields) -> router_pb2.RouterGenerateRequest:
    turns = [common_pb2.ChatMessage(role="user", content=content)]
    return router_pb2.RouterGenerateRequest(messages=router_pb2.ChatMessages(messages=turns), tools=tools, **fields)


def check_whole(responses) -> None:
    assert "".join(r.reasoning for r in responses) == THOUGHTS
    assert "".join(r.text for r in responses) == "Text é. " * 30 + "mid!"
    deltas = [delta for r in responses for delta in r.tool_calls]
    for index, name in enumerate("fg"):
        first, *rest = [delta for delta in deltas if delta.index == index]
        assert (first.name, bool(first.id)) == (name, True)
        assert not any(delta.id or delta.name for delta in rest)
        assert first.arguments + "".join(delta.arguments for delta in rest) == ARGUMENTS[index]
    assert [token for r in responses for token in r.token_ids] == [*encode(OUTPUT)[1:], 1]
    assert responses[-1].finish_reason == common_pb2.FINISH_REASON_STOP
    assert responses[-1].usage.completion_tokens == len(encode(OUTPUT))


async def test_reasoning_and_calls_stream_beside_the_text(cluster) -> None:
    for worker in cluster.workers:
        worker.script.tokens = lambda prompt: encode(OUTPUT)[1:]
    check_whole([r async for r in cluster.stub.Generate(chat(request_id="one"))])
    options = cluster.tokenizer.parsed[-1]
    assert options.tools == Tools.from_json(TOOLS)
    assert options.id_seed == cluster.calls()[-1].request.request_id
    responses = [r async for r in cluster.stub.Generate(chat(tools=""))]
    assert not any(r.tool_calls for r in responses)
    assert "".join(r.text for r in responses).endswith("</call>!")
    await cluster.idle()


async def test_a_restart_of_the_tokenizer_changes_nothing_in_any_channel(cluster) -> None:
    for worker in cluster.workers:
        worker.script.tokens = lambda prompt: encode(OUTPUT)[1:]
        worker.script.delay = 0.001
    streams = [aiter(cluster.stub.Generate(chat())) for _ in range(4)]
    so_far = [[await anext(stream)] for stream in streams]

    async def rest(number: int) -> None:
        so_far[number] += [response async for response in streams[number]]

    running = [asyncio.ensure_future(rest(number)) for number in range(4)]
    for share in (0.2, 0.5, 0.7, 0.85):
        async with asyncio.timeout(60):
            while not all(sum(len(r.token_ids) for r in got) > share * len(encode(OUTPUT)) for got in so_far):
                await asyncio.sleep(0.005)
        await cluster.tokenizer.kill()
        await asyncio.sleep(0.05)
        await cluster.tokenizer.start()
    await asyncio.gather(*running)
    for responses in so_far:
        check_whole(responses)
    await cluster.idle()


async def test_all_of_a_conversation_reaches_the_tokenizer(cluster) -> None:
    turns = [
        common_pb2.ChatMessage(
            role="assistant",
            tool_calls=[common_pb2.ToolCall(id="1", name="f", arguments="{}")],
            reasoning="why",
        ),
        common_pb2.ChatMessage(role="tool", content="", name="f", tool_call_id="1"),
    ]
    request = router_pb2.RouterGenerateRequest(
        messages=router_pb2.ChatMessages(messages=turns), template_variables='{"enable_thinking": false}'
    )
    assert [r async for r in cluster.stub.Generate(request)]
    assert list(cluster.tokenizer.chats[-1].messages) == turns
    assert cluster.tokenizer.chats[-1].template_variables == '{"enable_thinking": false}'


async def test_a_wrong_field_is_refused_by_name(cluster, expect_error) -> None:
    for request, field in [
        (router_pb2.RouterGenerateRequest(text="a", tools=TOOLS), "tools"),
        (router_pb2.RouterGenerateRequest(tokens=common_pb2.TokenIds(ids=[5]), tools=TOOLS), "tools"),
        (router_pb2.RouterGenerateRequest(text="a", template_variables="{}"), "template_variables"),
        (chat(template_variables="{"), "template_variables"),
        (chat(template_variables="[]"), "template_variables"),
        (chat(template_variables='{"messages": []}'), "template_variables"),
        (chat(tools="{"), "tools"),
        (chat(tools="{}"), "tools"),
    ]:
        assert (await expect_error(cluster.stub.Generate(request).read(), INVALID))[1] == field
