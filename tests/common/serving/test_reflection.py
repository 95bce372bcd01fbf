"""Both versions of server reflection, asked directly and by the clients that people have: grpcurl (v1alpha) and buf (v1)."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2 as pb

from sapwood.v1 import router_pb2, tokenizer_pb2, worker_pb2
from sapwood_common.serving.server import ServiceServer

FILES = (router_pb2, tokenizer_pb2, worker_pb2)
"""Imported, so that the pool of descriptors has their services."""
OURS = {"sapwood.v1.Router", "sapwood.v1.Tokenizer", "sapwood.v1.Worker"}
STANDARD = {
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
}


@pytest.fixture
async def address() -> AsyncIterator[str]:
    server = ServiceServer("127.0.0.1", 0, sorted(OURS))
    port = await server.start()
    await server.set_serving(True)
    yield f"127.0.0.1:{port}"
    await server.stop()


@pytest.fixture(params=["v1", "v1alpha"])
async def ask(request: pytest.FixtureRequest, address: str) -> AsyncIterator[Any]:
    """Asks one version of reflection; several requests on one call."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream(
            f"/grpc.reflection.{request.param}.ServerReflection/ServerReflectionInfo",
            request_serializer=pb.ServerReflectionRequest.SerializeToString,
            response_deserializer=pb.ServerReflectionResponse.FromString,
        )

        async def answers(*requests: pb.ServerReflectionRequest) -> list[Any]:
            found = [answer async for answer in call(iter(requests))]
            assert [answer.original_request for answer in found] == list(requests)
            return found

        yield answers


def files_in(answer: Any) -> dict[str, descriptor_pb2.FileDescriptorProto]:
    raw = answer.file_descriptor_response.file_descriptor_proto
    return {file.name: file for file in map(descriptor_pb2.FileDescriptorProto.FromString, raw)}


async def test_every_service_is_listed_and_described_with_all_that_it_imports(ask: Any) -> None:
    (answer,) = await ask(pb.ServerReflectionRequest(list_services="", host="here"))
    listed = [service.name for service in answer.list_services_response.service]
    assert listed == sorted(OURS | STANDARD)
    assert answer.valid_host == "here"
    for answer in await ask(*(pb.ServerReflectionRequest(file_containing_symbol=name) for name in listed)):
        name = answer.original_request.file_containing_symbol
        pool = descriptor_pool.DescriptorPool()
        for file in reversed(files_in(answer).values()):
            pool.AddSerializedFile(file.SerializeToString())
        assert pool.FindServiceByName(name).methods


@pytest.mark.parametrize(
    ("symbol", "file"),
    [
        ("sapwood.v1.Router.Generate", "sapwood/v1/router.proto"),
        ("sapwood.v1.Worker.Session", "sapwood/v1/worker.proto"),
        ("sapwood.v1.RouterGenerateRequest", "sapwood/v1/router.proto"),
        ("sapwood.v1.RouterGenerateRequest.sampling", "sapwood/v1/router.proto"),
        ("sapwood.v1.SamplingParams", "sapwood/v1/common.proto"),
        ("sapwood.v1.ToolChoice", "sapwood/v1/router.proto"),
        ("grpc.health.v1.HealthCheckResponse.ServingStatus", "grpc_health/v1/health.proto"),
    ],
)
async def test_a_symbol_of_any_kind_leads_to_its_file(ask: Any, symbol: str, file: str) -> None:
    by_symbol, by_name = await ask(
        pb.ServerReflectionRequest(file_containing_symbol=symbol), pb.ServerReflectionRequest(file_by_filename=file)
    )
    assert next(iter(files_in(by_symbol))) == file
    assert files_in(by_symbol) == files_in(by_name)


