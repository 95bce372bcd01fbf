"""Follows the leader: runs each of its steps, at the same time and in the same order, and reports the results."""

from __future__ import annotations

import logging
import threading
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.connection import Connection
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from sapwood_common.errors import SapwoodError
from sapwood_worker.core.loaded_runner import LoadedRunner
from sapwood_worker.records.lora import Lora
from sapwood_worker.records.ranks import AT_REST, DEVICE, Waits
from sapwood_worker.records.step import (
    NOTHING,
    CopyReport,
    DeferredStep,
    LaunchedStep,
    Masks,
    ModelOutput,
    ReadyMasks,
    Runner,
    Step,
)
from sapwood_worker.records.step_wire import read, read_masks
from sapwood_worker.records.weights import Memory, TrainerGroup, WeightBucket

logger = logging.getLogger(__name__)


# A follower's report of a step to the leader.


class RankReport(msgspec.Struct, frozen=True, array_like=True):
    """A step's end on a rank.

    Attributes:
        step: Its number.
        digest: A hash of the sampled tokens; if it is not equal on all ranks, one of them computes something else.
        copied: The copies between tiers that have ended there.
        error: The step's error; empty: it succeeded.
        output: The rank's sampled tokens, with data-parallel attention; None: all ranks sample the same.
        entered: Exchanges between ranks that it had entered or launched when it reported a failure.
        experts: How many tokens each expert of each of its stage's layers has got; it then reports no step but this.
    """

    step: int
    digest: int = 0
    copied: CopyReport = NOTHING
    error: str = ""
    output: ModelOutput | None = None
    entered: int = 0
    experts: list[list[int]] | None = None

    @staticmethod
    def of(output: ModelOutput, *, whole: bool = False) -> RankReport:
        """The report of a step's output, with it or with a digest of it. O(parts)."""
        if whole:
            return RankReport(output.step, copied=output.copied, output=output)
        return RankReport(output.step, zlib.crc32(_encoder.encode(output.token_ids)), output.copied)

    @staticmethod
    def of_failure(step: int, error: Exception, entered: int) -> RankReport:
        """The report of a failed step, with the number of exchanges so far."""
        return RankReport(step, error=str(error) or type(error).__name__, entered=entered)

    def to_bytes(self) -> bytes:
        """The report in msgpack."""
        return _encoder.encode(self)

    @staticmethod
    def from_bytes(data: bytes) -> RankReport:
        """What :meth:`to_bytes` has written."""
        return _decoder.decode(data)


def _pack(value: Any) -> bytes:
    assert isinstance(value, np.ndarray)
    return value.astype(np.float32, copy=False).tobytes()


def _unpack(_: type, data: bytes) -> npt.NDArray[np.float32]:
    return np.frombuffer(data, np.float32)


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
_decoder = msgspec.msgpack.Decoder(RankReport, dec_hook=_unpack)


READY = b""
"""A follower's first message: its model is loaded. Anything else is why it could not be."""

COLLECT = b""
"""Asks for the report of the oldest step that has not been reported. Anything else is a step, or masks that one waits for."""

COUNT_EXPERTS = b"e"
"""Asks how many tokens experts have got with the steps so far. The answer comes when all of these have been reported, so that the
device is not waited for, nor a step that waits for the leader."""

_READ_LORA, _DROP_LORA = b"l", b"d"
"""How messages begin that have an adapter read, or forgotten; a step begins with another byte."""


def read_message(lora: Lora) -> bytes:
    """The message that has a follower read an adapter, in a thread beside its steps."""
    return _READ_LORA + _encoder.encode(lora)


_WEIGHTS = b"w"
"""How messages begin that change weights."""


class WeightsMessage(msgspec.Struct, frozen=True, array_like=True):
    """What a follower is to do with weights: ``stage`` a bucket, make an update ``ready``, ``exchange`` or ``drop`` it; or with
    memory: ``release`` or ``restore`` it; or with a trainer's group: ``join`` or ``leave`` it.

    ``flag``: whether a ready update is partial, and whether an exchange keeps the weights before.
    """

    verb: Literal["stage", "ready", "exchange", "drop", "release", "restore", "join", "leave"]
    update: int = 0
    bucket: WeightBucket | None = None
    flag: bool = False
    memory: tuple[Memory, ...] = ()
    folder: str = ""
    group: TrainerGroup | None = None
    name: str = ""

    def to_bytes(self) -> bytes:
        """The message to followers."""
        return _WEIGHTS + _encoder.encode(self)


def drop_message(number: int) -> bytes:
    """The message that has a follower forget an adapter."""
    return _DROP_LORA + _encoder.encode(number)


_LEADER = 1 << 0
"""The leader's bit among ranks that are waited for."""

_NO_STEP = -1

_ALONE_SECONDS = 1.0
"""Seconds after a step's failure within which the leader asks for its report, unless it waits for this rank inside the step."""


