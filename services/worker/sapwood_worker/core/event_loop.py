"""The loop of the scheduler process: takes messages, plans a step, runs it and hands out its tokens."""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

import msgspec

from sapwood_common.errors import InvalidArgumentError, SapwoodError
from sapwood_common.grammar.artefact import BUILD_STACK_BYTES
from sapwood_common.settings.flags import service_flag
from sapwood_worker.core.lora_reads import LoraReads
from sapwood_worker.core.observers import Observer
from sapwood_worker.core.scheduler.rank_planner import RankPlanner
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.core.tiering import Tiering, TiersOfRanks, device_report
from sapwood_worker.core.weight_updates import WeightUpdates
from sapwood_worker.ipc.messages import (
    CACHE_FIELDS,
    Abort,
    AnnouncePages,
    Answered,
    CacheCommand,
    CallFailed,
    Channel,
    DropLora,
    DropWeights,
    ExchangeWeights,
    Flush,
    JoinGroup,
    KeepHandoffs,
    LeaveGroup,
    Operation,
    Pause,
    Pin,
    ReadLora,
    ReadyWeights,
    Refused,
    Resume,
    Shutdown,
    Sleep,
    StageWeights,
    StartProfile,
    Step,
    StopProfile,
    Submit,
    ToScheduler,
    Unpin,
    WakeUp,
)
from sapwood_worker.model.grammar.backend import GrammarBackend
from sapwood_worker.records.grammar_state import GrammarState
from sapwood_worker.records.load import Load
from sapwood_worker.records.output import RequestOutput
from sapwood_worker.records.pictures import Picture
from sapwood_worker.records.step import LatePages, LaunchedStep, RankLostError, Runner

logger = logging.getLogger(__name__)


MOST_FAILURES = 3
"""Failed steps in a row after which the process ends: a broken GPU context does not recover."""

_GRAMMAR_WAIT_SECONDS = 0.001
"""Seconds that an idle loop waits for a grammar to be built before it looks at its messages again."""

_LORA_WAIT_SECONDS = 0.001
"""Seconds that an idle loop waits for an adapter or weights to be read before it looks at its messages again."""

_STORAGE_WAIT_SECONDS = 0.001
"""Seconds that a loop with nothing to compute waits for the KV cache's third tier before it looks at its messages again."""


_WITHOUT_TIERS = (("stats", ""), ("clear", "device"), ("clear", "all"), ("role", "both"), ("restore_role", "both"))
"""Commands on the cache's tiers that need none but the device's."""


