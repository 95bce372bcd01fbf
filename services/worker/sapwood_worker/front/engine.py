"""The front's side of the scheduler: submits requests and hands the outputs to their generations."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from weakref import WeakValueDictionary

import msgspec
import numpy as np
import numpy.typing as npt

from sapwood_common import errors
from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.contract.seeds import child_seed
from sapwood_worker.front.kv_event_stream import KvEventStream
from sapwood_worker.front.metrics import EngineObserver
from sapwood_worker.ipc.liveness import Liveness
from sapwood_worker.ipc.messages import (
    USUAL,
    Abort,
    AnnouncePages,
    Answered,
    CacheCommand,
    CacheVerb,
    CallFailed,
    ChangeWeights,
    DropLora,
    Flush,
    FromScheduler,
    KeepHandoffs,
    Operation,
    Pause,
    Pin,
    ReadLora,
    Refused,
    Resume,
    StartProfile,
    Step,
    StopProfile,
    Submit,
    Terms,
    ToScheduler,
    Unpin,
)
from sapwood_worker.records.continuations import Continuation
from sapwood_worker.records.expert_load import ExpertLoad
from sapwood_worker.records.handoff import NO_HANDOFF, Handoff, HandoffTicket
from sapwood_worker.records.load import Load, TierReport
from sapwood_worker.records.lora import Lora, LoraFacts
from sapwood_worker.records.output import FinishReason, Pooling, RequestOutput, TokenLogprobs
from sapwood_worker.records.pictures import Picture, PictureUse
from sapwood_worker.records.weights import WeightsFacts
from sapwood_worker.settings import Role

_REFUSALS: dict[str, type[errors.SapwoodError]] = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.SapwoodError)
}


START_VERSION = "default"
"""What the weights are called with which a worker starts."""


class SchedulerLostError(errors.UnavailableError):
    """The scheduler process is gone, and with it what it was computing; it is started again."""


class Engine:
    """Submits requests to the scheduler process and streams what comes back. Lives on one event loop.

    Args:
        send: Hands a message to the scheduler process; never blocks.
        observer: Told what happens.
        role: Which part of a request the worker computes.
        max_waiting: Requests that the scheduler lets wait.
    """

    def __init__(
        self,
        send: Callable[[ToScheduler], None],
        observer: EngineObserver,
        role: Role = "both",
        max_waiting: int = 1024,
    ) -> None:
        self._send = send
        self.roles: tuple[Role, ...] = (role,)
        """All roles that the worker has had, the present one last."""
        self._changing_role = asyncio.Lock()
        self.page_fingerprint = b""
        """A hash of everything besides tokens that pages depend on; set when a role that the worker got at run time needs it."""
        self._observer = observer
        self._serials = itertools.count()
        # By serial: the generation, and the index of its continuation.
        self._running: dict[int, tuple[Generation, int]] = {}
        self._by_id: dict[str, Generation] = {}
        self._calls: dict[int, asyncio.Future[Answered]] = {}
        self._preparing = 0
        self._ended = asyncio.Event()
        self.embeddings = EmbeddingCalls(send, self._serials, self._ended.set, max(1, max_waiting // 2))
        """Embedding requests."""
        self._lost: str | None = None
        self._load_changed = asyncio.Event()
        self.kv_events = KvEventStream()
        """What is cached, on any rank."""
        self.rank_kv_events: list[KvEventStream] = []
        """With data-parallel attention, the cache events of each rank; empty if no subscriber asks (:meth:`cache_streams`)."""
        self.weight_versions = {0: START_VERSION}
        """By the number of the weights, what they are called."""
        self.load = Load()
        """The load after the last step."""
        self.experts = ExpertLoad()
        """How many tokens the model's experts got, at most a second old."""
        self.sums: dict[str, int] = {}
        self.picture_use = PictureUse()
        """How often each method has summed tensors over the ranks of a layer, at most a second old."""
        self.liveness = Liveness()
        """Whether the scheduler process and this one are well."""
        self.load_version = 0
        """Increases with each change of the load or of what is cached."""

    def submit(
        self,
        request_id: str,
        token_ids: Iterable[int],
        sampling: SamplingParams,
        grammar: bytes = b"",
        output_tokens: int = 0,
        count: int = 1,
        traceparent: str | None = None,
        terms: Terms = USUAL,
        handoff: Handoff = NO_HANDOFF,
        on_end: Callable[[], None] = lambda: None,
        pictures: tuple[Picture, ...] = (),
        continuations: tuple[Continuation, ...] = (),
    ) -> Generation:
        """Starts a request; the caller owns it and must read it to its end or close it.

        Several continuations go to the scheduler together: one of them computes the prompt, and the others find it cached.

        Args:
            request_id: The client's name for the request.
            token_ids: The prompt.
            sampling: How to sample.
            grammar: A compiled grammar that the output must match; empty for none.
            output_tokens: How many of the last ``token_ids`` are output of an earlier try.
            count: How many continuations, each with a seed of its own.
            traceparent: The trace context it belongs to.
            terms: Its priority, tenant, namespace and deadline.
            handoff: What it has to do with other workers.
            on_end: Called when it has ended; not if this raises.
            pictures: Those in the prompt.
            continuations: What is scored instead of generating.

        Raises:
            AlreadyExistsError: A request of this id is running.
            SchedulerLostError: The scheduler process is gone.
        """
        self.check()
        if request_id in self._by_id:
            raise errors.AlreadyExistsError(f"request {request_id} is already running", field="request_id")
        serials = [next(self._serials) for _ in range(count)]

        def on_close(active: list[int]) -> None:
            del self._by_id[request_id]
            self._ended.set()
            for index, serial in enumerate(serials):
                del self._running[serial]
                aborted = index in active and self._lost is None
                self._observer.closed(serial, active=aborted)
                if aborted:
                    self._send(Abort(serial))
            on_end()

        generation = self._by_id[request_id] = Generation(request_id, count, on_close, self.weight_versions)
        prompt = array("I", token_ids).tobytes()
        for index, serial in enumerate(serials):
            self._running[serial] = generation, index
            own = sampling if index == 0 else _continued(sampling, index)
            self._observer.submitted(serial, request_id, traceparent)
            self._send(
                Submit(
                    serial,
                    request_id,
                    prompt,
                    own,
                    grammar,
                    output_tokens,
                    terms,
                    "",
                    *handoff,
                    pictures,
                    continuations,
                )
            )
        return generation

    async def set_role(self, role: Role) -> None:
        """Prepares the objects of a role; objects of an earlier role are kept.

        Raises:
            InvalidArgumentError: The worker cannot take it; the message says why.
        """
        async with (
            self._changing_role
        ):  # one that reads files is answered after one that is asked for later and does not
            await self.cache_command("role", role)
            self.roles = (*(each for each in self.roles if each != role), role)

    def keep_handoffs(self, renewed: Iterable[bytes], released: Iterable[bytes]) -> None:
        """Renews the leases of some KV transfers and ends others, by their transfer ids."""
        self._send(KeepHandoffs(list(renewed), list(released)))

    def announce(self, pages: AnnouncePages) -> None:
        """Begins to read pages that another worker keeps for a request that will probably come."""
        self._send(pages)

    def abort(self, request_id: str) -> bool:
        """Ends a request, whose reader gets RequestCancelledError. Returns whether there was one."""
        generation = self._by_id.get(request_id)
        if generation is None:
            return False
        generation.fail(errors.RequestCancelledError(f"request {request_id} was aborted"))
        return True

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Within it a request is being prepared to be submitted: :meth:`wait_idle` waits for that too."""
        self._preparing += 1
        try:
            yield
        finally:
            self._preparing -= 1
            self._ended.set()

    async def wait_idle(self) -> None:
        """Returns once no request runs, neither a generation nor an embedding, and none is being prepared."""
        while self._by_id or self._preparing or self.embeddings.running:
            self._ended.clear()
            await self._ended.wait()

    async def flush_cache(self) -> int:
        """Empties the prefix cache of what no request and no pin holds; returns the number of pages freed.

        Like the other operations it raises UnavailableError if the scheduler process is or goes away.
        """
        return (await self._ask(Flush)).number

    async def pin(self, name: str, token_ids: Iterable[int], namespace: bytes, seconds: float | None) -> int:
        """Keeps what is cached of a prefix from eviction; returns how many tokens that is.

        Raises:
            ResourceExhaustedError: Too much would be pinned.
        """
        prefix = array("I", token_ids).tobytes()
        return (await self._ask(lambda call: Pin(call, name, prefix, namespace, seconds))).number

    async def unpin(self, name: str) -> bool:
        """Lets go of a pinned prefix; returns whether there was one."""
        return bool((await self._ask(lambda call: Unpin(call, name))).number)

    async def pause(self, *, retract: bool, abort: bool = False) -> int:
        """Stops computing until :meth:`resume`; ``retract`` also frees the pages of running requests, ``abort`` ends all requests
        with what there is of their output. Returns how many it has ended."""
        return (await self._ask(lambda call: Pause(call, retract, abort))).number

    async def resume(self) -> None:
        """Ends a pause."""
        await self._ask(Resume)

    async def start_profile(self, folder: str) -> None:
        """Begins to record what the scheduler process does.

        Raises:
            InvalidArgumentError: It records already, or cannot write there.
        """
        await self._ask(lambda call: StartProfile(call, folder))

    async def stop_profile(self) -> str:
        """Ends the recording; returns the path of its file, on the worker's machine.

        Raises:
            InvalidArgumentError: Nothing is being recorded.
        """
        return (await self._ask(StopProfile)).text

    async def read_lora(self, lora: Lora) -> LoraFacts:
        """Has an adapter read into the host's memory.

        Raises:
            InvalidArgumentError: It is wrong; the message names the tensor or module.
            ResourceExhaustedError: There is no memory for it.
        """
        facts = (await self._ask(lambda call: ReadLora(call, lora))).lora
        assert facts is not None
        return facts

    async def drop_lora(self, number: int) -> None:
        """Has an adapter forgotten once its requests have ended; returns then."""
        await self._ask(lambda call: DropLora(call, number))

    async def change_memory(self, make: Callable[[int], ChangeWeights]) -> int:
        """Has the scheduler process give memory back or take it again, or join or leave a trainer's group; returns a number:
        of bytes that it has given back, or 1 for a group that it has left.

        Args:
            make: Makes the message, given the number of the call.

        Raises:
            UnimplementedError: It cannot be given back.
            ResourceExhaustedError: It cannot be had again, or what it held cannot be kept.
        """
        return (await self._ask(make)).number

    async def change_weights(self, make: Callable[[int], ChangeWeights]) -> WeightsFacts:
        """Has the scheduler process stage, ready, exchange or drop weights.

        Args:
            make: Makes the message, given the number of the call.

        Raises:
            InvalidArgumentError: They are wrong; the message names the tensor.
            ResourceExhaustedError: There is no memory for them.
            UnimplementedError: This model's weights cannot be changed.
        """
        return (await self._ask(make)).weights or WeightsFacts(b"", 0, 0)

    async def _ask(
        self, make: Callable[[int], Operation | CacheCommand | ReadLora | DropLora | ChangeWeights]
    ) -> Answered:
        self.check()
        call = next(self._serials)
        future: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        try:
            self._send(make(call))
            return await future
        finally:
            del self._calls[call]

    async def cache_command(self, verb: CacheVerb, argument: str = "") -> list[TierReport]:
        """Shows or changes the tiers of the KV cache; returns them as they are afterwards.

        Raises:
            InvalidArgumentError: It could not be done; the message says why.
        """
        return (await self._ask(lambda call: CacheCommand(call, verb, argument))).tiers

    async def load_after(self, version: int) -> None:
        """Returns once :attr:`load_version` is not ``version`` any more."""
        while self.load_version == version:
            await self._load_changed.wait()

    def receive(self, message: FromScheduler) -> None:
        """Takes a message of the scheduler process."""
        match message:
            case Step(outputs, load, kv_events, times, experts, sums, rank_kv_events, weights, pictures):
                self.experts = experts or self.experts
                self.sums = sums or self.sums
                self.picture_use = pictures or self.picture_use
                self._observer.steps(times)
                self._observer.outputs(outputs)
                for output in outputs:
                    self.embeddings.put(output)
                    # A generation that was closed meanwhile is not there; its last tokens are dropped.
                    if (found := self._running.get(output.serial)) is not None:
                        generation, index = found
                        generation.put(index, output, weights)
                self.kv_events.apply(kv_events)
                for stream, events in zip(self.rank_kv_events, rank_kv_events, strict=False):
                    stream.apply(events)
                if kv_events or load != self.load:
                    self._load_is(load)
            case Refused(serial, kind, text, field, retry_after):
                refusal = _REFUSALS.get(kind, errors.InternalError)(text, field=field, retry_after=retry_after)
                self.embeddings.refuse(serial, refusal)
                if (found := self._running.get(serial)) is not None:
                    generation, index = found
                    generation.refuse(index, refusal)
            case Answered(call):
                self.page_fingerprint = message.page_fingerprint or self.page_fingerprint
                if (future := self._calls.get(call)) is not None and not future.done():
                    future.set_result(message)
            case CallFailed(call, kind, text, field):
                if (future := self._calls.get(call)) is not None and not future.done():
                    future.set_exception(_REFUSALS.get(kind, errors.InternalError)(text, field=field))

    def cache_streams(self, ranks: int) -> Sequence[KvEventStream]:
        """One stream of events for each prefix cache; to be called before a scheduler has started."""
        self.rank_kv_events = [KvEventStream() for _ in range(ranks)] if ranks > 1 else []
        return self.rank_kv_events or [self.kv_events]

    def scheduler_started(self, epoch: int) -> None:
        """A scheduler process is ready, with nothing cached; requests may come."""
        self._lost = None
        self.experts, self.sums, self.picture_use = ExpertLoad(), {}, PictureUse()
        for stream in (self.kv_events, *self.rank_kv_events):
            stream.begin(epoch)
        for role in self.roles if len(self.roles) > 1 else ():  # nobody waits for the answers
            self._send(CacheCommand(next(self._serials), "restore_role", role))
        self._load_is(Load())

    def scheduler_lost(self, reason: str) -> None:
        """The scheduler process is gone: every request ends with SchedulerLostError, and so does every later one."""
        self._lost = reason
        self._load_is(Load())
        for generation in tuple(self._by_id.values()):
            generation.fail(self._gone())
        self.embeddings.lost(self._gone())
        for future in self._calls.values():
            if not future.done():
                future.set_exception(self._gone())

    def news(self) -> None:
        """There is something to report besides the load: those who wait for a change of it go on."""
        self._load_is(self.load)

    def _load_is(self, load: Load) -> None:
        self.load = load
        self.load_version += 1
        self._load_changed.set()
        self._load_changed = asyncio.Event()

    def check(self) -> None:
        """Raises UnavailableError if the scheduler process is gone."""
        if self._lost is not None:
            raise self._gone()

    def _gone(self) -> SchedulerLostError:
        return SchedulerLostError(f"the worker's scheduler stopped: {self._lost}; it starts again", retry_after=1.0)


def _continued(sampling: SamplingParams, index: int) -> SamplingParams:
    """The settings of continuation ``index``; only the first one reports the prompt's log probabilities."""
    seed = child_seed(sampling.seed, index)
    return msgspec.structs.replace(sampling, seed=seed, prompt_logprobs=None)


