"""What is written down when a step fails: the last steps and the shapes of what they computed. Never tokens."""

from __future__ import annotations

import json
import logging
import os
import time
import traceback
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sapwood_worker.core.observers import Observer
from sapwood_worker.records.load import Load
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.step import Step

logger = logging.getLogger(__name__)

KEPT_STEPS = 16
MOST_FILES = 8


class CrashDump(Observer):
    """Remembers the last steps.

    Args:
        folder: Where the files go; made if it is not there. The oldest of more than ``MOST_FILES`` files go.
        info: The model's.
    """

    def __init__(self, folder: Path, info: ModelInfo) -> None:
        self._folder = folder
        self._info = info
        self._steps: deque[dict[str, Any]] = deque(maxlen=KEPT_STEPS)

    def planned(self, step: Step) -> None:
        self._steps.append({"number": step.number, "at": time.time()} | _shape_of(step))

    def failed(self, error: BaseException, requests: Sequence[str], load: Load) -> None:
        self.write(error, requests, load)

    def write(self, error: BaseException, requests: Sequence[str], load: Load) -> Path | None:
        """Writes a file; a folder that cannot be written is logged, for the failure itself matters more.

        Args:
            error: What went wrong.
            requests: The ids of the requests that were computed.
            load: The scheduler's.

        Returns:
            The file; None if there is none.
        """
        seconds, rest = divmod(time.time_ns(), 10**9)
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(seconds))
        path = self._folder / f"crash-{stamp}-{rest:09d}-{os.getpid()}.json"  # in their order by name
        content = {
            "at": seconds,
            "error": traceback.format_exception(error),
            "requests": list(requests),
            "model": msgspec.structs.asdict(self._info),
            "load": msgspec.structs.asdict(load),
            "steps": list(self._steps),
        }
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content, indent=1, default=str) + "\n")
            for old in sorted(self._folder.glob("crash-*.json"))[:-MOST_FILES]:
                old.unlink(missing_ok=True)
        except OSError as problem:
            logger.warning("%s: no crash dump could be written: %s", path, problem.strerror)
            return None
        logger.error("what the last steps were is in %s", path)
        return path


def _shape_of(step: Step) -> dict[str, Any]:
    """What a step computes, or each rank's part of it, but for the tokens."""
    if step.parts:
        return {"ranks": [_shape_of(part) for part in step.parts]}
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "token_ids": step.token_ids,
        "pages": step.pages,
        "masked": step.masked,
    }
    return {
        "rows": step.rows.tolist(),
        "starts": step.starts.tolist(),
        "counts": step.counts.tolist(),
        "samples": step.samples.tolist(),
        "shapes": {name: [*array.shape, str(array.dtype)] for name, array in arrays.items()},
        "entered": [{"row": entry.row, "serial": entry.serial} for entry in step.entries],
        "copies": step.copies is not None,
    }
