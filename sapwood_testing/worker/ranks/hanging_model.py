"""The runner of :mod:`sapwood_testing.worker.ranks.hanging_worker`: the real one. A rank hangs, or fails, when it is told to."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field

from sapwood_worker.config import WorkerConfig
from sapwood_worker.model.runner.factory import make_runner as make_real_runner
from sapwood_worker.records.ranks import ALONE, Place, Waits
from sapwood_worker.records.step import LaunchedStep, ModelOutput, Step
from sapwood_worker.records.step_wire import encode, read


class HangingWorkerConfig(WorkerConfig):
    """A worker's configuration, and what makes it hang."""

    hang_folder: Path = Field(
        description="A rank that finds a file there with its number removes it and hangs as it says: in the middle of a step or, "
        "if the file's name begins with launch-, while it launches one."
    )
    as_on_gpus: bool = Field(False, description="Steps are queued, and computed by a thread of their own.")


def _loop() -> None:
    while True:
        pass


def _fail() -> None:
    raise RuntimeError("device-side assert")


WAYS: dict[str, Callable[[], Any]] = {
    "loop": _loop,
    "blocked": lambda: time.sleep(3600),
    "computing": lambda: sum(range(10**12)),
    "blocked with the lock": lambda: ctypes.PyDLL(None).sleep(3600),
    "fails": _fail,
}
"""Ways to hang: in Python, and in C code with and without the interpreter's lock; and to fail alone."""


def make_runner(config: HangingWorkerConfig, place: Place = ALONE) -> Any:
    """The real runner, which hangs in the middle of a step, before the last layer, or while it launches one."""
    # What a GPU exchanges its host does not show.
    runner: Any = make_real_runner(config, replace(place, waits=Waits()) if config.as_on_gpus else place)
    last = runner._model.layers[-1]
    forward = last.forward

    def hang_or_compute(*arguments: Any) -> Any:
        _hang(config.hang_folder / str(place.rank))
        return forward(*arguments)

    last.forward = hang_or_compute
    if config.as_on_gpus:
        _queue(runner, config.hang_folder / f"launch-{place.rank}")
    return runner


class QueuedStep:
    """Implements :class:`~sapwood_worker.records.step.LaunchedStep`.

    Args:
        computed: What its thread makes of it.
    """

    def __init__(self, computed: Future[ModelOutput]) -> None:
        self._computed = computed

    def result(self) -> ModelOutput:
        return self._computed.result()

    def check(self) -> None:
        if self._computed.done():
            self._computed.result()


def _queue(runner: Any, order: Path) -> None:
    """Has a thread compute what is launched, in order, while the host continues: as a GPU does. Once it has failed, it computes
    nothing any more."""
    compute, device = runner.launch, ThreadPoolExecutor(1, thread_name_prefix="device")
    failed: list[Exception] = []

    def computed(step: Step) -> ModelOutput:
        if failed:
            raise failed[0]
        try:
            output: ModelOutput = compute(step).result()
        except Exception as error:
            failed.append(error)
            raise
        return output

    def launch(step: Step) -> LaunchedStep:
        _hang(order)
        kept = read(encode(step))  # its arrays are not read any more once it is launched
        return QueuedStep(device.submit(computed, kept))

    runner.launch, runner.asynchronous = launch, True


def _hang(order: Path) -> None:
    if order.exists() and (how := order.read_text()):
        order.unlink()
        WAYS[how]()