# The front's side of one call: the streams of its continuations, one owner, one way to end it early.


class _Continuation:
    """The outputs of one continuation that the reader has not taken yet; ``last`` is the latest one, None when all are taken.

    Those that other weights have computed are not merged: ``before`` has them, merged among themselves.
    """

    __slots__ = ("before", "finished", "last", "logprobs", "prompt_logprobs", "ticket", "tokens", "weights")

    def __init__(self) -> None:
        self.finished = False
        self.drop()

    def drop(self) -> None:
        self.before: deque[RequestOutput] = deque()
        self._begin()

    def _begin(self) -> None:
        self.weights = 0
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.last: RequestOutput | None = None
        self.ticket: HandoffTicket | None = None

    def add(self, output: RequestOutput, weights: int, index: int) -> None:
        if self.last is not None and weights != self.weights:
            self.before.append(self._merged(index))
        self.weights = weights
        self.tokens += output.token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.last = output
        if output.ticket is not None:
            before = self.ticket if output.finish_reason is None else None
            self.ticket = output.ticket if before is None else before.joined(output.ticket)

    @property
    def empty(self) -> bool:
        """Whether all is taken."""
        return self.last is None and not self.before

    def merged(self, index: int) -> RequestOutput:
        """The outputs added since the last call, merged into one; where several weights have computed them, those of the first.
        There must be some."""
        return self.before.popleft() if self.before else self._merged(index)

    def _merged(self, index: int) -> RequestOutput:
        last = self.last
        assert last is not None
        reason: FinishReason | None = last.finish_reason
        result = RequestOutput(
            last.serial,
            self.tokens,
            reason,
            last.prompt_tokens,
            last.completion_tokens,
            last.cached_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            index=index,
            drafted_tokens=last.drafted_tokens,
            accepted_tokens=last.accepted_tokens,
            ticket=self.ticket,
            weights=self.weights,
        )
        self._begin()
        return result


