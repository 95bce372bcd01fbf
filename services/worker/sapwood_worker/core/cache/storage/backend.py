"""What a store must be able to do to be the third tier. Deliberately little: engines differ in everything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt


class StorageError(Exception):
    """The store could not do what was asked; it may be down, full or unreachable. Costs a recomputation."""


class StorageBackend(Protocol):
    """A store of objects by name. Called from several threads at once; every call may block and may fail.

    Objects are whole host records (``host_pool.py``). What a store returns is never trusted: whoever reads checks every byte.
    """

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        """Says in which memory all buffers of :meth:`get` and :meth:`put` will lie; called once, before them.

        Raises:
            StorageError: The engine does not take it.
        """
        ...

    def exists(self, names: Sequence[str]) -> int:
        """How many of the first names there are objects for, up to the first that is missing. Changes nothing.

        Raises:
            StorageError: The store does not answer.
        """
        ...

    def get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        """Reads objects into buffers of their size.

        Mutates the buffers; one whose answer is false is undefined afterwards.

        Returns:
            For each whether an object of the buffer's size was read.

        Raises:
            StorageError: The store does not answer; all buffers are undefined.
        """
        ...

    def put(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        """Writes objects; one of the buffer's size that is there already stays as it is. Visible to everybody once it returns,
        or once another's put of the same object that is under way does.

        Returns:
            For each whether it is there now.

        Raises:
            StorageError: The store does not answer.
        """
        ...

    def remove(self, names: Sequence[str]) -> None:
        """Removes objects, as far as they are there and the store lets it.

        Raises:
            StorageError: The store does not answer.
        """
        ...

    def clear(self, namespace: str) -> None:
        """Removes all objects whose name begins with ``namespace/``.

        Raises:
            StorageError: The store does not answer or cannot do it.
        """
        ...

    def close(self) -> None:
        """Lets go of the store; no call follows. Never fails."""
        ...
