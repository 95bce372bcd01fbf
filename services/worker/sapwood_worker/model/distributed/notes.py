"""Values that ranks exchange outside of their steps: from any thread, without a place in the order of tensors' exchanges."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from torch._C._distributed_c10d import Store

from sapwood_common.errors import InternalError
from sapwood_worker.model.distributed.group import ValueT

_LOOK_SECONDS = 0.01
_MOST_SECONDS = 600.0
"""How long a rank waits for the others' values."""


class Notes:
    """Here for a rank that is alone."""

    def exchange(self, name: str, value: ValueT, kind: Any) -> list[ValueT]:
        """All ranks' values in their order; each rank makes the call, in whichever thread.

        Args:
            name: What is exchanged; a name is used once.
            value: This rank's.
            kind: The type of every rank's value: what comes is checked against it and never executed.

        Raises:
            InternalError: A rank did not give its value in time.
        """
        return [value]


class StoreNotes(Notes):
    """By the store at which ranks have met.

    Args:
        store: The store; only these ranks write to it.
        rank: This rank's place.
        size: How many ranks there are.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size

    def exchange(self, name: str, value: ValueT, kind: Any) -> list[ValueT]:
        # The store takes bytes, too, whatever its annotations say.
        self._store.set(f"{name}/{self._rank}", msgspec.msgpack.encode(value))  # type: ignore[arg-type]
        found, until = [], time.monotonic() + _MOST_SECONDS
        for rank in range(self._size):
            key = f"{name}/{rank}"
            while not self._store.check([key]):
                if time.monotonic() > until:
                    raise InternalError(f"rank {rank} did not answer within {_MOST_SECONDS:.0f} s")
                time.sleep(_LOOK_SECONDS)
            found.append(msgspec.msgpack.decode(self._store.get(key), type=kind))
        return found
