"""Measures tiles at a model's first start on a GPU, and keeps what was found in a file for the next."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sapwood_kernels.experts.tiles.plan import TilePlan, TileShape, TileTable, candidates

logger = logging.getLogger(__name__)
Part = Literal["gate_up", "down"]
Measure = Callable[[int, int, Part, TileShape], float]
"""Seconds that a product takes of this many pairs in tiles of a height and a shape; infinity if it cannot be run."""
TOKENS = (1, 256, 64, 8192, 16, 1024, 4, 128, 2048, 8, 32, 512, 4096, 2, 96, 192, 48, 24)
"""Batch sizes that are measured, the most telling first, for time may run out."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Where the tiles of a model's experts come from.

    Attributes:
        source: A model's alone; measured at this start; or read from a file that an earlier start has written.
        sizes: Batch sizes that were measured.
        seconds: How long the measurement took, at the start that made it.
    """

    source: Literal["model", "measured", "file"] = "model"
    sizes: int = 0
    seconds: float = 0.0


def tuned(
    experts: int,
    chosen: int,
    measure: Measure,
    path: Path,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
    *,
    stored: bool = False,
) -> tuple[TileTable, Tuning]:
    """The table in a file, or one that is measured now and written there.

    Args:
        experts: How many there are.
        chosen: How many a token goes to.
        measure: Times a product.
        path: The file; one that cannot be read is written again, one that cannot be written is only logged.
        seconds: No size is begun after this many seconds.
        clock: Gives seconds.
        stored: As :class:`TileTable` has it.
    """
    found = _read(path, experts, stored=stored)
    if found is not None:
        return found
    started = clock()
    plans: dict[int, TilePlan] = {}
    for tokens in TOKENS:
        if clock() - started >= seconds:
            break
        plans[tokens * chosen] = _fastest(tokens * chosen, experts, chosen, measure, stored=stored)
    tuning = Tuning("measured", len(plans), round(clock() - started, 1))
    logger.info("tiles of experts: %d batch sizes measured in %.1f s", tuning.sizes, tuning.seconds)
    _write(path, plans, tuning.seconds)
    return TileTable(experts, plans, stored), tuning


def _fastest(pairs: int, experts: int, chosen: int, measure: Measure, *, stored: bool) -> TilePlan:
    """Both products share the tiles' height; given that, each has the shape that is the fastest for it."""
    best: tuple[float, TilePlan] | None = None
    for height, shapes in candidates(pairs, experts, chosen, stored=stored).items():
        (up_time, up), (down_time, down) = (
            _shape(pairs, height, part, shapes, measure) for part in ("gate_up", "down")
        )
        if best is None or up_time + down_time < best[0]:
            best = up_time + down_time, TilePlan(height, up, down)
    assert best is not None
    return best[1]


def _shape(
    pairs: int, height: int, part: Part, shapes: Sequence[TileShape], measure: Measure
) -> tuple[float, TileShape]:
    return min((measure(pairs, height, part, shape), shape) for shape in shapes)


def _read(path: Path, experts: int, *, stored: bool) -> tuple[TileTable, Tuning] | None:
    try:
        held = json.loads(path.read_text())
        plans = {
            int(pairs): TilePlan(int(height), TileShape(*map(int, up)), TileShape(*map(int, down)))
            for pairs, (height, up, down) in held["plans"].items()
        }
        tuning = Tuning("file", len(plans), float(held["seconds"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s: tiles of experts are measured again: %s", path, error)
        return None
    return TileTable(experts, plans, stored), tuning


def _write(path: Path, plans: dict[int, TilePlan], seconds: float) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{time.time_ns()}")
        part.write_text(json.dumps({"seconds": seconds, "plans": plans}))
        part.replace(path)
    except OSError as error:
        logger.warning("%s: the tiles that were measured are not kept: %s", path, error)