def follow(runner: LoadedRunner, leader: Connection, waits: Waits | None = None) -> None:
    """Runs until the leader is gone.

    A step that fails on all ranks alike, as when memory runs out, ends only its requests. One that fails here alone, or at
    another place than elsewhere, ends the group: the others wait for this rank. With micro-batches any failed step does.

    Args:
        runner: This rank's part of the model.
        leader: Brings steps.
        waits: Shows whether this rank waits for the leader or its device. None: it is not shown.

    Raises:
        Exception: What a step failed with, here alone.
    """
    leader.send_bytes(READY)
    launched: deque[tuple[int, LaunchedStep | Exception]] = deque()
    whole = runner.info.attention_ranks > 1
    micro_batches, unasked = runner.info.micro_batches > 1, 0
    experts = _ExpertCounts(runner, leader)
    waits = waits or Waits()
    while True:
        try:
            with waits.on(_LEADER if launched else AT_REST):
                message = leader.recv_bytes()
        except (EOFError, ConnectionError):
            return
        if message == COLLECT:
            if unasked:
                unasked -= 1
            else:
                with waits.on(0):
                    with waits.on(DEVICE) if runner.asynchronous else nullcontext():
                        report = _report(*launched.popleft(), waits.entered, whole=whole)
                    leader.send_bytes(report.to_bytes())
                experts.reported()
            continue
        if message == COUNT_EXPERTS:
            experts.ask(len(launched))
            continue
        if message[:1] == _READ_LORA:
            lora = msgspec.msgpack.decode(message[1:], type=Lora)
            threading.Thread(target=_read_lora, args=(runner, lora), name=f"adapter {lora.number}", daemon=True).start()
            continue
        if message[:1] == _DROP_LORA:
            runner.drop_lora(msgspec.msgpack.decode(message[1:], type=int))
            continue
        if message[:1] == _WEIGHTS:
            _change_weights(runner, msgspec.msgpack.decode(message[1:], type=WeightsMessage))
            continue
        step = read(bytearray(message))
        with waits.launch(len(step.token_ids), asynchronous=runner.asynchronous):
            if len(step.masked):
                coming = _ComingMasks(leader, len(step.masked), waits)
                step.masks = coming if not micro_batches else ReadyMasks(coming.result())
            failed = attempt(runner, step)
            computed = not runner.asynchronous and not isinstance(failed, DeferredStep | Exception)
            if (
                micro_batches and computed and not launched
            ):  # the leader must not wait until the next step is computed too
                leader.send_bytes(_report(step.number, failed, waits.entered).to_bytes())
                unasked += 1
                continue
        launched.append((step.number, failed))
        # With micro-batches the leader continues before it asks, and then waits for what this rank should have sent.
        if isinstance(failed, Exception) and (micro_batches or not leader.poll(_ALONE_SECONDS)):
            raise failed


def attempt(runner: Runner, step: Step) -> LaunchedStep | Exception:
    """Launches a step; returns what it failed with if it has."""
    try:
        return runner.launch(step)
    except Exception as error:
        logger.exception("step %d failed", step.number)
        return error


def finished(launched: LaunchedStep | Exception) -> LaunchedStep | Exception:
    """A step that is wholly computed, or the error that it failed with."""
    if not isinstance(launched, DeferredStep):
        return launched
    try:
        return launched.finish()
    except Exception as error:
        logger.exception("a step failed")
        return error


def _report(number: int, launched: LaunchedStep | Exception, entered: int, *, whole: bool = False) -> RankReport:
    if isinstance(launched, Exception):
        return RankReport.of_failure(number, launched, entered)
    try:
        return RankReport.of(launched.result(), whole=whole)
    except Exception as error:
        logger.exception("step %d failed", number)
        return RankReport.of_failure(number, error, entered)


def _read_lora(runner: LoadedRunner, lora: Lora) -> None:
    """Reads an adapter with the leader, who raises what this rank could not do."""
    try:
        runner.read_lora(lora)
    except SapwoodError as error:
        logger.warning("adapter %s was not read: %s", lora.name, error)


def _change_weights(runner: LoadedRunner, message: WeightsMessage) -> None:
    """Does with the leader what it does with weights: staging in a thread beside the steps, the exchange between them."""
    update = message.update
    match message.verb:
        case "exchange":
            runner.exchange_weights(update, keep=message.flag)
        case "drop":
            runner.drop_weights(update)
        case "release":
            runner.release_memory(message.memory, message.folder)
        case "restore":
            runner.restore_memory(message.memory, message.folder)
        case "leave":
            runner.leave_group(message.name)
        case "stage" | "ready" | "join":
            threading.Thread(target=_stage_weights, args=(runner, message), name="weights", daemon=True).start()


def _stage_weights(runner: LoadedRunner, message: WeightsMessage) -> None:
    """The leader raises what this rank could not do."""
    try:
        if message.group is not None:
            runner.join_group(message.group)
        elif message.bucket is not None:
            runner.stage_weights(message.bucket)
        else:
            runner.ready_weights(message.update, partial=message.flag)
    except SapwoodError as error:
        logger.warning("weights were not staged: %s", error)


class _ExpertCounts:
    """Tells the leader, when it has asked, how many tokens experts have got.

    Args:
        runner: Knows it.
        leader: Asks again only after it was notified.
    """

    def __init__(self, runner: LoadedRunner, leader: Connection) -> None:
        self._runner, self._leader = runner, leader
        self._asked: Callable[[], list[list[int]]] | None = None
        self._before = 0

    def ask(self, unreported: int) -> None:
        """Counts what all steps that are launched by now do; tells it when the ``unreported`` of them have been reported."""
        assert self._runner.experts is not None, "other ranks have some"
        self._asked, self._before = self._runner.experts(), unreported
        self._tell()

    def reported(self) -> None:
        """Takes note of a step's report."""
        self._before -= 1
        self._tell()

    def _tell(self) -> None:
        if self._asked is not None and self._before <= 0:
            self._leader.send_bytes(RankReport(_NO_STEP, experts=self._asked()).to_bytes())
            self._asked = None


class _ComingMasks:
    """Implements :class:`~sapwood_worker.records.step.LateMasks`: the leader sends them when its own runner asks for them.

    Args:
        leader: Where from.
        count: How many.
        waits: Shows that they are waited for.
    """

    def __init__(self, leader: Connection, count: int, waits: Waits) -> None:
        self._leader = leader
        self._count = count
        self._waits = waits

    def result(self) -> Masks:
        with self._waits.on(_LEADER):
            message = self._leader.recv_bytes()
        return read_masks(bytearray(message), self._count)
