"""The adapters of a worker that serves none."""

from __future__ import annotations

from pathlib import Path

from sapwood_common.errors import UnavailableError
from sapwood_worker.front.loras import Loras
from sapwood_worker.records.lora import Lora, LoraFacts


class NoReader:
    """Reads nothing."""

    async def read_lora(self, lora: Lora) -> LoraFacts:
        raise UnavailableError("there is no scheduler")

    async def drop_lora(self, number: int) -> None:
        raise UnavailableError("there is no scheduler")


def no_loras() -> Loras:
    """Stands for a worker without adapters."""
    return Loras(NoReader(), Path, 0)
