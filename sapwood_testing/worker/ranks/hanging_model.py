"""The runner of :mod:`sapwood_testing.worker.ranks.hanging_worker`: the real one, of which a rank hangs when it is told to."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import Field

from sapwood_worker.config import WorkerConfig
from sapwood_worker.model.runner.factory import make_runner as make_real_runner
from sapwood_worker.records.ranks.place import ALONE, Place


class HangingWorkerConfig(WorkerConfig):
    """A worker's configuration, and what makes it hang."""

    hang_folder: Path = Field(
        description="A rank that finds a file there with its number removes it and hangs as it says."
    )


def _loop() -> None:
    while True:
        pass


WAYS: dict[str, Callable[[], Any]] = {
    "loop": _loop,
    "blocked": lambda: time.sleep(3600),
    "computing": lambda: sum(range(10**12)),
    "blocked with the lock": lambda: ctypes.PyDLL(None).sleep(3600),
}
"""Ways to hang: in Python, and in C code with and without the interpreter's lock."""


def make_runner(config: HangingWorkerConfig, place: Place = ALONE) -> Any:
    """The real runner, which hangs in the middle of a step, before the last layer."""
    runner: Any = make_real_runner(config, place)
    last = runner._model.layers[-1]
    forward = last.forward

    def hang_or_compute(*arguments: Any) -> Any:
        _hang(config.hang_folder / str(place.rank))
        return forward(*arguments)

    last.forward = hang_or_compute
    return runner


def _hang(told: Path) -> None:
    if told.exists() and (how := told.read_text()):
        told.unlink()
        WAYS[how]()