class EventLoop:
    """Runs one scheduler and one runner, in one of three ways. The outputs are the same.

    - Step by step.
    - Overlapped: the host plans and launches step N + 1 while the device computes step N, then hands out N's tokens. A request
      that ends or is aborted in N is still part of N + 1; what N + 1 computes of it is thrown away. Requests with a grammar go
      step by step, because a grammar must see each token before the next. So do steps after a draft.
    - With micro-batches: steps are launched until :meth:`Scheduler.plans_ahead` steps are in flight. Where requests
      are shared that is one for each micro-batch, and one more if the runner computes by itself; with too few to share it is
      two, unless prompts are being computed. So all stages of a pipeline compute at the same time, each for other requests.

    If the runner fails a step, the requests in it end with an error. An error of the scheduler itself ends the process.

    Args:
        scheduler: The core.
        runner: The model.
        channel: The way to the gRPC front.
        grammars: Makes the matchers of requests with a grammar; None: no such requests come.
        operations: Carries out what operators ask for; None: flush, pin and pause, but no profile.
        tiering: The KV cache's lower tiers, which the scheduler knows; None: there are none.
        loras: Reads and drops adapters; None: no such messages come.
        weights: Changes the model's weights; None: no such messages come.
        check_pictures: Raises InvalidArgumentError unless the model can use these pictures at these tokens; None: none come.
        observers: See what the loop does, in this order.
        overlap: Plan and launch a step while the one before is computed, if the runner computes by itself.
    """

    def __init__(
        self,
        scheduler: Scheduler | RankPlanner,
        runner: Runner,
        channel: Channel,
        grammars: GrammarBackend | None = None,
        operations: Operations | None = None,
        tiering: Tiering | TiersOfRanks | None = None,
        loras: LoraReads | None = None,
        weights: WeightUpdates | None = None,
        check_pictures: Callable[[Sequence[Picture], array[int]], None] | None = None,
        *,
        observers: Sequence[Observer] = (),
        overlap: bool = True,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._channel = channel
        self._grammars: PendingGrammars[Submit] | None = None if grammars is None else PendingGrammars(grammars)
        self._operations = operations or Operations(scheduler)
        self._tiering = tiering
        self._loras = loras
        self._weights = weights
        self._check_pictures = check_pictures
        self._observers = tuple(observers)
        self._ahead = scheduler.depth - 1 or int(overlap and runner.asynchronous)
        self._launched: deque[LaunchedStep] = deque()
        self._failures = 0
        self._reported: Load | None = None

    def run(self) -> None:
        """Loops until it is asked to shut down.

        Raises:
            RankLostError: One of the ranks that run the model together is lost.
            RuntimeError: The runner failed several steps in a row; its state cannot be trusted.
            AssertionError: The scheduler found a page leaked or freed twice.
        """
        self._report([])
        while True:
            idle = not (self._busy or self._grammars or self._staging)
            if idle:
                for observer in self._observers:
                    observer.idle()
            messages = self._channel.receive(wait=idle)
            # Whatever may hang runs between begin() and end(): an operation, a cache tier, a plan, the model.
            for observer in self._observers:
                observer.begin()
            for message in messages:
                if isinstance(message, Shutdown):
                    return
                self._take(message)
            self._turn()
            for observer in self._observers:
                observer.end()

    @property
    def _staging(self) -> bool:
        """Whether adapters or weights are being read."""
        reading = self._loras is not None and self._loras.reading
        return bool(reading) or (self._weights is not None and self._weights.busy)

    @property
    def _busy(self) -> bool:
        """Whether a step is due, or the tiers are being changed."""
        changing = self._tiering is not None and self._tiering.busy
        return changing or self._scheduler.can_step or self._scheduler.has_copies or bool(self._launched)

    def _turn(self) -> None:
        """One round of the loop, after its messages were taken."""
        self._admit_built()
        if self._tiering is not None:
            self._tiering.poll()
        worked = self._scheduler.has_work
        if self._loras is not None:
            for answer in self._loras.poll(0.0 if self._busy else _LORA_WAIT_SECONDS):
                self._channel.send(answer)
        if self._weights is not None:
            self._change_weights(self._weights)
        outputs = self._scheduler.expire() + self._scheduler.handoffs.poll()
        if self._busy:
            self._step(outputs)
        self._report(outputs)
        if worked and not self._scheduler.has_work:
            self._scheduler.check_idle()

    def _changing(self) -> WeightUpdates:
        assert self._weights is not None, "a model's loop can change its weights"
        return self._weights

    def _change_weights(self, weights: WeightUpdates) -> None:
        """Exchanges weights if that is due, when the steps in flight are over and their outputs have been sent."""
        while weights.due:
            self._report(self._take_results(0))
            number, outputs = weights.number, weights.exchange()
            self._report(outputs, number)
        for answer in weights.poll(0.0 if self._busy else _LORA_WAIT_SECONDS):
            self._channel.send(answer)

    def _take(self, message: ToScheduler) -> None:
        match message:
            case Submit(grammar=b""):
                self._add(message, None)
            case Submit(serial, grammar=compiled, output_tokens=count):
                assert self._grammars is not None, "the front lets no grammar through without a vocabulary"
                generated = array("I", message.token_ids)[-count:] if count else ()
                self._grammars.start(serial, message, compiled, generated)
            case Abort(serial):
                for observer in self._observers:
                    observer.aborted(serial)
                if self._grammars is None or not self._grammars.abort(serial):
                    self._scheduler.abort(serial)
            case Shutdown():
                raise AssertionError("the loop ends before")
            case CacheCommand():
                self._command(message)
            case ReadLora() | DropLora():
                assert self._loras is not None, "the front lets no adapter through without slots"
                if isinstance(message, ReadLora):
                    self._loras.read(message)
                else:
                    self._loras.drop(message)
            case (
                JoinGroup()
                | LeaveGroup()
                | StageWeights()
                | ReadyWeights()
                | ExchangeWeights()
                | DropWeights()
                | Sleep()
                | WakeUp()
            ):
                self._changing().take(message)
            case KeepHandoffs(renewed, released):
                self._scheduler.handoffs.keep(renewed, released)
            case AnnouncePages(ticket, token_ids, namespace):
                self._scheduler.handoffs.announced(ticket, array("I", token_ids), namespace)
            case Pause(abort=True):
                aborted = self._scheduler.abort_all()
                self._report(aborted)
                self._channel.send(msgspec.structs.replace(self._operations.run(message), number=len(aborted)))
            case operation:
                self._channel.send(self._operations.run(operation))

    def _command(self, command: CacheCommand) -> None:
        """Carries out a command on the cache's tiers; some are answered later."""
        call, verb, argument = command.call, command.verb, command.argument

        def answer(error: str) -> None:
            load = self._scheduler.load()
            tiers = device_report(load) if self._tiering is None else self._tiering.report(load)
            failed = CallFailed(call, InvalidArgumentError.__name__, error, CACHE_FIELDS.get(verb))
            fingerprint = b"" if self._tiering is None else self._tiering.fingerprint
            self._channel.send(failed if error else Answered(call, tiers=tiers, page_fingerprint=fingerprint))

        if verb == "clear" and argument in ("device", "all"):
            self._scheduler.clear_device()
        if self._tiering is not None:
            self._tiering.command(verb, argument, answer)
        else:
            known = (verb, argument) in _WITHOUT_TIERS
            flag = service_flag("worker", "host-cache")
            answer("" if known else f"this worker's KV cache has no second tier: {flag} gives it one")

    def _admit_built(self) -> None:
        """Lets the requests in whose grammar has been built."""
        if not self._grammars:  # none is pending
            return
        for message, built in self._grammars.poll(0.0 if self._scheduler.has_work else _GRAMMAR_WAIT_SECONDS):
            if isinstance(built, SapwoodError):
                self._refuse(message.serial, built)
            elif built.finished:  # the output of an earlier try has completed the grammar
                built.close()
                done = RequestOutput(message.serial, [], "stop", len(array("I", message.token_ids)))
                self._channel.send(Step([done], self._scheduler.load()))
            else:
                self._add(message, built)

    def _add(self, message: Submit, grammar: GrammarState | None) -> None:
        prompt = array("I", message.token_ids)
        terms = message.terms
        request = Request(
            message.serial,
            message.request_id,
            prompt,
            message.sampling,
            terms.namespace,
            grammar,
            message.output_tokens,
            priority=terms.priority,
            tenant=terms.tenant,
            deadline=None if terms.seconds is None else time.monotonic() + terms.seconds,
            pooling=message.pooling,
            hands_off=message.hands_off,
            ticket=message.ticket,
            lora=terms.lora,
            pictures=message.pictures,
            continuations=message.continuations,
        )
        try:
            if message.pictures:
                assert self._check_pictures is not None, "the front lets no picture through without a model for it"
                self._check_pictures(message.pictures, prompt)
            self._scheduler.add(request)
            for observer in self._observers:
                observer.submitted(request)
        except SapwoodError as error:
            if grammar is not None:
                grammar.close()
            self._refuse(message.serial, error)

    def _refuse(self, serial: int, error: SapwoodError) -> None:
        self._channel.send(Refused(serial, type(error).__name__, error.message, error.field, error.retry_after))

    def _step(self, outputs: list[RequestOutput]) -> None:
        """Launches a step, if there is one to plan, and takes the results of earlier steps; without overlap also its own.

        Args:
            outputs: New outputs are added here. It is emptied if they had to be sent before the step was launched.
        """
        while self._launched and not self._scheduler.plans_ahead:
            outputs += self._take_results(len(self._launched) - 1)
        planned = self._scheduler.schedule()
        if planned:
            for observer in self._observers:
                observer.planned(planned)
            during = None if planned.copies is None else planned.copies.during
            if during is not None and not self._runner.asynchronous:
                self._tell(during, outputs)
            try:
                self._launched.append(self._runner.launch(planned))
                for observer in self._observers:
                    observer.launched(planned)
            except RankLostError:
                raise
            except Exception as error:
                outputs += self._take_results(0)
                outputs += self._fail(error)
                return
            if during is not None and self._runner.asynchronous:
                self._tell(during, outputs)
        elif not self._launched:  # every request was aborted, or waits for the cache's third tier
            self._scheduler.wait_for_storage(_STORAGE_WAIT_SECONDS)
        outputs += self._take_results(self._ahead if planned else max(0, len(self._launched) - 1))
        if outputs and self._scheduler.handoffs.owes_tickets:  # the first token need not wait for the ticket
            self._report(outputs)
            outputs.clear()
        outputs += self._scheduler.handoffs.tickets()

    def _tell(self, during: LatePages, outputs: list[RequestOutput]) -> None:
        """Tells of the pages that a step fills: other workers read them meanwhile. Sends ``outputs`` and empties it."""
        during.take()
        self._report(outputs + self._scheduler.handoffs.tickets())
        outputs.clear()

    def _take_results(self, keep: int) -> list[RequestOutput]:
        """Waits for launched steps, oldest first, until ``keep`` of them are left; returns their outputs."""
        outputs: list[RequestOutput] = []
        while len(self._launched) > keep:
            try:
                result = self._launched.popleft().result()
            except RankLostError:
                raise
            except Exception as error:
                # Later steps' results are useless, but the steps must have ended before the next begins.
                while self._launched:
                    with suppress(Exception):
                        self._launched.popleft().result()
                return outputs + self._fail(error)
            self._failures = 0
            outputs += self._scheduler.update(result)
            for observer in self._observers:
                observer.done(result)
        return outputs

    def _fail(self, error: Exception) -> list[RequestOutput]:
        """Ends the requests of the steps in flight with an error."""
        computed = self._scheduler.in_flight()
        load = self._scheduler.load()
        for observer in self._observers:
            observer.failed(error, computed, load)
        names = ", ".join(computed)
        outputs = self._scheduler.fail_step("the model failed to compute this step; the worker's log has the details")
        logger.error("a step failed; it was computing the requests %s", names, exc_info=error)
        self._failures += 1
        if self._failures >= MOST_FAILURES:
            raise RuntimeError(f"{MOST_FAILURES} steps in a row failed") from error
        return outputs

    def _report(self, outputs: list[RequestOutput], weights: int | None = None) -> None:
        """Sends outputs and what else is new; ``weights`` are those that have computed the outputs, if not those in use."""
        load = self._scheduler.load()
        events, rank_events = self._scheduler.take_kv_events(), self._scheduler.take_rank_kv_events()
        if weights is None:
            weights = 0 if self._weights is None else self._weights.number
        message = Step(outputs, load, events, rank_kv_events=rank_events, weights=weights)
        idle = not self._busy
        news = [observer.report(message, idle=idle) for observer in self._observers]
        if outputs or events or rank_events or any(news) or load != self._reported:
            self._reported = load
            self._channel.send(message)
            for observer in self._observers:
                observer.sent()


def _deep_threads(count: int) -> ThreadPoolExecutor:
    """Threads with the stack that building a grammar may need, all started: a stack's size is set for those that start next."""
    threads = ThreadPoolExecutor(count, thread_name_prefix="grammar")
    all_started = threading.Barrier(count + 1)
    before = threading.stack_size(BUILD_STACK_BYTES)
    try:
        for _ in range(count):
            threads.submit(all_started.wait)
    finally:
        threading.stack_size(before)
    all_started.wait()
    return threads


# Requests whose grammar is being built: they are scheduled once it is there, and delay no other request.
ItemT = TypeVar("ItemT")


class PendingGrammars(Generic[ItemT]):
    """Builds matchers in threads. The methods are called from one thread, the loop's.

    Args:
        backend: Makes them.
        threads: How many matchers are built at a time.
    """

    def __init__(self, backend: GrammarBackend, threads: int = 2) -> None:
        self._backend = backend
        self._threads = _deep_threads(threads)
        self._pending: dict[int, tuple[ItemT, Future[GrammarState]]] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def start(self, serial: int, item: ItemT, compiled: bytes, generated: Sequence[int]) -> None:
        """Begins to build; :meth:`poll` gives ``item`` back with the result."""
        self._pending[serial] = (item, self._threads.submit(self._backend.build, compiled, generated))

    def abort(self, serial: int) -> bool:
        """Forgets a request; returns whether it was here."""
        found = self._pending.pop(serial, None)
        if found is not None:
            found[1].cancel()  # if it runs already, its matcher is dropped
        return found is not None

    def poll(self, wait_seconds: float) -> list[tuple[ItemT, GrammarState | SapwoodError]]:
        """Items whose grammar is done since the last call, in the order of their start; waits at most so long for one."""
        if wait_seconds:
            wait([future for _, future in self._pending.values()], wait_seconds, FIRST_COMPLETED)
        done = [serial for serial, (_, future) in self._pending.items() if future.done()]
        results: list[tuple[ItemT, GrammarState | SapwoodError]] = []
        for serial in done:
            item, future = self._pending.pop(serial)
            try:
                results.append((item, future.result()))
            except SapwoodError as error:
                results.append((item, error))
        return results


# What an operator asks of a scheduler: flush, pin, pause, profile. Runs in the scheduler process, between steps.


class Profiler(Protocol):
    """Records what the process does."""

    def start(self, folder: str) -> None:
        """Begins to record; the trace will be written into ``folder``."""
        ...

    def stop(self) -> str:
        """Ends the recording and writes it; returns the file's path."""
        ...


class Operations:
    """Carries out operators' requests.

    Args:
        scheduler: The core.
        profiler: Records; None: this process cannot record.
    """

    def __init__(self, scheduler: Scheduler | RankPlanner, profiler: Profiler | None = None) -> None:
        self._scheduler = scheduler
        self._profiler = profiler
        self._recording = False

    def run(self, operation: Operation) -> Answered | CallFailed:
        """Carries out an operation; returns the answer to send."""
        try:
            return self._run(operation)
        except SapwoodError as error:
            return CallFailed(operation.call, type(error).__name__, error.message, error.field)

    def _run(self, operation: Operation) -> Answered:
        match operation:
            case Flush(call):
                return Answered(call, self._scheduler.flush_cache())
            case Pin(call, name, token_ids, namespace, seconds):
                return Answered(call, self._scheduler.pin(name, array("I", token_ids), namespace, seconds))
            case Unpin(call, name):
                return Answered(call, int(self._scheduler.unpin(name)))
            case Pause(call, retract):
                self._scheduler.pause(retract=retract)
                return Answered(call)
            case Resume(call):
                self._scheduler.resume()
                return Answered(call)
            case StartProfile(call, folder):
                self._start_profile(folder)
                return Answered(call)
            case StopProfile(call):
                return Answered(call, text=self._stop_profile())

    def _start_profile(self, folder: str) -> None:
        if self._profiler is None:
            raise InvalidArgumentError("this worker cannot record a profile")
        if self._recording:
            raise InvalidArgumentError("a profile is being recorded already")
        try:
            self._profiler.start(folder)
        except OSError as error:
            raise InvalidArgumentError(f"cannot write a profile to {folder}: {error}", field="folder") from error
        self._recording = True

    def _stop_profile(self) -> str:
        if self._profiler is None or not self._recording:
            raise InvalidArgumentError("no profile is being recorded")
        self._recording = False
        return self._profiler.stop()
