"""The front's side of the scheduler: submits requests and hands what comes back to their generations."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from sapwood_common import errors
from sapwood_common.contract.child_seed import child_seed
from sapwood_common.contract.sampling import SamplingParams
from sapwood_worker.front.embedding_calls import EmbeddingCalls
from sapwood_worker.front.generation import Generation
from sapwood_worker.front.kv_event_stream import KvEventStream
from sapwood_worker.front.observer import EngineObserver
from sapwood_worker.ipc.messages import (
    Abort,
    AnnouncePages,
    Answered,
    CacheCommand,
    CacheVerb,
    CallFailed,
    Flush,
    FromScheduler,
    KeepHandoffs,
    Operation,
    Pause,
    Pin,
    Refused,
    Resume,
    StartProfile,
    Step,
    StopProfile,
    Submit,
    ToScheduler,
    Unpin,
)
from sapwood_worker.ipc.vitals import Vitals
from sapwood_worker.records.experts import ExpertLoad
from sapwood_worker.records.handoff import NO_HANDOFF, Handoff
from sapwood_worker.records.load import Load
from sapwood_worker.records.terms import USUAL, Terms
from sapwood_worker.records.tier_report import TierReport
from sapwood_worker.settings.names import Role

_REFUSALS: dict[str, type[errors.SapwoodError]] = {
    kind.__name__: kind for kind in (errors.InvalidArgumentError, errors.ResourceExhaustedError)
}


class SchedulerLostError(errors.UnavailableError):
    """The scheduler process is gone, and with it what it was computing; it is started anew."""


class Engine:
    """Submits requests to the scheduler process and streams what comes back. Lives on one event loop.

    Args:
        send: Hands a message to the scheduler process; never blocks.
        observer: Told what happens.
        role: What the worker does of a request.
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
        """What pages hold besides tokens, once a role that the worker got while it ran needed it."""
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
        """With data-parallel attention, what each rank caches; empty if nobody asks (:meth:`cache_streams`)."""
        self.load = Load()
        """The load after the last step."""
        self.experts = ExpertLoad()
        """How many tokens the model's experts got, at most a second old."""
        self.sums: dict[str, int] = {}
        """How often each method has summed tensors over the ranks of a layer, at most a second old."""
        self.vitals = Vitals()
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

        generation = self._by_id[request_id] = Generation(request_id, count, on_close)
        prompt = array("I", token_ids).tobytes()
        for index, serial in enumerate(serials):
            self._running[serial] = generation, index
            own = sampling if index == 0 else _continued(sampling, index)
            self._observer.submitted(serial, request_id, traceparent)
            self._send(Submit(serial, request_id, prompt, own, grammar, output_tokens, terms, "", *handoff))
        return generation

    async def set_role(self, role: Role) -> None:
        """Makes ready what a role needs; what an earlier one needed is kept.

        Raises:
            InvalidArgumentError: The worker cannot take it; the message says why.
        """
        async with (
            self._changing_role
        ):  # one that reads files is answered after one that is asked for later and does not
            await self.cache_command("role", role)
            self.roles = (*(each for each in self.roles if each != role), role)

    def keep_handoffs(self, renewed: Iterable[bytes], released: Iterable[bytes]) -> None:
        """Begins the leases of handed-off prompts anew and ends others', by their transfer ids."""
        self._send(KeepHandoffs(list(renewed), list(released)))

    def announce(self, pages: AnnouncePages) -> None:
        """Has pages read that another worker keeps for a request which is likely to come."""
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

    async def pause(self, *, retract: bool) -> None:
        """Stops computing until :meth:`resume`; ``retract`` also frees the pages of running requests."""
        await self._ask(lambda call: Pause(call, retract))

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

    async def _ask(self, make: Callable[[int], Operation | CacheCommand]) -> Answered:
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
            case Step(outputs, load, kv_events, times, experts, sums, rank_kv_events):
                self.experts = experts or self.experts
                self.sums = sums or self.sums
                self._observer.steps(times)
                self._observer.outputs(outputs)
                for output in outputs:
                    self.embeddings.put(output)
                    # A generation that was closed meanwhile is not there; its last tokens are dropped.
                    if (found := self._running.get(output.serial)) is not None:
                        generation, index = found
                        generation.put(index, output)
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
        self.experts, self.sums = ExpertLoad(), {}
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
        return SchedulerLostError(f"the worker's scheduler stopped: {self._lost}; it is started anew", retry_after=1.0)


def _continued(sampling: SamplingParams, index: int) -> SamplingParams:
    """The settings of continuation ``index``; only the first one reports the prompt's log probabilities."""
    seed = child_seed(sampling.seed, index)
    return msgspec.structs.replace(sampling, seed=seed, prompt_logprobs=None)
