"""One process of the tokenizer service: its channel, its health, and its calls under way."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sapwood.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from sapwood_common.errors import ConfigError, DeadlineExceededError, InternalError, UnavailableError
from sapwood_common.network.channel import Dialer, request_metadata
from sapwood_common.status import from_rpc_error
from sapwood_common.telemetry.logs import traceparent_var
from sapwood_net.http2.client.duplex_call import CallEndedError, DuplexCall
from sapwood_router.transport.name_lookup import Lookup, follow_name, name_in
from sapwood_router.transport.shared_call import RETRY_INTERVAL, SharedCall, stream_error

logger = logging.getLogger(__name__)

_METHOD = "/sapwood.v1.Tokenizer/Encode"
_UNKNOWN_INTERVAL = 2.0
"""Seconds until a tokenizer is asked again that did not know the method."""
_BYTES_A_MESSAGE = 256 * 1024
_LONGEST_MS = 2**32 - 1

Result = tokenizer_pb2.EncodeResult


class EncodeSession(SharedCall):
    """Asks over one call while :meth:`run` runs.

    Args:
        address: Where the replica is.
        dialer: Connects to it.
        on_lost: Called when the call is lost.
        on_stuck: Called when what is sent there does not arrive.
    """

    MOST_BYTES = 256 * 1024
    """The most an item may have; what is larger would hold up the others and goes in a call of its own."""

    def __init__(
        self, address: str, dialer: Dialer, on_lost: Callable[[], None], on_stuck: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(address, _METHOD, dialer)
        self._on_lost = on_lost
        self._on_stuck = on_stuck
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Result]] = {}
        self._unsent: dict[int, tokenizer_pb2.EncodeItem] = {}

    @property
    def up(self) -> bool:
        """Whether the call stands, and items are taken."""
        return self._stands and self.passes and not self._finishing

    @property
    def load(self) -> int:
        """Items under way."""
        return len(self._waiting)

    async def ask(self, item: tokenizer_pb2.EncodeItem, deadline: float) -> Result:
        """What the tokenizer answers to an item, whose id and time are filled in here; call it only while ``up``.

        Args:
            item: It has at most :attr:`MOST_BYTES`.
            deadline: On the loop's clock.

        Raises:
            SapwoodError: The tokenizer's own error; UnavailableError if the call is lost; DeadlineExceededError.
        """
        loop = asyncio.get_running_loop()
        item_id = item.id = next(self._ids)
        item.timeout_ms = min(max(0, int((deadline - loop.time()) * 1000)), _LONGEST_MS)
        answer: asyncio.Future[Result] = loop.create_future()
        self._waiting[item_id] = answer
        self._unsent[item_id] = item
        self._schedule()
        timer = loop.call_at(deadline, _expire, answer)
        try:
            result = await answer
        finally:
            timer.cancel()
            if self._waiting.pop(item_id, None) is not None:
                self._cancel(item_id)
        if result.WhichOneof("outcome") == "error":
            raise stream_error(result.error)
        return result

    def _stuck(self) -> None:
        self._on_stuck()

    def _opened(self, call: DuplexCall) -> bytes:
        return b""  # items may be sent at once

    def _stopped(self) -> None:
        self._fail_all("this router stops")

    def _take(self, message: bytes) -> Iterator[None]:
        self._stands = True  # the first has no results and comes at once
        waiting = self._waiting
        for number, result in enumerate(tokenizer_pb2.EncodeResponse.FromString(message).results):
            if number:
                yield
            answer = waiting.pop(result.id, None)
            if answer is not None and not answer.done():
                answer.set_result(result)
        self._end_if_finished()

    def _lost(self, end: CallEndedError) -> float:
        self._on_lost()
        if self._waiting:
            logger.info("the encoding call to %s was lost with %d items: %s", self._address, self.load, end)
        self._fail_all(f"tokenizer {self._address}: {end}")
        return _UNKNOWN_INTERVAL if end.code is grpc.StatusCode.UNIMPLEMENTED else RETRY_INTERVAL

    def _fail_all(self, problem: str) -> None:
        waiting, self._waiting = self._waiting, {}
        self._unsent.clear()
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(UnavailableError(problem, retry_after=1.0))

    def _cancel(self, item_id: int) -> None:
        """Nobody waits for this item any more: its request was closed, or its deadline passed."""
        if self._unsent.pop(item_id, None) is None:
            self._unsent[item_id] = tokenizer_pb2.EncodeItem(id=item_id, cancel=True)
            self._schedule()
        self._end_if_finished()

    def _next_message(self) -> bytes | None:
        unsent = self._unsent
        if len(unsent) == 1:
            _, item = unsent.popitem()
            return tokenizer_pb2.EncodeRequest(items=(item,)).SerializeToString()
        request = tokenizer_pb2.EncodeRequest()
        size = 0
        while unsent and size < _BYTES_A_MESSAGE:
            item = unsent.pop(next(iter(unsent)))
            request.items.append(item)
            size += item.ByteSize()
        return request.SerializeToString() if size else None


def _expire(answer: asyncio.Future[Result]) -> None:
    if not answer.done():
        answer.set_exception(DeadlineExceededError("the deadline passed while the prompt was tokenized"))


RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")

SERVICE = "sapwood.v1.Tokenizer"
ABSENT = "this router has no tokenizer (--tokenizer none): send token ids, with detokenize false"
"""The refusal of a request that needs a tokenizer."""
_DOWN_INTERVAL = 0.25
_HOLE = "what is sent there does not arrive"


class TokenizerReplica:
    """A replica, as far as this router knows it. Lives on one event loop.

    Args:
        address: Where it is.
        dialer: Connects to it.
        on_lost: Called when the call that encodes is lost.
        problem: What is known of it.

    Attributes:
        channel: The channel to it; the creator of this object closes it.
        encodings: Encodes prompts; the creator of this object runs and finishes it.

    Raises:
        ConfigError: The TLS files are of no use.
    """

    def __init__(
        self, address: str, dialer: Dialer, on_lost: Callable[[], None], problem: str | None = "not checked yet"
    ) -> None:
        self.address = address
        self.dialer = dialer
        self.channel = channel = dialer.open(address)
        self.stub = tokenizer_pb2_grpc.TokenizerStub(channel)
        self.encodings = EncodeSession(address, dialer, on_lost, self._drop_calls)
        self._problem = problem
        """What its health checks say: why it cannot be used."""
        self.heard = -math.inf
        """When it last answered a health check, on the event loop's clock: it may have said that it starts or drains."""
        self._health = health_pb2_grpc.HealthStub(channel)
        self._running: set[grpc.aio.Call] = set()
        self._dropped: set[grpc.aio.Call] = set()
        self._free = asyncio.Event()
        self._free.set()

    @property
    def problem(self) -> str | None:
        """Why it cannot be used; None while it is well."""
        return self._problem or (None if self.encodings.passes else _HOLE)

    @property
    def load(self) -> int:
        """Unary calls and items under way."""
        return len(self._running) + self.encodings.load

    async def tokenize(
        self, request: tokenizer_pb2.TokenizeRequest, request_id: str, deadline: float
    ) -> tokenizer_pb2.TokenizeResponse:
        """Encodes texts: over the session where that is up, else with a call. ``deadline`` on the loop's clock.

        Raises:
            SapwoodError: As :meth:`call`; DeadlineExceededError.
        """
        if not self._by_session(request):
            return await self.call(self.stub.Tokenize, request, request_id, deadline)
        item = tokenizer_pb2.EncodeItem(
            tokenize=request, request_id=request_id, traceparent=traceparent_var.get() or ""
        )
        result = await self.encodings.ask(item, deadline)
        if not result.HasField("tokenize"):
            raise InternalError("the tokenizer answered with something else than the tokens of texts")
        return result.tokenize

    async def apply_chat_template(
        self, request: tokenizer_pb2.ApplyChatTemplateRequest, request_id: str, deadline: float
    ) -> tokenizer_pb2.ApplyChatTemplateResponse:
        """Renders and encodes a conversation, in the same way.

        Raises:
            SapwoodError: As :meth:`tokenize`.
        """
        if not self._by_session(request):
            return await self.call(self.stub.ApplyChatTemplate, request, request_id, deadline)
        item = tokenizer_pb2.EncodeItem(
            apply_chat_template=request, request_id=request_id, traceparent=traceparent_var.get() or ""
        )
        result = await self.encodings.ask(item, deadline)
        if not result.HasField("apply_chat_template"):
            raise InternalError("the tokenizer answered with something else than the tokens of a conversation")
        return result.apply_chat_template

    def _by_session(self, request: tokenizer_pb2.TokenizeRequest | tokenizer_pb2.ApplyChatTemplateRequest) -> bool:
        return self.encodings.up and request.ByteSize() <= EncodeSession.MOST_BYTES

    async def call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[RequestT, AnswerT],
        request: RequestT,
        request_id: str,
        deadline: float,
    ) -> AnswerT:
        """Calls a method of :attr:`stub`.

        Raises:
            SapwoodError: The replica's own error; UnavailableError if it is gone, or found not to answer while it has the call.
        """
        left = deadline - asyncio.get_running_loop().time()
        running = method(request, timeout=left, metadata=request_metadata(request_id))
        self._running.add(running)
        self._free.clear()
        try:
            answer: AnswerT = await running
            return answer
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            if running in self._dropped:  # by the monitor: this task goes on
                raise UnavailableError(f"tokenizer {self.address} does not answer", retry_after=1.0) from None
            if isinstance(error, grpc.aio.AioRpcError):
                raise from_rpc_error(error) from error
            raise
        finally:
            self._running.discard(running)
            self._dropped.discard(running)
            if not self._running:
                self._free.set()

    async def idle(self) -> None:
        """Returns once no call is under way."""
        await self._free.wait()

    async def monitor(self, interval: float, on_change: Callable[[], None]) -> None:
        """Keeps ``problem`` true for ever; cancel it to stop.

        ``on_change`` is called when the replica comes or goes.

        A replica that does not answer its checks, or that large packets do not reach, loses its calls; others can take them.
        """
        known = self.problem
        while True:
            hangs = False
            try:
                problem = await check(self._health, SERVICE)
            except TimeoutError:
                problem, hangs = "health checks time out", True
            self._problem = problem
            problem = self.problem
            changed = (problem is None) != (known is None)
            known = problem
            if problem in (None, NOT_SERVING):
                self.heard = asyncio.get_running_loop().time()
            if (
                hangs
            ):  # perhaps behind a large message that does not arrive: small ones on a new connection prove nothing
                self.encodings.distrust()
                self.encodings.abandon("health checks time out")
                self._drop_calls()
            elif self._running:
                self.encodings.probe()  # a call says nothing of how its bytes get there
            if changed:
                logger.info("tokenizer %s is %s", self.address, "up" if problem is None else f"down: {problem}")
                on_change()
            await asyncio.sleep(interval if problem is None else min(interval, _DOWN_INTERVAL))

    def _drop_calls(self) -> None:
        self._dropped |= self._running
        for running in tuple(self._running):
            running.cancel()


