"""Picks the endpoint of each request that a gateway carries.

The protocol is that of the Gateway API inference extension (endpoint picker protocol 004): a call of Envoy's external processing
for each HTTP request. The picker reads the headers and the body, names the endpoints in a header and in dynamic metadata, and
looks at the answer as it passes. Bodies may come whole or in pieces both ways; the call's first message says how.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import grpc

from sapwood.v1 import gateway_pb2 as pb
from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    SapwoodError,
    UnavailableError,
)
from sapwood_common.serving.push_call import PushCall
from sapwood_common.telemetry.logs import REQUEST_ID_KEY, new_request_id, request_id_var
from sapwood_net.errors import CallError
from sapwood_net.pacing.body_memory import BodyMemory
from sapwood_net.pacing.heavy_work import LARGE, HeavyWork
from sapwood_router.edges.gateway.answer_meter import AnswerMeter
from sapwood_router.edges.guard import Guard, tenant_var
from sapwood_router.edges.http.errors import error_body, http_status, retry_headers
from sapwood_router.edges.http.exchange import asked_timeout
from sapwood_router.edges.http.json_body import decode_object
from sapwood_router.edges.http.json_size import SMALL, check_size, most_values, size_steps
from sapwood_router.edges.http1.errors import HttpError
from sapwood_router.edges.worker_names import WorkerNames
from sapwood_router.flow.relay.pick import Pick, Picker
from sapwood_router.request.caller import Caller, caller_of, in_session
from sapwood_router.request.context import FieldNames, RequestContext, TextPrompt, accept_request_id, unique_id
from sapwood_router.request.output import OutputOptions

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
DESTINATION = "x-gateway-destination-endpoint"
"""The header, and the key of the metadata, with the endpoints that were picked."""
SERVED = "x-gateway-destination-endpoint-served"
"""The header of the answer, or the key of its metadata, with the endpoint that serves the request."""
_NAMESPACE = "envoy.lb"
_HINT, _SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
_PIECE = 60_000
"""Bytes of a body that are sent back in one message."""
_MOST_SUBSET, _ENDPOINT_BYTES = 65_536, 128
"""Endpoints of a subset, and what one counts for."""
_MOST_HEADERS, _MOST_HEADER_BYTES, _HEADER_BYTES = 256, 64 * 1024, 32
"""Headers of a request, their bytes, and what one counts for besides."""
_STATUS_DIGITS = 3
_CONTROLS = bytes([*range(9), *range(10, 32), 127])
"""Bytes that no header's value has."""
_SESSION_FIELDS = ("session_id", "prompt_cache_key", "user")
_DUPLEX, _BUFFERED = (
    (pb.GATEWAY_BODY_MODE_FULL_DUPLEX_STREAMED,),
    (
        pb.GATEWAY_BODY_MODE_BUFFERED,
        pb.GATEWAY_BODY_MODE_BUFFERED_PARTIAL,
    ),
)
_FIELDS = FieldNames(prompt="messages")


