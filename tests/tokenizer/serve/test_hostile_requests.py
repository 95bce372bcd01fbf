"""What must not hold up others: huge texts, templates that run on, expressions that explode. Real processes."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from sapwood.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from sapwood_common.network.channel import open_channel
from sapwood_common.status import from_rpc_error

# The fifth nested loop would take years.
ENDLESS = "{% for a in range(99999) %}" * 5 + "{% endfor %}" * 5
GIANT = "{% for m in messages %}{% for a in range(99999) %}{{ m.content * 1000 }}{% endfor %}{% endfor %}"
PRYING = "{{ messages.__class__.__base__.__subclasses__() }}"


async def serve_others_meanwhile(address: str, hostile: asyncio.Future) -> int:
    """Requests answered, one after another on a connection of their own, until the hostile one has ended."""
    answered = 0
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = tokenizer_pb2_grpc.TokenizerStub(channel)
        while not hostile.done():
            text = f"another's text {answered}"
            assert (await stub.Tokenize(tokenizer_pb2.TokenizeRequest(texts=[text]))).sequences[0].ids
            answered += 1
    return answered


async def refused(address: str, call: Callable, code: grpc.StatusCode) -> tuple[str, int]:
    """The field that a refusal names, and how many requests of others were answered meanwhile."""
    async with open_channel(address) as channel:
        hostile = asyncio.ensure_future(call(tokenizer_pb2_grpc.TokenizerStub(channel)))
        answered = await serve_others_meanwhile(address, hostile)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await hostile
        assert caught.value.code() == code, caught.value
        return from_rpc_error(caught.value).field or "", answered


def chat(**fields: object) -> tokenizer_pb2.ApplyChatTemplateRequest:
    return tokenizer_pb2.ApplyChatTemplateRequest(messages=[{"role": "user", "content": "x" * 1000}], **fields)  # type: ignore[arg-type]


async def test_a_text_of_fifty_megabytes_is_refused_while_others_are_served(
    start_service: Callable, common_service: Any
) -> None:
    huge = "x" * 50_000_000
    requests = {
        "texts[0]": lambda stub: stub.Tokenize(tokenizer_pb2.TokenizeRequest(texts=[huge])),
        "messages": lambda stub: stub.ApplyChatTemplate(
            tokenizer_pb2.ApplyChatTemplateRequest(messages=[{"role": "user", "content": huge}])
        ),
    }
    template = Path(__file__).parents[1] / "template" / "templates" / "gemma3.jinja"
    chatting = start_service("--chat-template", str(template))
    for field, call in requests.items():
        address = (common_service if field == "texts[0]" else chatting).address
        named, _ = await refused(address, call, grpc.StatusCode.INVALID_ARGUMENT)
        assert named == field


@pytest.mark.parametrize("source", [ENDLESS, GIANT, PRYING])
async def test_a_hostile_template_is_stopped_while_others_are_served(
    start_service: Callable, tmp_path: Path, source: str
) -> None:
    (tmp_path / "hostile.jinja").write_text(source)
    service = start_service("--chat-template", str(tmp_path / "hostile.jinja"), "--template-timeout", "1")
    named, answered = await refused(
        service.address, lambda stub: stub.ApplyChatTemplate(chat()), grpc.StatusCode.INVALID_ARGUMENT
    )
    assert named == "messages"
    if source == ENDLESS:
        assert answered > 0
        _, answered = await refused(
            service.address, lambda stub: stub.ApplyChatTemplate(chat(), timeout=0.5), grpc.StatusCode.DEADLINE_EXCEEDED
        )
        assert answered > 0


async def test_an_expression_that_explodes_is_an_error_while_others_are_served(
    start_service: Callable, byte_level: Tokenizer, tmp_path: Path
) -> None:
    library = Tokenizer.from_str(byte_level.to_str())
    words = pre_tokenizers.Split(Regex(r"(a+)+b|[\s\S]"), behavior="isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    (tmp_path / "exploding").mkdir()
    library.save(str(tmp_path / "exploding" / "tokenizer.json"))
    service = start_service("--model", str(tmp_path / "exploding"))
    texts = ["fine", "a" * 60]
    named, _ = await refused(
        service.address,
        lambda stub: stub.Tokenize(tokenizer_pb2.TokenizeRequest(texts=texts)),
        grpc.StatusCode.INVALID_ARGUMENT,
    )
    assert named == "texts[1]"


async def test_stop_strings_that_would_make_an_expression_explode_are_only_strings(
    common_service: Any, byte_level: Tokenizer
) -> None:
    stops = ["(a+)+$", "a" * 1000 + "b", "a" * 999 + "c", ".*" * 400]
    ids = byte_level.encode("a" * 20_000).ids
    async with open_channel(common_service.address) as channel:
        call = tokenizer_pb2_grpc.TokenizerStub(channel).Detokenize()
        await call.write(
            tokenizer_pb2.DetokenizeRequest(
                inputs=[{"stream_id": 1, "options": {"stop": stops}, "token_ids": ids, "end": True}]
            )
        )
        text = ""
        async for response in call:
            text += "".join(output.text for output in response.outputs)
            if response.outputs[-1].ended:
                break
        assert text == "a" * 20_000
        call.cancel()
