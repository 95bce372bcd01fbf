"""Updates of the model's weights in the scheduler process: staged in a thread beside the steps, exchanged between two of them."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from sapwood_common.errors import InternalError, ResourceExhaustedError, SapwoodError
from sapwood_worker.ipc.messages import (
    Answered,
    CallFailed,
    ChangeWeights,
    DropWeights,
    ExchangeWeights,
    JoinGroup,
    LeaveGroup,
    ReadyWeights,
    Sleep,
    StageWeights,
    WakeUp,
)
from sapwood_worker.records.output import RequestOutput
from sapwood_worker.records.step import RankLostError
from sapwood_worker.records.weights import InFlight, Memory, TrainerGroup, WeightBucket, WeightsFacts

logger = logging.getLogger(__name__)


class WeightsRunner(Protocol):
    """The part of a runner that has weights; see :class:`~sapwood_worker.core.loaded_runner.LoadedRunner`."""

    def stage_weights(self, bucket: WeightBucket) -> WeightsFacts: ...

    def ready_weights(self, update: int, *, partial: bool) -> WeightsFacts: ...

    def exchange_weights(self, update: int, *, keep: bool) -> bytes: ...

    def drop_weights(self, update: int) -> None: ...

    def join_group(self, group: TrainerGroup) -> None: ...

    def leave_group(self, name: str) -> bool: ...

    def release_memory(self, memory: Sequence[Memory], folder: str) -> int: ...

    def restore_memory(self, memory: Sequence[Memory], folder: str) -> None: ...


class WeightsUsers(Protocol):
    """The scheduler, as far as its requests and its cache are computed with weights."""

    def change_weights(self, digest: bytes, in_flight: InFlight, *, flush: bool) -> list[RequestOutput]: ...

    def sleep(self, *, abort: bool) -> list[RequestOutput]: ...

    def wake_up(self) -> None: ...


class WeightUpdates:
    """Updates under way. Its methods are called from one thread, the loop's; what it stages, it stages in order, in one thread.

    Args:
        runner: Has the weights.
        users: Compute with them.

    Attributes:
        number: Of the weights in use, as the front counts them; 0: those of the start.
    """

    def __init__(self, runner: WeightsRunner, users: WeightsUsers) -> None:
        self.number = 0
        self._runner = runner
        self._users = users
        self._jobs: queue.SimpleQueue[StageWeights | ReadyWeights | JoinGroup | LeaveGroup] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Callable[[], Answered | CallFailed]] = queue.SimpleQueue()
        self._works = False
        self._staging = 0
        self._due: deque[ExchangeWeights | Sleep | WakeUp] = deque()
        self._answers: list[Answered | CallFailed] = []

    @property
    def busy(self) -> bool:
        """Whether something is being staged, or an exchange or an answer is due."""
        return bool(self._staging or self._due or self._answers)

    @property
    def due(self) -> bool:
        """Whether an exchange, sleep or its end waits for the steps in flight to be over."""
        return bool(self._due)

    def take(self, message: ChangeWeights) -> None:
        """Begins to do what a message asks for; :meth:`poll` answers."""
        match message:
            case StageWeights() | ReadyWeights() | JoinGroup() | LeaveGroup():
                self._staging += 1
                self._jobs.put(message)
                if not self._works:
                    self._works = True
                    threading.Thread(target=self._work, name="weights", daemon=True).start()
            case ExchangeWeights() | Sleep() | WakeUp():
                self._due.append(message)
            case DropWeights(call, update):
                self._answers.append(_tried(call, lambda: self._drop(call, update)))

    def poll(self, seconds: float = 0.0) -> list[Answered | CallFailed]:
        """The answers since the last call; waits for so long for one, if something is being staged.

        Raises:
            RankLostError: A rank was lost.
        """
        answers, self._answers = self._answers, []
        while self._staging:
            try:
                done = self._done.get(timeout=seconds) if seconds and not answers else self._done.get_nowait()
            except queue.Empty:
                break
            self._staging -= 1
            answers.append(done())
        return answers

    def exchange(self) -> list[RequestOutput]:
        """Does the oldest that is due. No step may be in flight, and outputs so far must have been sent.

        Returns:
            The last outputs of requests that it ends.

        Raises:
            RankLostError: Not all ranks have done so.
        """
        message, outputs = self._due.popleft(), list[RequestOutput]()

        def work() -> Answered:
            if isinstance(message, Sleep):
                outputs.extend(self._users.sleep(abort=message.abort))
                try:
                    return Answered(message.call, self._runner.release_memory(message.memory, message.folder))
                except BaseException:
                    self._users.wake_up()
                    raise
            if isinstance(message, WakeUp):
                self._runner.restore_memory(message.memory, message.folder)
                if message.serve:
                    self._users.wake_up()
                return Answered(message.call)
            digest = self._runner.exchange_weights(message.update, keep=message.keep)
            outputs.extend(self._users.change_weights(digest, message.in_flight, flush=message.flush))
            self.number = message.number
            return Answered(message.call, weights=WeightsFacts(digest, 0, 0))

        self._answers.append(_tried(message.call, work))
        return outputs

    def _drop(self, call: int, update: int) -> Answered:
        self._runner.drop_weights(update)
        return Answered(call)

    def _work(self) -> None:
        while True:
            message = self._jobs.get()
            try:
                answer = _tried(message.call, lambda: self._stage(message))  # noqa: B023 - called at once
                self._done.put(lambda answer=answer: answer)  # type: ignore[misc]
            except RankLostError as error:

                def fail(lost: RankLostError = error) -> CallFailed:
                    raise lost

                self._done.put(fail)

    def _stage(self, message: StageWeights | ReadyWeights | JoinGroup | LeaveGroup) -> Answered:
        if isinstance(message, JoinGroup):
            self._runner.join_group(message.group)
            return Answered(message.call)
        if isinstance(message, LeaveGroup):
            return Answered(message.call, int(self._runner.leave_group(message.name)))
        if isinstance(message, StageWeights):
            facts = self._runner.stage_weights(message.bucket)
        else:
            facts = self._runner.ready_weights(message.update, partial=message.partial)
        return Answered(message.call, weights=facts)


def _tried(call: int, work: Callable[[], Answered]) -> Answered | CallFailed:
    try:
        return work()
    except SapwoodError as error:
        return CallFailed(call, type(error).__name__, error.message, error.field)
    except RankLostError:
        raise
    except OSError as error:
        return CallFailed(call, ResourceExhaustedError.__name__, str(error), None)
    except Exception as error:
        logger.exception("weights could not be changed")
        return CallFailed(call, InternalError.__name__, f"the weights could not be changed: {error!r}", None)
