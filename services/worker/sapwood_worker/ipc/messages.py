"""The messages between the gRPC front and the scheduler process: msgpack over ZeroMQ.

A request is known by a serial number, which the front never gives twice: a client may use a request id again as soon as the old
request is cancelled, while outputs of that are still on their way.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import zmq

from sapwood_common.contract.sampling import SamplingParams
from sapwood_worker.records.continuations import Continuation
from sapwood_worker.records.expert_load import ExpertLoad
from sapwood_worker.records.handoff import HandoffTicket, log_stage
from sapwood_worker.records.kv_events import KvEvent
from sapwood_worker.records.load import Load, StepTime, TierReport
from sapwood_worker.records.lora import Lora, LoraFacts
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.output import Pooling, RequestOutput
from sapwood_worker.records.pictures import Picture, PictureUse
from sapwood_worker.records.weights import InFlight, Memory, TrainerGroup, WeightBucket, WeightsFacts

logger = logging.getLogger(__name__)


class Terms(msgspec.Struct, frozen=True, array_like=True):
    """A request's scheduling parameters: its priority, tenant, cache namespace and time limit.

    Attributes:
        priority: Higher goes first, where the policy heeds priorities.
        tenant: On whose behalf it runs; tenants get equal shares.
        namespace: Requests of different namespaces share no cached pages; see
            ``sapwood_common.contract.page_hash.cache_namespace``.
        seconds: Seconds after which it is ended even if unfinished; None: no limit.
        lora: The number of its adapter, which was read before; 0: none.
    """

    priority: int = 0
    tenant: str = ""
    namespace: bytes = b""
    seconds: float | None = None
    lora: int = 0


USUAL = Terms()


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """A new request.

    ``token_ids``: native uint32. ``grammar``: a compiled grammar, empty for none; ``output_tokens``: how many of the last
    ``token_ids`` are output of an earlier attempt. ``terms``: its priority, tenant, namespace and deadline.
    ``pooling``: how its hidden states become an embedding; empty: it generates.
    ``hands_off``: it ends after its first token, with a ticket for its pages. ``ticket``: for pages that another worker keeps.
    ``pictures``: those in the prompt, in order. ``continuations``: what is scored instead of generating.
    """

    serial: int
    request_id: str
    token_ids: bytes
    sampling: SamplingParams
    grammar: bytes = b""
    output_tokens: int = 0
    terms: Terms = USUAL
    pooling: Pooling = ""
    hands_off: bool = False
    ticket: HandoffTicket | None = None
    pictures: tuple[Picture, ...] = ()
    continuations: tuple[Continuation, ...] = ()


class KeepHandoffs(msgspec.Struct, frozen=True, tag="keep-handoffs"):
    """Renew the leases of some tickets and end those of others, by their transfer ids."""

    renewed: list[bytes]
    released: list[bytes]


class AnnouncePages(msgspec.Struct, frozen=True, tag="announce-pages"):
    """Pages that may be read for a request that will probably come. ``token_ids``: its prompt, native uint32; empty if an earlier
    message of this transfer had it."""

    ticket: HandoffTicket
    token_ids: bytes
    namespace: bytes


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End a request, if it has not ended; it gets no further output."""

    serial: int


class Flush(msgspec.Struct, frozen=True, tag="flush"):
    """Empty the prefix cache. Like all operations it is answered with Answered or CallFailed of the same ``call``."""

    call: int


class Pin(msgspec.Struct, frozen=True, tag="pin"):
    """Pin the cached part of a prefix (native uint32); answered with the number of pinned tokens."""

    call: int
    name: str
    token_ids: bytes
    namespace: bytes
    seconds: float | None


class Unpin(msgspec.Struct, frozen=True, tag="unpin"):
    """Release a pinned prefix; the answer says whether there was one."""

    call: int
    name: str


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Compute nothing until Resume; ``retract``: also free the pages of running requests; ``abort``: end all requests, whose
    number is answered."""

    call: int
    retract: bool
    abort: bool = False


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """End a pause."""

    call: int


class StartProfile(msgspec.Struct, frozen=True, tag="start-profile"):
    """Record what the process does."""

    call: int
    folder: str


class StopProfile(msgspec.Struct, frozen=True, tag="stop-profile"):
    """Write what was recorded; answered with the file's path."""

    call: int


Operation = Flush | Pin | Unpin | Pause | Resume | StartProfile | StopProfile


CacheVerb = Literal["stats", "clear", "attach", "detach", "role", "restore_role"]
CACHE_FIELDS: dict[CacheVerb, str] = {"attach": "url", "clear": "tiers", "role": "role"}
"""The field of the gRPC request that a command's argument comes from, for error messages."""