class Generation:
    """One call. Its one reader reads it to its end (``async for``, or :meth:`listen` and :meth:`take`) or closes it.

    Outputs that the reader has not taken yet are merged into one for each continuation: a slow reader loses nothing, and what
    is kept for it is at most its request's own tokens. A continuation with a KV transfer ends when its ticket is taken: until
    then no other worker knows of the pages that are kept for it.

    Args:
        request_id: The client's name for the request.
        count: How many continuations; each is a request to the scheduler.
        on_close: Called once, when it ends or is closed, with the indices of the continuations the scheduler may still be at.
        weight_versions: By the number of the weights, what they are called.
    """

    def __init__(
        self,
        request_id: str,
        count: int,
        on_close: Callable[[list[int]], None],
        weight_versions: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._weight_versions = weight_versions
        self._told_weights = -1
        self.request_id = request_id
        self.lora_digest = b""
        """That of its adapter; empty: it has none."""
        self._on_close = on_close
        self._continuations = [_Continuation() for _ in range(count)]
        self._open = count
        # Indices with something to take, in order of their first untaken output.
        self._ready: dict[int, None] = {}
        self._error: errors.SapwoodError | None = None
        self._closed = False
        self._wake: asyncio.Future[None] | None = None
        self._listener: Callable[[], None] | None = None

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> RequestOutput:
        """The outputs of some continuation since they were last taken, as one.

        Raises:
            RequestCancelledError: It was aborted.
            SapwoodError: The scheduler refused or failed it, or is gone.
        """
        while (output := self.take()) is None:
            if self._closed:
                raise StopAsyncIteration
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        return output

    def knows_weights(self, output: RequestOutput) -> bool:
        """Whether :meth:`weight_version` was sent for the weights of an output."""
        return output.weights == self._told_weights

    def weight_version(self, output: RequestOutput) -> str:
        """What the weights are called that have computed an output; empty: they are those of the call before."""
        if self.knows_weights(output):
            return ""
        self._told_weights = output.weights
        return self._weight_versions.get(output.weights, "")

    @property
    def ended(self) -> bool:
        """Whether nothing more comes and all is taken."""
        return self._closed and not self._ready and self._error is None

    def listen(self, listener: Callable[[], None]) -> None:
        """Calls ``listener`` from now on whenever :meth:`take` may have something; at once if it has already."""
        self._listener = listener
        if self._ready or self._closed:
            listener()

    def take(self) -> RequestOutput | None:
        """The outputs of some continuation since they were last taken, as one; None if there are none. Never waits.

        Raises:
            SapwoodError: As reading does.
        """
        if not self._ready:
            if self._error is not None:
                raise self._error
            return None
        index = next(iter(self._ready))
        del self._ready[index]
        output = self._continuations[index].merged(index)
        if not self._continuations[index].empty:
            self._ready[index] = None
        if output.finish_reason == "handoff":
            self._finished(index)
        return output

    def close(self) -> None:
        """Ends the call in any state; does nothing if it has ended. Unread outputs are dropped."""
        self._ready.clear()
        for continuation in self._continuations:
            continuation.drop()
        if not self._closed:
            self._end()
            self._notify()

    def put(self, index: int, output: RequestOutput, weights: int = 0) -> None:
        """Adds a step's output of one continuation, which weights of this number have computed."""
        if self._closed:
            return
        if output.finish_reason in ("deadline", "error"):
            self._continuations[index].finished = True
        if output.finish_reason == "deadline":
            self.fail(errors.DeadlineExceededError("the deadline passed"))
            return
        if output.finish_reason == "error":
            self.fail(
                errors.InvalidArgumentError(output.error, field=output.error_field)
                if output.error_field
                else errors.InternalError(output.error)
            )
            return
        self._continuations[index].add(output, weights, index)
        if output.token_ids or output.ticket is not None or output.finish_reason is not None:
            self._ready[index] = None
        if output.finish_reason is not None and output.finish_reason != "handoff":
            self._finished(index)
        self._notify()

    def refuse(self, index: int, error: errors.SapwoodError) -> None:
        """Ends the call with the error for which the scheduler did not let a continuation in."""
        self._continuations[index].finished = True
        self.fail(error)

    def fail(self, error: errors.SapwoodError) -> None:
        """Ends the call with an error, which the reader gets after what came before it."""
        if not self._closed:
            self._error = error
            self._end()
            self._notify()

    def _finished(self, index: int) -> None:
        self._continuations[index].finished = True
        self._open -= 1
        if not self._open and not self._closed:
            self._end()

    def _end(self) -> None:
        self._closed = True
        self._on_close([index for index, each in enumerate(self._continuations) if not each.finished])

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
        if self._listener is not None:
            self._listener()


# The front's side of embedding requests: each input is a request of its own to the scheduler, all answered together.


_SAMPLING = SamplingParams(max_tokens=1)


class EmbeddingCalls:
    """Embedding requests on their way. Lives on the engine's event loop.

    Args:
        send: Hands a message to the scheduler process; never blocks.
        serials: The engine's source of serial numbers.
        on_end: Called when a request has ended.
        most: Inputs of one tenant that are with the scheduler at a time: all of them might be more than it lets wait.

    Attributes:
        running: Requests that have not ended.
    """

    def __init__(
        self, send: Callable[[ToScheduler], None], serials: Iterator[int], on_end: Callable[[], None], most: int
    ) -> None:
        self._send = send
        self._serials = serials
        self._on_end = on_end
        self._most = most
        self.running = 0
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._rooms: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """By tenant; its requests hold it."""

    async def embed(
        self,
        request_id: str,
        inputs: Sequence[Sequence[int]],
        pooling: Pooling,
        terms: Terms,
        *,
        normalize: bool,
        dimensions: int | None = None,
    ) -> npt.NDArray[np.float32]:
        """The embeddings of some inputs.

        Args:
            request_id: For logs.
            inputs: The token ids of each input.
            pooling: How hidden states become one vector.
            terms: Priority, tenant, namespace and deadline of all of them.
            normalize: Whether each vector is to have length 1.
            dimensions: How many of its numbers each is cut to first; None: all.

        Returns:
            float32 [inputs, dimensions or hidden_size].

        Raises:
            SapwoodError: An input was refused or failed, or the scheduler is gone; the others are aborted.
        """
        room = self._rooms.get(terms.tenant)
        if room is None:
            room = self._rooms[terms.tenant] = asyncio.Semaphore(self._most)

        async def ask(index: int, tokens: Sequence[int]) -> bytes:
            async with room:
                serial = next(self._serials)
                future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
                self._waiting[serial] = future
                prompt = array("I", tokens).tobytes()
                self._send(Submit(serial, f"{request_id}/{index}", prompt, _SAMPLING, terms=terms, pooling=pooling))
                try:
                    return await future
                finally:
                    del self._waiting[serial]
                    if future.cancelled():  # with this task
                        self._send(Abort(serial))

        tasks = [asyncio.ensure_future(ask(index, tokens)) for index, tokens in enumerate(inputs)]
        self.running += 1
        try:
            raw = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.running -= 1
            self._on_end()
        vectors = np.frombuffer(b"".join(raw), np.float32).reshape(len(inputs), -1)[:, :dimensions]
        if normalize:
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return vectors

    def put(self, output: RequestOutput) -> None:
        """Takes an output, if it is of an embedding request."""
        future = self._waiting.get(output.serial)
        if future is None or future.done() or output.finish_reason is None:
            return
        if output.finish_reason == "error":
            future.set_exception(errors.InternalError(output.error))
        elif output.finish_reason == "deadline":
            future.set_exception(errors.DeadlineExceededError("the deadline passed"))
        else:
            future.set_result(output.embedding)

    def refuse(self, serial: int, error: errors.SapwoodError) -> None:
        """Fails the request of an input that the scheduler did not accept."""
        future = self._waiting.get(serial)
        if future is not None and not future.done():
            future.set_exception(error)

    def lost(self, error: errors.SapwoodError) -> None:
        """Fails all requests: the scheduler is gone."""
        for serial in tuple(self._waiting):
            self.refuse(serial, error)
