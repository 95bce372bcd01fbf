import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sapwood.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from sapwood_common import errors
from sapwood_common.network.channel import open_channel, request_metadata
from sapwood_common.serving.server import ServiceServer
from sapwood_common.telemetry import logs as telemetry
from sapwood_net.http2.server.waiting_line import Rank

NAME = "sapwood.v1.Tokenizer"


class Echo(tokenizer_pb2_grpc.TokenizerServicer):
    """Tokenize answers the lengths; its first text can ask for a failure or for waiting."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.seen_request_id = ""

    async def Tokenize(self, request, context):  # noqa: N802
        self.seen_request_id = telemetry.request_id_var.get()
        match request.texts[0]:
            case "refuse":
                raise errors.InvalidArgumentError("texts must be nicer", field="texts")
            case "crash":
                raise ValueError("secret detail")
            case "wait":
                await self.release.wait()
        return tokenizer_pb2.TokenizeResponse(sequences=[common_pb2.TokenIds(ids=[len(t)]) for t in request.texts])

    async def Detokenize(self, request_iterator, context):  # noqa: N802
        async for request in request_iterator:
            yield tokenizer_pb2.DetokenizeResponse(outputs=[{"stream_id": item.stream_id} for item in request.inputs])

    async def ApplyChatTemplate(self, request, context):  # noqa: N802
        return tokenizer_pb2.ApplyChatTemplateResponse()

    async def GetInfo(self, request, context):  # noqa: N802
        return tokenizer_pb2.GetInfoResponse()


@pytest.fixture
async def running(implementation) -> AsyncIterator[tuple[ServiceServer, Echo, grpc.aio.Channel]]:
    server, echo = ServiceServer("127.0.0.1", 0, [NAME], implementation=implementation), Echo()
    tokenizer_pb2_grpc.add_TokenizerServicer_to_server(echo, server.grpc)
    port = await server.start()
    await server.set_serving(True)
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield server, echo, channel
        echo.release.set()
    await server.stop()


async def test_an_error_carries_its_status_and_field(running) -> None:
    _, _, channel = running
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await tokenizer_pb2_grpc.TokenizerStub(channel).Tokenize(tokenizer_pb2.TokenizeRequest(texts=["refuse"]))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    details = Status.FromString(dict(caught.value.trailing_metadata())["grpc-status-details-bin"])
    violation = BadRequest()
    assert details.details[0].Unpack(violation)
    assert violation.field_violations[0].field == "texts"


async def test_a_request_of_far_too_many_fields_is_refused_before_it_is_parsed(running) -> None:
    _, _, channel = running
    stub = tokenizer_pb2_grpc.TokenizerStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Tokenize(tokenizer_pb2.TokenizeRequest(texts=[""] * 300_000))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "the request has more than 131072 fields"
    await stub.Tokenize(tokenizer_pb2.TokenizeRequest(texts=["a" * 10_000] * 40))
    await stub.Tokenize(tokenizer_pb2.TokenizeRequest(texts=[""] * 40_000))  # as many clients' requests together


async def test_a_clients_request_may_have_fewer_fields(implementation) -> None:
    class Everybody:
        asks_for_keys = False

        def let_in(self, path: str, headers) -> None:
            """Anybody who comes."""

        def rank(self, headers, tenant: str | None) -> Rank:
            return Rank()

    server = ServiceServer("127.0.0.1", 0, [NAME], implementation=implementation, gate=Everybody())
    tokenizer_pb2_grpc.add_TokenizerServicer_to_server(Echo(), server.grpc)
    async with open_channel(f"127.0.0.1:{await server.start()}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await tokenizer_pb2_grpc.TokenizerStub(channel).Tokenize(tokenizer_pb2.TokenizeRequest(texts=[""] * 40_000))
        assert caught.value.details() == "the request has more than 32768 fields"
    await server.stop()


async def test_an_unforeseen_exception_is_internal_and_keeps_its_text_to_the_log(running, caplog) -> None:
    _, _, channel = running
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await tokenizer_pb2_grpc.TokenizerStub(channel).Tokenize(tokenizer_pb2.TokenizeRequest(texts=["crash"]))
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in caught.value.details()
    assert "secret detail" in caplog.text


async def test_bytes_that_are_not_utf8_or_no_message_are_the_clients_fault(running) -> None:
    _, _, channel = running
    call = channel.unary_unary(f"/{NAME}/Tokenize")
    good = tokenizer_pb2.TokenizeRequest(texts=["abc"]).SerializeToString()
    for raw, named in ((good.replace(b"abc", b"a\xffc"), "texts"), (b"\xff\xff\xff", "")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(raw)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert named in caught.value.details()
    stream = channel.stream_stream(f"/{NAME}/Detokenize")(iter([b"\xff\xff\xff"]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.read()
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_the_request_id_of_the_metadata_is_the_tasks(running) -> None:
    _, echo, channel = running
    stub = tokenizer_pb2_grpc.TokenizerStub(channel)
    await stub.Tokenize(tokenizer_pb2.TokenizeRequest(texts=["a"]), metadata=request_metadata("req-7"))
    assert echo.seen_request_id == "req-7"
    await stub.Tokenize(tokenizer_pb2.TokenizeRequest(texts=["a"]), metadata=request_metadata("bad id; DROP"))
    assert echo.seen_request_id == "-"


async def test_draining_finishes_the_running_call_refuses_new_ones_and_says_so_in_health(running) -> None:
    server, echo, channel = running
    stub, health = tokenizer_pb2_grpc.TokenizerStub(channel), health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=NAME)
    assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
    running_call = stub.Tokenize(tokenizer_pb2.TokenizeRequest(texts=["wait"]))
    await asyncio.wait_for(_until(lambda: echo.seen_request_id == "-"), 60)
    drain = asyncio.ensure_future(server.drain(120))
    await asyncio.wait_for(server.draining.wait(), 60)
    assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Tokenize(tokenizer_pb2.TokenizeRequest(texts=["a"]))
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert not drain.done()
    echo.release.set()
    assert (await running_call).sequences[0].ids == [4]
    assert await drain is True


async def test_draining_gives_up_after_its_timeout(running) -> None:
    server, echo, channel = running
    call = tokenizer_pb2_grpc.TokenizerStub(channel).Tokenize(tokenizer_pb2.TokenizeRequest(texts=["wait"]))
    await asyncio.wait_for(_until(lambda: echo.seen_request_id == "-"), 60)
    assert await server.drain(0.05) is False
    call.cancel()


async def test_a_port_in_use_is_a_configuration_error(implementation) -> None:
    server = ServiceServer("127.0.0.1", 0, [NAME], implementation=implementation)
    port = await server.start()
    with pytest.raises(errors.ConfigError, match=str(port)):
        await ServiceServer("127.0.0.1", port, [NAME], implementation=implementation).start()
    await server.stop()


async def _until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_a_malformed_health_request_is_refused_without_a_traceback(running, caplog, method) -> None:
    _, _, channel = running
    call = channel.unary_stream(f"/grpc.health.v1.Health/{method}")(b"\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not [record for record in caplog.records if record.exc_info or record.levelname in ("WARNING", "ERROR")]