class EndpointPicker:
    """Serves the protocol.

    Args:
        picker: Picks.
        guard: Checks the keys of those whose requests the gateway carries.
        workers: Hides addresses from them.
        request_timeout: Seconds that a request may wait to be picked for.
        most_bytes: Of a request's body.
        longest_context: The longest of all models, in tokens: how many values a body may have depends on it.
        memory: What bodies may hold until they are sent back.
        heavy: Large bodies are parsed in its turns.
    """

    def __init__(
        self,
        picker: Picker,
        guard: Guard,
        workers: WorkerNames,
        request_timeout: float,
        most_bytes: int,
        longest_context: Callable[[], int],
        memory: BodyMemory,
        heavy: HeavyWork,
    ) -> None:
        self.picker = picker
        self.guard = guard
        self.workers = workers
        self.request_timeout = request_timeout
        self.most_bytes = most_bytes
        self.longest_context = longest_context
        self.memory = memory
        self.heavy = heavy

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds the method to a server, under Envoy's name."""
        method = grpc.stream_stream_rpc_method_handler(
            self.process, pb.GatewayRequest.FromString, pb.GatewayResponse.SerializeToString
        )
        methods = {"Process": method}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        server.add_registered_method_handlers(SERVICE, methods)

    async def process(
        self, requests: AsyncIterator[pb.GatewayRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """One HTTP request and its answer, part by part.

        Raises:
            DeadlineExceededError: The request's time is over, though it has an endpoint.
        """
        call = cast(PushCall, context)
        carried = _Carried(self)
        try:
            async with asyncio.timeout_at(carried.deadline) as time:
                async for request in requests:
                    for response in await carried.take(request):
                        call.write_now(response)
                        if not call.is_ready():
                            await call.drained()
                    if carried.deadline != time.when():
                        time.reschedule(carried.deadline)
        except TimeoutError:
            before = "" if carried.picked else " before there was an endpoint"
            error = DeadlineExceededError(f"the deadline passed{before}")
            refused = carried.refuse(error)
            if carried.picked:
                raise error from None
            call.write_now(refused)
        except SapwoodError as error:
            call.write_now(carried.refuse(error))
        finally:
            carried.close()


class _Carried:
    """One HTTP request that the gateway carries.

    Attributes:
        deadline: When its time is over, on the event loop's clock.
        picked: Whether it has an endpoint.
    """

    def __init__(self, owner: EndpointPicker) -> None:
        self.deadline = asyncio.get_running_loop().time() + owner.request_timeout
        self.picked = False
        self._owner = owner
        self._mode = pb.GATEWAY_BODY_MODE_FULL_DUPLEX_STREAMED
        self._answer_mode = pb.GATEWAY_BODY_MODE_FULL_DUPLEX_STREAMED
        self._began = False
        """Whether the request's headers have come."""
        self._headers: dict[bytes, bytes] = {}
        """They, until there is an endpoint."""
        self._subset: frozenset[str] | None = None
        self._body = bytearray()
        self._lost: CallError | None = None
        """Why the request was given up."""
        self._pick: Pick | None = None
        self._changed: bytes | None = None
        self._meter: AnswerMeter | None = None
        self._complete = False

    async def take(self, request: pb.GatewayRequest) -> list[pb.GatewayResponse]:
        """The responses to a part.

        Raises:
            SapwoodError: The request is refused.
        """
        if request.HasField("protocol_config"):
            self._mode = request.protocol_config.request_body_mode
            self._answer_mode = request.protocol_config.response_body_mode
        if request.HasField("metadata_context"):
            self._read_subset(request.metadata_context)
        match request.WhichOneof("part"):
            case "request_headers":
                return await self._take_headers(request.request_headers)
            case "request_body":
                return await self._take_body(request.request_body)
            case "request_trailers":
                self._check_begun()
                found = [] if self.picked or self._mode not in _DUPLEX else await self._pick_duplex(ends=False)
                return [*found, pb.GatewayResponse(request_trailers=pb.GatewayTrailersChange())]
            case "response_headers":
                return [self._take_answer(request)]
            case "response_body":
                return [self._take_answer_body(request.response_body)]
            case "response_trailers":
                self._complete = True
                return [pb.GatewayResponse(response_trailers=pb.GatewayTrailersChange())]
        raise InvalidArgumentError("the message has no part of a request that a picker knows")

    def refuse(self, error: SapwoodError) -> pb.GatewayResponse:
        """The answer in place of an endpoint's."""
        if self._pick is not None:
            self._pick.refuse(error)
        shown = self._owner.workers.for_client(error)
        headers = [_set(name.decode(), value) for name, value in retry_headers(shown)]
        headers.append(_set("content-type", b"application/json"))
        return pb.GatewayResponse(
            immediate_response=pb.GatewayAnswer(
                status=pb.GatewayStatus(code=http_status(shown)),
                headers=pb.GatewayHeaderChange(set_headers=headers),
                body=error_body(shown),
                details="refused_by_endpoint_picker",
            )
        )

    def close(self) -> None:
        """The call is over, however it ended."""
        self._release()
        if self._pick is not None:
            self._pick.end(
                None if self._meter is None or not self._complete else self._meter.usage(self._prompt_tokens)
            )

    def fail(self, error: CallError) -> None:
        """Gives the request up. Implements ``HeldBody``."""
        self._lost = error
        self._release()

    @property
    def _prompt_tokens(self) -> int:
        return 0 if self._pick is None else self._pick.prompt_tokens

    async def _take_headers(self, message: pb.GatewayHeaders) -> list[pb.GatewayResponse]:
        if self._began:
            raise InvalidArgumentError("the headers came before")
        size = sum(
            len(each.key) + len(each.value) + len(each.raw_value) + _HEADER_BYTES for each in message.headers.headers
        )
        if len(message.headers.headers) > _MOST_HEADERS or size > _MOST_HEADER_BYTES:
            raise HttpError(431, f"more than {_MOST_HEADERS} headers, or {_MOST_HEADER_BYTES} bytes of them")
        self._began = True
        self._headers = _fields(message.headers)
        for name, value in self._headers.items():
            if len(value.translate(None, _CONTROLS)) < len(value):
                shown = name[:100].decode("utf-8", "replace")
                raise InvalidArgumentError("a header's value has control characters", field=shown)
        self._owner.guard.check_headers(self._headers)
        self._hold(size)
        if message.end_of_stream or self._mode not in (*_DUPLEX, *_BUFFERED):
            await self._choose()
            self._release()
            return [pb.GatewayResponse(request_headers=self._destinations(), dynamic_metadata=self._metadata())]
        return [] if self._mode in _DUPLEX else [pb.GatewayResponse(request_headers=pb.GatewayChange())]

    async def _take_body(self, message: pb.GatewayBody) -> list[pb.GatewayResponse]:
        if self.picked or self._mode not in (*_DUPLEX, *_BUFFERED):
            return [pb.GatewayResponse(request_body=pb.GatewayChange())]
        self._check_begun()
        if len(self._body) + len(message.body) > self._owner.most_bytes:
            raise HttpError(413, f"the body is over the limit of {self._owner.most_bytes} bytes")
        self._body += message.body
        self._hold(len(message.body))
        if self._mode in _DUPLEX:
            return await self._pick_duplex(ends=True) if message.end_of_stream else []
        await self._choose()
        change = self._destinations()
        if self._changed is not None:
            change.response.body_mutation.body = self._changed
            change.response.header_mutation.set_headers.append(_set("content-length", b"%d" % len(self._changed)))
        self._release()
        return [pb.GatewayResponse(request_body=change, dynamic_metadata=self._metadata())]

    async def _pick_duplex(self, *, ends: bool) -> list[pb.GatewayResponse]:
        """The headers and the whole body, which were held until it was here.

        Args:
            ends: Whether the body is the last of the request: no trailers follow.
        """
        await self._choose()
        body = bytes(self._body) if self._changed is None else self._changed
        self._release()
        change = self._destinations()
        if self._changed is not None:
            change.response.header_mutation.set_headers.append(_set("content-length", b"%d" % len(body)))
        responses = [pb.GatewayResponse(request_headers=change, dynamic_metadata=self._metadata())]
        for start in range(0, len(body) or 1, _PIECE):
            piece = pb.GatewayStreamedBody(
                body=body[start : start + _PIECE], end_of_stream=ends and start + _PIECE >= len(body)
            )
            responses.append(pb.GatewayResponse(request_body=_streamed(piece)))
        return responses

    def _check_begun(self) -> None:
        """Raises InvalidArgumentError if the request's headers, and with them its key, have not come."""
        if not self._began:
            raise InvalidArgumentError("the headers did not come before")

    def _hold(self, size: int) -> None:
        """Counts what is held until there is an endpoint. Raises CallError if all requests hold too much."""
        if size:
            self._owner.memory.grow(self, size)
        if self._lost is not None:
            raise self._lost

    def _release(self) -> None:
        self._owner.memory.release(self)
        self._body.clear()
        self._headers.clear()
        self._subset = None

    async def _choose(self) -> None:
        owner, now = self._owner, asyncio.get_running_loop().time()
        request_id = self._header(REQUEST_ID_KEY)
        request_id = accept_request_id(request_id, REQUEST_ID_KEY) if request_id else new_request_id()
        request_id_var.set(request_id)
        self.deadline = min(self.deadline, now + asked_timeout(self._headers))
        body, named = await self._parsed()
        self._hold(0)  # or it was given up meanwhile
        context = RequestContext(
            request_id=request_id,
            worker_request_id=unique_id(request_id),
            prompt=TextPrompt(""),
            sampling=SamplingParams(),
            output=OutputOptions(),
            fields=_FIELDS,
            deadline=self.deadline,
            model=named,
            caller=self._caller(body),
        )
        pick = self._pick = owner.picker.begin(context)
        async with asyncio.timeout_at(self.deadline):
            await pick.choose(body, self._subset)
        self._hold(0)
        self.picked = True
        self._changed = pick.changed_body(body, named)

    async def _parsed(self) -> tuple[dict[str, Any], str | None]:
        """The body and the model that it names; nothing where it is no JSON object."""
        raw = bytes(self._body)
        if raw.lstrip()[:1] != b"{":
            if raw and "json" in self._header("content-type"):
                raise InvalidArgumentError("the body must be a JSON object")
            return {}, None
        if len(raw) >= LARGE:
            tenant = tenant_var.get()
            stint = self._owner.heavy.stint("" if tenant is None else tenant.name, begun=False)
            await stint.turn()
            for _ in size_steps(raw, most_values(self._owner.longest_context())):
                await stint.pause()
            await stint.turn()
        elif len(raw) >= SMALL:
            check_size(raw)
        body = decode_object(raw)
        named = body.get("model")
        if named is not None and not isinstance(named, str):
            raise InvalidArgumentError("model must be a string", field="model")
        return body, named

    def _caller(self, body: dict[str, Any]) -> Caller:
        caller = caller_of(self._header, tenant_var.get())
        session = next((body[name] for name in _SESSION_FIELDS if isinstance(body.get(name), str)), "")
        return caller if caller.session or not session else in_session(caller, session)

    def _header(self, key: str) -> str:
        return self._headers.get(key.encode(), b"").decode("latin-1")

    def _read_subset(self, metadata: pb.GatewayMetadata) -> None:
        """Takes the first subset that comes; there is one of a request."""
        if self.picked or self._subset is not None:
            return
        if _HINT not in metadata.filter_metadata or _SUBSET not in metadata.filter_metadata[_HINT].fields:
            return
        value = metadata.filter_metadata[_HINT].fields[_SUBSET]
        is_list = value.WhichOneof("kind") == "list_value"
        if (len(value.list_value.values) if is_list else value.string_value.count(",") + 1) > _MOST_SUBSET:
            raise InvalidArgumentError(f"the subset has more than {_MOST_SUBSET} endpoints", field=_SUBSET)
        listed = [each.string_value for each in value.list_value.values] if is_list else value.string_value.split(",")
        self._subset = frozenset(each.strip() for each in listed)
        self._hold(sum(map(len, self._subset)) + _ENDPOINT_BYTES * len(self._subset))

    def _destinations(self) -> pb.GatewayChange:
        assert self._pick is not None
        header = _set(DESTINATION, ",".join(self._pick.destinations).encode())
        change = pb.GatewayHeaderChange(set_headers=[header], remove_headers=[SERVED])
        return pb.GatewayChange(response=pb.GatewayCommonChange(header_mutation=change, clear_route_cache=True))

    def _metadata(self) -> pb.GatewayStruct:
        assert self._pick is not None
        named = pb.GatewayValue(string_value=",".join(self._pick.destinations))
        inner = pb.GatewayStruct(fields={DESTINATION: named})
        return pb.GatewayStruct(fields={_NAMESPACE: pb.GatewayValue(struct_value=inner)})

    def _take_answer(self, request: pb.GatewayRequest) -> pb.GatewayResponse:
        """The answer's headers."""
        message = request.response_headers
        fields = _fields(message.headers)
        if self._pick is not None and self.picked:
            metadata = request.metadata_context.filter_metadata
            served = metadata[_NAMESPACE].fields[SERVED].string_value if _NAMESPACE in metadata else ""
            served = served or fields.get(SERVED.encode(), b"").decode("latin-1")
            if served:
                self._pick.served(served)
            status = fields.get(b":status", b"")
            self._pick.answers(_error_of(int(status) if status.isdigit() and len(status) == _STATUS_DIGITS else 502))
            events = fields.get(b"content-type", b"").startswith(b"text/event-stream")
            readable = fields.get(b"content-encoding", b"identity") == b"identity"
            self._meter = AnswerMeter(events=events, readable=readable)
            # Without a body to come nothing else is heard of the answer: its end is that of the call.
            self._complete = message.end_of_stream or self._answer_mode == pb.GATEWAY_BODY_MODE_UNSPECIFIED
        return pb.GatewayResponse(response_headers=pb.GatewayChange())

    def _take_answer_body(self, message: pb.GatewayBody) -> pb.GatewayResponse:
        if self._pick is not None and self._meter is not None and message.body:
            self._pick.delta(self._meter.take(message.body))
        self._complete = self._complete or message.end_of_stream
        if self._answer_mode not in _DUPLEX:
            return pb.GatewayResponse(response_body=pb.GatewayChange())
        piece = pb.GatewayStreamedBody(body=message.body, end_of_stream=message.end_of_stream)
        return pb.GatewayResponse(response_body=_streamed(piece))


def _streamed(piece: pb.GatewayStreamedBody) -> pb.GatewayChange:
    change = pb.GatewayBodyChange(streamed_response=piece)
    return pb.GatewayChange(response=pb.GatewayCommonChange(body_mutation=change))


def _set(name: str, value: bytes) -> pb.GatewaySetHeader:
    return pb.GatewaySetHeader(
        header=pb.GatewayHeader(key=name, raw_value=value),
        append_action=pb.GATEWAY_APPEND_OVERWRITE_IF_EXISTS_OR_ADD,
    )


def _fields(headers: pb.GatewayHeaderMap) -> dict[bytes, bytes]:
    """Headers by name in lower case; of one that is repeated the last."""
    return {each.key.lower().encode(): each.raw_value or each.value.encode() for each in headers.headers}


def _error_of(status: int) -> SapwoodError | None:
    """The error that an answer's status stands for; None: it is none."""
    if status < 400:
        return None
    said = f"the endpoint answered {status}"
    if status == 429:
        return ResourceExhaustedError(said)
    if status == 500:
        return InternalError(said)
    return InvalidArgumentError(said) if status < 500 else UnavailableError(said)