class CacheCommand(msgspec.Struct, frozen=True, tag="cache"):
    """Show or change the tiers of the KV cache; answered like an operation, with the tiers as they are
    then.

    ``clear`` takes the name of a tier or ``all``, ``attach`` the URL of a store, ``role`` what the worker is for from now on,
    ``restore_role`` what it was for before this scheduler process: that is done at once, since requests for it follow. The
    others take nothing.
    """

    call: int
    verb: CacheVerb
    argument: str = ""


class ReadLora(msgspec.Struct, frozen=True, tag="read-lora"):
    """Read an adapter into the host's memory; answered like an operation, with its facts."""

    call: int
    lora: Lora


class DropLora(msgspec.Struct, frozen=True, tag="drop-lora"):
    """Forget an adapter that was read, once its requests have ended; no further ones come. Answered like an operation, then."""

    call: int
    number: int


class StageWeights(msgspec.Struct, frozen=True, tag="stage-weights"):
    """Read tensors of an update beside the weights in use; answered like an operation, with what is staged."""

    call: int
    bucket: WeightBucket


class ReadyWeights(msgspec.Struct, frozen=True, tag="ready-weights"):
    """Check that an update is complete, and ready it; answered like an operation, with what is staged."""

    call: int
    update: int
    partial: bool


class ExchangeWeights(msgspec.Struct, frozen=True, tag="exchange-weights"):
    """Compute with an update that is ready from the next step on; answered like an operation, when that is so.

    ``update``: 0: with the weights that the last exchange kept. ``number``: of the weights, on all outputs from then on.
    ``in_flight``: what becomes of requests that run. ``keep``: whether to keep the present weights. ``flush``: whether to empty
    the prefix cache, in which no page of the present weights can be found any more.
    """

    call: int
    update: int
    number: int
    in_flight: InFlight = "retract"
    keep: bool = False
    flush: bool = True


class DropWeights(msgspec.Struct, frozen=True, tag="drop-weights"):
    """Forget what is staged of an update; answered like an operation."""

    call: int
    update: int


class Sleep(msgspec.Struct, frozen=True, tag="sleep"):
    """Give memory back, when no step is in flight; answered like an operation, with the bytes. Requests that run end, or wait for
    :class:`WakeUp`."""

    call: int
    memory: tuple[Memory, ...]
    folder: str
    abort: bool = False


class WakeUp(msgspec.Struct, frozen=True, tag="wake-up"):
    """Take memory again; answered like an operation. ``serve``: whether all of it is back then, so that requests go on."""

    call: int
    memory: tuple[Memory, ...]
    folder: str
    serve: bool


class JoinGroup(msgspec.Struct, frozen=True, tag="join-group"):
    """Join a group that a trainer leads; answered like an operation, when it stands."""

    call: int
    group: TrainerGroup


class LeaveGroup(msgspec.Struct, frozen=True, tag="leave-group"):
    """Leave such a group; the answer says whether there was one."""

    call: int
    name: str


ChangeWeights = JoinGroup | LeaveGroup | StageWeights | ReadyWeights | ExchangeWeights | DropWeights | Sleep | WakeUp


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Exit now."""


ToScheduler = (
    Submit
    | Abort
    | KeepHandoffs
    | AnnouncePages
    | Operation
    | CacheCommand
    | ReadLora
    | DropLora
    | ChangeWeights
    | Shutdown
)


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded."""

    info: ModelInfo


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The scheduler cannot start; it exits after this."""

    message: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A submitted request was not accepted.

    ``kind``: the name of its class in :mod:`sapwood_common.errors`; the scheduler process knows no gRPC status.
    """

    serial: int
    kind: str
    message: str
    field: str | None
    retry_after: float | None


class Step(msgspec.Struct, tag="step"):
    """The results of one scheduler step.

    ``kv_events``: what the prefix cache stored and removed since the last message; ``times``: how long this step took, and the
    steps before it for which no message was sent; ``experts``: now and then, how many tokens the model's experts have got;
    ``sums``: now and then, how often each method has summed tensors over ranks; ``rank_kv_events``: with data-parallel attention,
    the events of each rank's own prefix cache, which ``kv_events`` merges; ``weights``: the number of the weights that
    have computed the outputs; ``pictures``: what became of pictures so far, if that has changed.
    """

    outputs: list[RequestOutput]
    load: Load
    kv_events: list[KvEvent] = []
    times: list[StepTime] = []
    experts: ExpertLoad | None = None
    sums: dict[str, int] | None = None
    rank_kv_events: list[list[KvEvent]] = []
    weights: int = 0
    pictures: PictureUse | None = None


class Answered(msgspec.Struct, frozen=True, tag="answered"):
    """An operation is done; holds its result.

    Attributes:
        page_fingerprint: Of a command on the cache's tiers: as :class:`~sapwood_worker.records.model_info.ModelInfo` has it.
        lora: The facts of an adapter that was read.
        weights: What is staged of an update, or what stands for the weights after an exchange.
    """

    call: int
    number: int = 0
    text: str = ""
    tiers: list[TierReport] = []
    page_fingerprint: bytes = b""
    lora: LoraFacts | None = None
    weights: WeightsFacts | None = None


