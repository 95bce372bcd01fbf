"""Server reflection: tells tools such as grpcurl which services, methods and messages there are.

Tools ask for version v1 first; older ones know v1alpha only. They differ in the package's name only, not in the bytes
on the wire, so that v1alpha's classes, which are all that grpcio-reflection has, serve both.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from google.protobuf.descriptor import FileDescriptor
from grpc_reflection.v1alpha import reflection_pb2 as pb

V1 = "grpc.reflection.v1.ServerReflection"
V1ALPHA = "grpc.reflection.v1alpha.ServerReflection"

_V1_FILE = "grpc/reflection/v1/reflection.proto"


def add_reflection(server: grpc.aio.Server, service_names: Iterable[str]) -> None:
    """Adds both versions to a server.

    Args:
        server: Gets the methods.
        service_names: Full names of the services that are listed; reflection itself is added to them.
    """
    pool = descriptor_pool.Default()
    _describe_v1(pool)
    reflection = _Reflection(sorted({*service_names, V1, V1ALPHA}), pool)
    method = grpc.stream_stream_rpc_method_handler(
        reflection.answer_all, pb.ServerReflectionRequest.FromString, pb.ServerReflectionResponse.SerializeToString
    )
    for name in (V1, V1ALPHA):
        methods = {"ServerReflectionInfo": method}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, methods),))
        server.add_registered_method_handlers(name, methods)


class _Reflection:
    def __init__(self, service_names: list[str], pool: Any) -> None:
        self._service_names = service_names
        self._pool = pool
        self._described: dict[str, Any] = {}
        """Answers by file: there are few, and strangers may ask for them without end."""

    async def answer_all(
        self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        async for request in requests:
            try:
                answer = self._answer(request)
            except KeyError:
                answer = _error(grpc.StatusCode.NOT_FOUND, "there is no such file, symbol or extension")
            answer.original_request.CopyFrom(request)
            answer.valid_host = request.host
            yield answer

    def _answer(self, request: Any) -> Any:
        """The answer to one request; raises KeyError if there is nothing of that name."""
        match request.WhichOneof("message_request"):
            case "file_by_filename":
                return self._files(self._pool.FindFileByName(request.file_by_filename))
            case "file_containing_symbol":
                return self._files(self._file_declaring(request.file_containing_symbol))
            case "file_containing_extension":
                asked = request.file_containing_extension
                extended = self._pool.FindMessageTypeByName(asked.containing_type)
                return self._files(self._pool.FindExtensionByNumber(extended, asked.extension_number).file)
            case "all_extension_numbers_of_type":
                extended = self._pool.FindMessageTypeByName(request.all_extension_numbers_of_type)
                numbers = sorted(extension.number for extension in self._pool.FindAllExtensions(extended))
                return pb.ServerReflectionResponse(
                    all_extension_numbers_response=pb.ExtensionNumberResponse(
                        base_type_name=extended.full_name, extension_number=numbers
                    )
                )
            case "list_services":
                services = [pb.ServiceResponse(name=name) for name in self._service_names]
                return pb.ServerReflectionResponse(list_services_response=pb.ListServiceResponse(service=services))
        return _error(grpc.StatusCode.INVALID_ARGUMENT, "the request asks for nothing")

    def _files(self, file: FileDescriptor) -> Any:
        """A file and, after it, all that it imports."""
        if file.name not in self._described:
            found: dict[str, FileDescriptor] = {}
            waiting = [file]
            while waiting:
                one = waiting.pop()
                if one.name not in found:
                    found[one.name] = one
                    waiting += one.dependencies
            raw = [one.serialized_pb for one in found.values()]
            self._described[file.name] = pb.FileDescriptorResponse(file_descriptor_proto=raw)
        return pb.ServerReflectionResponse(file_descriptor_response=self._described[file.name])

    def _file_declaring(self, symbol: str) -> FileDescriptor:
        try:
            return self._pool.FindFileContainingSymbol(symbol)  # type: ignore[no-any-return]
        except KeyError:  # it does not look into services
            return self._pool.FindMethodByName(symbol).containing_service.file  # type: ignore[no-any-return]


def _error(code: grpc.StatusCode, message: str) -> Any:
    return pb.ServerReflectionResponse(error_response=pb.ErrorResponse(error_code=code.value[0], error_message=message))


def _describe_v1(pool: Any) -> None:
    """Adds v1's description to the pool, unless it is there."""
    try:
        pool.FindFileByName(_V1_FILE)
    except KeyError:
        old = descriptor_pb2.FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)
        text = text_format.MessageToString(old).replace("v1alpha", "v1")
        new = text_format.Parse(text, descriptor_pb2.FileDescriptorProto())
        new.name = _V1_FILE
        new.options.ClearField("deprecated")
        pool.AddSerializedFile(new.SerializeToString())