# The standard health check, as a question with a yes or a reason for no.
NOT_SERVING = "it says that it is not serving"
"""What is wrong with a service that answers, but takes nothing new: it starts, or drains."""

_CHECK_TIMEOUT = 2.0


async def check(stub: health_pb2_grpc.HealthStub, service: str) -> str | None:
    """One standard health check: None if the service serves, else what is wrong.

    Raises:
        TimeoutError: No answer in time.
    """
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=_CHECK_TIMEOUT)
    except grpc.aio.AioRpcError as error:
        if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            raise TimeoutError from error
        return f"{error.code().name}: {error.details()}"
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return NOT_SERVING


_LOOKUP_INTERVAL = 1.0
_FILES_INTERVAL = 1.0


class TokenizerReplicas:
    """Keeps the set of replicas. Lives on one event loop.

    Args:
        targets: ``host:port`` of each replica, or of all behind a host name.
        dialer: Connects to them; to one behind a name checking its certificate for that name.
        health_interval: Seconds between two checks of each.
        on_change: Called when the set or a replica's health has changed.
        on_lost: Called when a connection is lost: the service that answers next may be another.
        spawn: Runs a task until the router stops.
        lookup: Asks for the addresses behind a name.
    """

    def __init__(
        self,
        targets: Iterable[str],
        dialer: Dialer,
        health_interval: float,
        on_change: Callable[[], None],
        on_lost: Callable[[], None],
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
        lookup: Lookup,
    ) -> None:
        self._targets = tuple(targets)
        self._dialer = dialer
        self._health_interval = health_interval
        self._on_change = on_change
        self._on_lost = on_lost
        self._spawn = spawn
        self._lookup = lookup
        self._found: dict[str, tuple[TokenizerReplica, ...]] = {}

    def all(self) -> tuple[TokenizerReplica, ...]:
        """The replicas there are now; those that leave are not among them."""
        return tuple(replica for replicas in self._found.values() for replica in replicas)

    def start(self) -> None:
        """Takes up those with an address, and begins to look for the others."""
        for target in self._targets:
            named = name_in(target)
            if named is None:
                self._found[target] = (self._open(target, self._dialer),)
            else:
                self._spawn(self._follow(target, *named), f"addresses behind {target}")
        self._spawn(self._follow_files(), "TLS files for the tokenizer")

    async def _follow(self, target: str, host: str, port: int) -> None:
        dialer = self._dialer.expecting(host)

        def found(addresses: frozenset[str]) -> None:
            before = self._found.get(target, ())
            known = {replica.address for replica in before}
            stay = tuple(replica for replica in before if replica.address in addresses)
            come = tuple(self._open(address, dialer) for address in sorted(addresses - known))
            self._replace(target, stay + come)

        await follow_name(host, port, found, _LOOKUP_INTERVAL, self._lookup)

    async def _follow_files(self) -> None:
        version = self._dialer.version()
        while version is not None:
            await asyncio.sleep(_FILES_INTERVAL)
            try:
                found = self._dialer.version()
                if found == version:
                    continue
                for target, replicas in tuple(self._found.items()):
                    self._replace(
                        target, tuple(self._open(item.address, item.dialer, item.problem) for item in replicas)
                    )
                version = found
                logger.info("the TLS files have changed: new connections to the tokenizer")
            except (OSError, ConfigError) as error:  # half written: again when they are whole
                logger.warning("new TLS files are not taken up: %s", error)

    def _open(self, address: str, dialer: Dialer, problem: str | None = "not checked yet") -> TokenizerReplica:
        replica = TokenizerReplica(address, dialer, self._on_lost, problem)
        self._spawn(self._serve(replica), f"tokenizer {address}")
        return replica

    def _replace(self, target: str, replicas: tuple[TokenizerReplica, ...]) -> None:
        before = self._found.get(target, ())
        self._found[target] = replicas
        for gone in before:
            if gone not in replicas:
                gone.encodings.finish()
        logger.info("tokenizers at %s: %s", target, ", ".join(replica.address for replica in replicas))
        self._on_change()

    async def _serve(self, replica: TokenizerReplica) -> None:
        """Carries its items, and watches its health, until it has left with nothing running."""
        monitor = asyncio.ensure_future(replica.monitor(self._health_interval, self._on_change))
        try:
            await replica.encodings.run()
            await replica.idle()
        finally:
            monitor.cancel()
            await replica.channel.close()