class CallFailed(msgspec.Struct, frozen=True, tag="call-failed"):
    """An operation was refused; see Refused."""

    call: int
    kind: str
    message: str
    field: str | None


FromScheduler = Ready | Failed | Refused | Step | Answered | CallFailed

to_scheduler_decoder = msgspec.msgpack.Decoder(ToScheduler)
from_scheduler_decoder = msgspec.msgpack.Decoder(FromScheduler)
_encoder = msgspec.msgpack.Encoder()


def encode(message: ToScheduler | FromScheduler) -> bytes:
    """The msgpack bytes of any of the messages above."""
    return _encoder.encode(message)


# The scheduler process's end of the sockets between the worker's two processes.


_WAIT_MS = 500
"""The loop checks the leases of KV transfers at least this often."""


class OrphanedError(Exception):
    """The front is gone."""


class ZmqChannel:
    """Implements :class:`Channel` over two ZeroMQ sockets.

    Args:
        folder: Where the front's sockets are.
        parent: The front's process id; waiting ends when that process is gone.
    """

    def __init__(self, folder: Path, parent: int) -> None:
        self._parent = parent
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.set_hwm(0)
        self._inbox.connect(f"ipc://{folder}/to-scheduler")
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.set_hwm(
            0
        )  # the front always reads, and merges outputs that its clients do not read, which bounds memory
        self._outbox.setsockopt(zmq.LINGER, 2_000)
        self._outbox.connect(f"ipc://{folder}/from-scheduler")

    def receive(self, *, wait: bool) -> list[ToScheduler]:
        """Removes and returns all messages that are there.

        Raises:
            OrphanedError: The front is gone.
        """
        if wait and not self._inbox.poll(_WAIT_MS) and os.getppid() != self._parent:
            raise OrphanedError
        messages: list[ToScheduler] = []
        while True:
            try:
                messages.append(to_scheduler_decoder.decode(self._inbox.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages

    def send(self, message: FromScheduler) -> None:
        self._outbox.send(encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        """Sends what is queued and closes."""
        self._inbox.close()
        self._outbox.close()
        self._context.term()


# Debug lines that say when messages about KV transfers pass, for ``benchmarks/gpu/bench_handoff.py --stages``.
#
# Nothing of it runs unless the log level is ``debug``.


def stages_are_logged() -> bool:
    """True if the log level is debug."""
    return logger.isEnabledFor(logging.DEBUG)


def staged_send(send: Callable[[ToScheduler], None]) -> Callable[[ToScheduler], None]:
    """Sends as ``send`` does, with a line for each message of a KV transfer."""

    def staged(message: ToScheduler) -> None:
        send(message)
        for stage in _asked(message):
            log_stage(f"{stage} passed on")

    return staged


def staged_receive(receive: Callable[[FromScheduler], None]) -> Callable[[FromScheduler], None]:
    """Receives as ``receive`` does, with a line for each message with tokens or pages."""

    def staged(message: FromScheduler) -> None:
        for stage in _answered(message):
            log_stage(f"{stage} at front")
        receive(message)

    return staged


class Channel(Protocol):
    """Where the scheduler's loop gets its messages and sends its answers."""

    def receive(self, *, wait: bool) -> list[ToScheduler]:
        """Removes and returns all messages that are there.

        Args:
            wait: If there is none, wait for one; may still return an empty list.
        """
        ...

    def send(self, message: FromScheduler) -> None:
        """Sends a message, in order; never blocks."""
        ...


class StagedChannel:
    """Implements :class:`Channel` over another one.

    Args:
        channel: The other one.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def receive(self, *, wait: bool) -> list[ToScheduler]:
        """The messages of the other channel."""
        messages = self._channel.receive(wait=wait)
        for message in messages:
            for stage in _asked(message):
                log_stage(f"{stage} taken")
        return messages

    def send(self, message: FromScheduler) -> None:
        """Sends a message over the other channel."""
        self._channel.send(message)
        for stage in _answered(message):
            log_stage(f"{stage} sent")


def _asked(message: ToScheduler) -> Iterator[str]:
    if isinstance(message, Submit) and (message.hands_off or message.ticket is not None):
        yield "request"
    elif isinstance(message, AnnouncePages):
        yield "pages"


def _answered(message: FromScheduler) -> Iterator[str]:
    if isinstance(message, Step):
        if message.outputs:
            yield "tokens"
        if any(output.ticket is not None for output in message.outputs):
            yield "ticket" if any(output.finish_reason == "handoff" for output in message.outputs) else "pages"
