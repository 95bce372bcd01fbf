import asyncio
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tokenizers import Tokenizer

from sapwood.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from sapwood_common.status import from_rpc_error
from sapwood_tokenizer.vocab.loader import LoadedTokenizer


def one(stream_id: int, ids: list[int] = [], **fields: object) -> tokenizer_pb2.DetokenizeRequest:  # noqa: B006
    item = tokenizer_pb2.DetokenizeInput(stream_id=stream_id, token_ids=ids, **fields)  # type: ignore[arg-type]
    return tokenizer_pb2.DetokenizeRequest(inputs=[item])


def items(texts: list[str]) -> list[tokenizer_pb2.EncodeItem]:
    return [
        tokenizer_pb2.EncodeItem(id=number, tokenize=tokenizer_pb2.TokenizeRequest(texts=[text]))
        for number, text in enumerate(texts)
    ]


async def answers(call: grpc.aio.StreamStreamCall, wanted: Iterable[int]) -> dict[int, tokenizer_pb2.EncodeResult]:
    """What an Encode call says until the wanted items are answered."""
    found: dict[int, tokenizer_pb2.EncodeResult] = {}
    while not found.keys() >= set(wanted):
        found |= {result.id: result for result in (await call.read()).results}
    return found


def ids_of(result: tokenizer_pb2.EncodeResult) -> list[int]:
    return list(result.tokenize.sequences[0].ids)


OPEN = tokenizer_pb2.DetokenizeOptions()


async def test_many_clients_at_once_get_their_own_tokens(
    start_service: Callable, byte_level: Tokenizer, corpus
) -> None:
    service = start_service()
    async with grpc.aio.insecure_channel(service.address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerStub(channel)

        async def ask(number: int) -> None:
            texts = [f"{number} {text}" for text in corpus]
            response = await stub.Tokenize(tokenizer_pb2.TokenizeRequest(texts=texts))
            assert [list(s.ids) for s in response.sequences] == [byte_level.encode(text).ids for text in texts]

        await asyncio.gather(*(ask(number) for number in range(40)))
        texts = [f"{number} {text} over one call" for number in range(40) for text in corpus]
        call = stub.Encode()
        no_template = tokenizer_pb2.ApplyChatTemplateRequest(messages=[{"role": "user", "content": "x"}])
        last = tokenizer_pb2.EncodeItem(id=len(texts), apply_chat_template=no_template)
        await call.write(tokenizer_pb2.EncodeRequest(items=[*items(texts), last]))
        found = await answers(call, range(len(texts) + 1))
        assert [ids_of(found[number]) for number in range(len(texts))] == [byte_level.encode(t).ids for t in texts]
        assert (found[last.id].error.code, found[last.id].error.field) == (3, "messages")
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert len((await stub.Tokenize(tokenizer_pb2.TokenizeRequest())).sequences) == 0
        info = await stub.GetInfo(tokenizer_pb2.GetInfoRequest())
        assert (info.vocab_size, list(info.eos_token_ids), info.has_chat_template) == (400, [1], False)
        health = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="sapwood.v1.Tokenizer")
        )
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        async for answer in reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([asked])):
            names = {item.name for item in answer.list_services_response.service}
            assert {"sapwood.v1.Tokenizer", "grpc.health.v1.Health"} <= names
    assert service.stop() == 0