async def test_what_is_not_there_is_an_error_of_that_request_alone(ask: Any) -> None:
    missing = [
        pb.ServerReflectionRequest(file_containing_symbol="sapwood.v1.Router.Nothing"),
        pb.ServerReflectionRequest(file_containing_symbol=""),
        pb.ServerReflectionRequest(file_by_filename="sapwood/v2/router.proto"),
        pb.ServerReflectionRequest(all_extension_numbers_of_type="sapwood.v1.Nothing"),
        pb.ServerReflectionRequest(
            file_containing_extension=pb.ExtensionRequest(containing_type="sapwood.v1.TokenIds", extension_number=1)
        ),
    ]
    empty = pb.ServerReflectionRequest()
    *errors, nothing, listed = await ask(*missing, empty, pb.ServerReflectionRequest(list_services="*"))
    codes = [answer.error_response.error_code for answer in errors]
    assert codes == [grpc.StatusCode.NOT_FOUND.value[0]] * len(missing)
    assert nothing.error_response.error_code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert len(listed.list_services_response.service) == len(OURS | STANDARD)


@pytest.fixture(scope="module")
def extended() -> None:
    """A message with two extensions, in the pool that services describe."""
    text = {"syntax": "proto2", "name": "tests/extended.proto", "package": "tests.extended"}
    file = descriptor_pb2.FileDescriptorProto(**text, dependency=["sapwood/v1/common.proto"])
    base = file.message_type.add(name="Base")
    base.extension_range.add(start=100, end=200)
    for number in (170, 120):
        file.extension.add(name=f"more_{number}", number=number, extendee=".tests.extended.Base", label=1, type=9)
    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())


async def test_extensions_are_found_by_number(ask: Any, extended: None) -> None:
    numbers, found, none = await ask(
        pb.ServerReflectionRequest(all_extension_numbers_of_type="tests.extended.Base"),
        pb.ServerReflectionRequest(
            file_containing_extension=pb.ExtensionRequest(containing_type="tests.extended.Base", extension_number=120)
        ),
        pb.ServerReflectionRequest(all_extension_numbers_of_type="sapwood.v1.TokenIds"),
    )
    assert list(numbers.all_extension_numbers_response.extension_number) == [120, 170]
    assert numbers.all_extension_numbers_response.base_type_name == "tests.extended.Base"
    assert list(files_in(found)) == ["tests/extended.proto", "sapwood/v1/common.proto"]
    assert none.all_extension_numbers_response.base_type_name == "sapwood.v1.TokenIds"
    assert not none.all_extension_numbers_response.extension_number


async def test_grpcurl_describes_services_methods_and_messages(address: str) -> None:
    listed = await run("grpcurl", "-plaintext", address, "list")
    assert set(listed.split()) == OURS | STANDARD
    described = await asyncio.gather(
        *(
            run("grpcurl", "-plaintext", address, "describe", name)
            for name in (
                "sapwood.v1.Router.Generate",
                ".sapwood.v1.SamplingParams",
                "grpc.reflection.v1.ServerReflection",
            )
        )
    )
    assert "rpc Generate ( .sapwood.v1.RouterGenerateRequest )" in described[0]
    assert "optional float temperature = 1;" in described[1]
    assert "rpc ServerReflectionInfo ( stream .grpc.reflection.v1.ServerReflectionRequest )" in described[2]


async def test_buf_calls_by_reflection_v1(address: str) -> None:
    options = ["--protocol", "grpc", "--http2-prior-knowledge", "--reflect-protocol", "grpc-v1"]
    listed = await run("buf", "curl", *options, "--list-services", f"http://{address}")
    assert set(listed.split()) == OURS | STANDARD
    answer = await run("buf", "curl", *options, f"http://{address}/grpc.health.v1.Health/List")
    states = {name: state["status"] for name, state in json.loads(answer)["statuses"].items()}
    assert states == dict.fromkeys(("", "liveness", *OURS), "SERVING")


async def run(program: str, *arguments: str) -> str:
    """What a program of this environment prints; fails if it fails."""
    process = await asyncio.create_subprocess_exec(
        Path(sys.executable).parent / program,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()
