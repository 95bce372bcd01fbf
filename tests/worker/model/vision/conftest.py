"""Drivers of models that see."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sapwood_worker.records.pictures import Picture, Pictured


@pytest.fixture
def seeing(make_runner: Any, make_driver: Any) -> Callable[..., Any]:
    """A driver whose rows may have pictures: ``driver.show(slot, pictures)`` after ``driver.add``."""

    def make(path: Path, **options: Any) -> Any:
        options = {"page_size": 16, "num_pages": 1024, "max_step_tokens": 2048, **options}
        driver = make_driver(make_runner(path, **options), rows=4)
        shown: dict[int, Pictured] = {}
        plain = driver.output

        def show(slot: int, pictures: Sequence[Picture]) -> None:
            shown[slot] = Pictured(array("I", driver.tokens[slot]).tobytes(), tuple(pictures))

        def output(*args: Any, **kwargs: Any) -> Any:
            step = plain(*args, **kwargs)
            step.entries = tuple(
                entry if entry.row not in shown else _with(entry, shown[entry.row]) for entry in step.entries
            )
            return step

        driver.show, driver.output = show, output
        return driver

    return make


def _with(entry: Any, pictured: Pictured) -> Any:
    return msgspec.structs.replace(entry, pictured=pictured)