async def test_what_a_client_gets_wrong_is_named_and_the_service_goes_on(start_service: Callable) -> None:
    service = start_service("--max-text-bytes", "100")
    async with grpc.aio.insecure_channel(service.address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerStub(channel)
        too_long = tokenizer_pb2.TokenizeRequest(texts=["ok", "x" * 101])
        no_template = tokenizer_pb2.ApplyChatTemplateRequest(messages=[{"role": "user", "content": "x"}])
        for call, request, field in (
            (stub.Tokenize, too_long, "texts[1]"),
            (stub.ApplyChatTemplate, no_template, "messages"),
            (stub.ApplyChatTemplate, tokenizer_pb2.ApplyChatTemplateRequest(), "messages"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(request)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert from_rpc_error(caught.value).field == field
        raw = tokenizer_pb2.TokenizeRequest(texts=["abc"]).SerializeToString().replace(b"abc", b"\xff\xfe\xfd")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/sapwood.v1.Tokenizer/Tokenize")(raw)
        assert from_rpc_error(caught.value).field == "texts"
        assert (await stub.Tokenize(tokenizer_pb2.TokenizeRequest(texts=["still here"]))).sequences


async def test_special_tokens_offsets_and_limits_are_as_asked_and_the_caches_counted(
    start_service: Callable, byte_level: Tokenizer
) -> None:
    service = start_service("--max-text-tokens", "2000")
    text = "<|im_start|>user\n" + "many words, " * 20 + "<|im_end|>\n"
    async with grpc.aio.insecure_channel(service.address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerStub(channel)

        async def tokenize(text: str, **options: object) -> tokenizer_pb2.TokenizeResponse:
            return await stub.Tokenize(tokenizer_pb2.TokenizeRequest(texts=[text], **options))  # type: ignore[arg-type]

        assert not (await tokenize(text)).offsets
        await tokenize(text)
        assert list((await tokenize(text + "more")).sequences[0].ids) == byte_level.encode(text + "more").ids
        info = await stub.GetInfo(tokenizer_pb2.GetInfoRequest())
        assert (info.exact_cache.hits, info.exact_cache.misses, info.exact_cache.entries) == (1, 2, 2)
        assert (info.prefix_cache.hits, info.prefix_cache.entries) == (1, 1)
        reused = len(byte_level.encode(text).ids) - 1  # all but the line break, which no boundary ends
        assert info.prefix_cache.tokens_reused == reused
        assert 0 < info.prefix_cache.bytes < info.prefix_cache.capacity_bytes

        placed = await tokenize(text, return_offsets=True)
        places = list(zip(placed.offsets[0].starts, placed.offsets[0].ends, strict=True))
        assert places == byte_level.encode(text).offsets
        as_text = await tokenize(text, parse_special_tokens=False)
        assert not {0, 1} & set(as_text.sequences[0].ids), "no special token is read"
        assert byte_level.decode(list(as_text.sequences[0].ids)) == text

        long = tokenizer_pb2.TokenizeRequest(texts=["ok", "\x00" * 11], max_tokens=10)
        for request, field in ((long, "texts[1]"), (tokenizer_pb2.TokenizeRequest(texts=["\x00" * 2001]), "texts[0]")):
            with pytest.raises(grpc.aio.AioRpcError, match=r"prompt is too long: \d+ (tokens|bytes) > ") as caught:
                await stub.Tokenize(request)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert from_rpc_error(caught.value).field == field


async def test_streams_of_one_call_do_not_mix_and_one_that_fails_fails_alone(
    common_service: Any, byte_level: Tokenizer, corpus: list[str]
) -> None:
    async with grpc.aio.insecure_channel(common_service.address) as channel:
        call = tokenizer_pb2_grpc.TokenizerStub(channel).Detokenize()
        ids = {number: byte_level.encode(text).ids for number, text in enumerate(corpus)}
        await call.write(
            tokenizer_pb2.DetokenizeRequest(inputs=[{"stream_id": n, "options": OPEN} for n in (*ids, 99, 98)])
        )
        for at in range(max(map(len, ids.values()))):
            items = [{"stream_id": n, "token_ids": all_ids[at : at + 1]} for n, all_ids in ids.items()]
            if at == 1:
                items.append({"stream_id": 99, "token_ids": [400]})
                items.append({"stream_id": 98, "options": OPEN})
            await call.write(tokenizer_pb2.DetokenizeRequest(inputs=items))
        await call.write(tokenizer_pb2.DetokenizeRequest(inputs=[{"stream_id": n, "end": True} for n in ids]))
        texts, ended, failed = dict.fromkeys(ids, ""), set(), {}
        while len(ended) < len(ids):
            for output in (await call.read()).outputs:
                if output.HasField("error"):
                    failed[output.stream_id] = (output.error.code, output.error.field)
                    continue
                texts[output.stream_id] += output.text
                if output.ended:
                    ended.add(output.stream_id)
                    assert output.tokens_consumed == len(ids[output.stream_id])
        assert list(texts.values()) == corpus
        assert failed == {99: (3, "token_ids"), 98: (3, "options")}
        call.cancel()


async def test_a_runaway_template_is_stopped_while_others_are_served(start_service: Callable, tmp_path) -> None:
    template = tmp_path / "endless.jinja"
    template.write_text("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
    for seconds in (3, 30):  # where the machine is slow, the first may pass before the others are served
        service = start_service("--chat-template", str(template), "--template-timeout", str(seconds))
        async with grpc.aio.insecure_channel(service.address) as channel:
            stub = tokenizer_pb2_grpc.TokenizerStub(channel)
            request = tokenizer_pb2.ApplyChatTemplateRequest(messages=[{"role": "user", "content": "x"}])
            gone = stub.ApplyChatTemplate(request)
            slow = asyncio.ensure_future(stub.ApplyChatTemplate(request))
            await asyncio.sleep(0.1)
            gone.cancel()
            await stub.Tokenize(tokenizer_pb2.TokenizeRequest(texts=["others"]))
            served = not slow.done()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await slow
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert f"did not end within {seconds} s" in str(caught.value.details())
            assert from_rpc_error(caught.value).field == "messages"
        assert service.stop() == 0
        if served:
            break
    assert served


async def test_floods_are_refused_and_the_service_goes_on(start_service: Callable, byte_level: Tokenizer) -> None:
    service = start_service("--max-open-streams", "50", "--max-text-bytes", "1000")
    async with grpc.aio.insecure_channel(service.address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerStub(channel)
        messages = [{"role": "user", "content": ""}] * 1000
        for call, request, field in (
            (stub.Tokenize, tokenizer_pb2.TokenizeRequest(texts=[""] * 20_000), "texts"),
            (stub.ApplyChatTemplate, tokenizer_pb2.ApplyChatTemplateRequest(messages=messages), "messages"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(request)
            assert (caught.value.code(), from_rpc_error(caught.value).field) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                field,
            )
        call = stub.Detokenize()
        inputs = [{"stream_id": n, "options": OPEN, "token_ids": [70]} for n in range(300)]
        await call.write(tokenizer_pb2.DetokenizeRequest(inputs=inputs))
        outputs = []
        while len(outputs) < 300:
            outputs += (await call.read()).outputs
        assert [output.error.code for output in outputs] == [0] * 50 + [8] * 250
        await call.write(one(7, byte_level.encode("many tokens " * 5000).ids, end=True))
        text = ""
        while True:
            outputs = (await call.read()).outputs
            text += "".join(output.text for output in outputs)
            if outputs[-1].ended:
                break
        assert text.endswith("many tokens " * 5000)
        call.cancel()
    assert service.stop() == 0


async def test_the_demo_model_is_served(
    start_service: Callable, demo_model: Path, demo: LoadedTokenizer, corpus: list[str]
) -> None:
    service = start_service("--model", str(demo_model))
    async with grpc.aio.insecure_channel(service.address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerStub(channel)
        response = await stub.Tokenize(tokenizer_pb2.TokenizeRequest(texts=["The capital of France is", *corpus]))
        assert list(response.sequences[0].ids) == [2, 818, 5279, 529, 7001, 563]
        for text, sequence in zip(corpus, response.sequences[1:], strict=True):
            assert demo.tokenizer.decode(sequence.ids) == text
        nothing = tokenizer_pb2.TokenizeRequest(texts=[""], add_special_tokens=False)
        assert list((await stub.Tokenize(nothing)).sequences[0].ids) == []
        chat = tokenizer_pb2.ApplyChatTemplateRequest(messages=[{"role": "user", "content": "Hi"}])
        answer = await stub.ApplyChatTemplate(chat)
        assert answer.text == "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"
        assert list(answer.tokens.ids) == demo.tokenizer.encode(answer.text, add_special_tokens=False).ids
        assert list(answer.tokens.ids).count(2) == 1
        info = await stub.GetInfo(tokenizer_pb2.GetInfoRequest())
        assert (info.vocab_size, info.bos_token_id, list(info.eos_token_ids)) == (262_144, 2, [1, 106])
    assert service.stop() == 0


async def test_half_a_surrogate_pair_in_json_is_refused(start_service: Callable, tmp_path) -> None:
    template = tmp_path / "calls.jinja"
    template.write_text("{{ messages | tojson }}{{ tools | tojson }}")
    service = start_service("--chat-template", str(template))
    call = {"id": "1", "name": "f", "arguments": '{"a": "\\ud800"}'}
    async with grpc.aio.insecure_channel(service.address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerStub(channel)
        for request in (
            tokenizer_pb2.ApplyChatTemplateRequest(messages=[{"role": "assistant", "tool_calls": [call]}]),
            tokenizer_pb2.ApplyChatTemplateRequest(
                messages=[{"role": "user"}], tools='[{"type": "function", "function": {"name": "\\udc00"}}]'
            ),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ApplyChatTemplate(request)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert "surrogate" in str(caught.value.details())


async def test_a_stop_string_ends_its_stream_and_later_tokens_are_ignored(
    common_service: Any, byte_level: Tokenizer
) -> None:
    async with grpc.aio.insecure_channel(common_service.address) as channel:
        call = tokenizer_pb2_grpc.TokenizerStub(channel).Detokenize()
        await call.write(one(1, byte_level.encode("one two three").ids, options={"stop": ["two"]}))
        (output,) = (await call.read()).outputs
        assert (output.text, output.ended, output.stop_match) == ("one ", True, "two")
        await call.write(one(1, [5, 6], end=True))
        for stop in ([""], ["x"] * 17, ["x" * 5000]):
            await call.write(one(2, options={"stop": stop}))
            (output,) = (await call.read()).outputs
            assert (output.error.code, output.error.field) == (3, "options.stop")
        call.cancel()


async def test_sigterm_lets_open_streams_finish_and_refuses_new_calls(
    start_service: Callable, byte_level: Tokenizer
) -> None:
    service = start_service()
    async with grpc.aio.insecure_channel(service.address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerStub(channel)
        busy, idle, encoding = stub.Detokenize(), stub.Detokenize(), stub.Encode()
        ids = byte_level.encode("first second").ids
        await busy.write(one(1, ids[:2], options=OPEN))
        text = (await busy.read()).outputs[0].text
        await idle.write(one(1, options=OPEN, end=True))
        assert (await idle.read()).outputs[0].ended
        long = "long " * 20_000
        await encoding.write(tokenizer_pb2.EncodeRequest(items=items([long, "short"])))
        found = await answers(encoding, [1])
        service.process.send_signal(signal.SIGTERM)
        found |= await answers(encoding, {0} - found.keys())
        assert ids_of(found[0]) == byte_level.encode(long).ids
        assert await encoding.read() is grpc.aio.EOF
        assert await idle.read() is grpc.aio.EOF, "a call without streams ends at once"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Tokenize(tokenizer_pb2.TokenizeRequest(texts=["late"]))
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert service.process.poll() is None
        await busy.write(one(1, ids[2:], end=True))
        while True:
            output = (await busy.read()).outputs[0]
            text += output.text
            if output.ended:
                break
        assert text == "first second"
        assert await busy.read() is grpc.aio.EOF
    service.process.communicate(timeout=60)
    assert service.process.returncode == 0


def test_a_model_that_is_not_there_is_one_line_and_exit_code_1(tmp_path) -> None:
    import subprocess
    import sys

    command = [sys.executable, "-m", "sapwood_tokenizer", "--model", str(tmp_path / "none.gguf"), "--port", "0"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "none.gguf" in done.stderr
    assert "Traceback" not in done.stderr
