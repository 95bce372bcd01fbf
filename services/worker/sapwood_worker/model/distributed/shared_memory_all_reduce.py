"""All-reduce for ranks that are CPU processes of one host, over shared memory.

gloo uses sockets even within a host: that takes half a millisecond of CPU time for a decode's small tensors, while a copy takes
microseconds.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sapwood_kernels.native.products import SIGNAL_BYTES, NativeLibrary, Signals
from sapwood_worker.model.distributed.all_reduce import add_up
from sapwood_worker.model.distributed.group import Group
from sapwood_worker.model.pools.host_pool import SharedMemory

_SLOT_BYTES = 4 << 20
"""Bytes of a slot; larger tensors are sent in pieces. The system allocates memory at its first use."""
_PAGE = 4096
_LOOK_SECONDS = 1.0


class SharedMeeting:
    """Memory that ranks share, zero at first, and a barrier for them; made by all of them together.

    Args:
        group: The ranks; exchanges where the memory is.
        library: The compiled library.
        num_bytes: Bytes of the memory; the system allocates it at its first use.
        seconds: Seconds after which a rank that does not come is an error.

    Attributes:
        content: The memory, uint8.
    """

    def __init__(self, group: Group, library: NativeLibrary, num_bytes: int, seconds: float) -> None:
        self._size, self._seconds = group.size, seconds
        self._waiting = group.waiting
        own = SharedMemory.create(_PAGE + num_bytes) if group.rank == 0 else None
        memory = own or None
        path = group.exchange("" if own is None else own.path, str)[0]
        memory = memory or SharedMemory.open(path)
        everything = torch.from_numpy(memory.array())
        group.exchange("", str)  # all have opened it
        assert group.size * SIGNAL_BYTES <= _PAGE, "more ranks on a host than there is room for"
        self._signals = Signals(library, everything.data_ptr(), group.rank, group.size)
        self.content = everything[_PAGE:]

    def wait(self) -> None:
        """Waits until all ranks have called it.

        Raises:
            RuntimeError: A rank has not called it in time.
        """
        self._signals.count_up()
        with self._waiting():
            late = self._signals.wait(_LOOK_SECONDS)
            if late is None:
                return
            deadline = time.monotonic() + self._seconds
            while (late := self._signals.wait(_LOOK_SECONDS)) is not None:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"rank {late} of {self._size} has not come")


class SharedMemoryAllReduce:
    """A place for each rank's part of what they exchange; made by all ranks together.

    Each rank has two slots and uses them in turn. When a rank writes into a slot again, all ranks have read its old content,
    because all have joined the exchange in between.

    Args:
        group: The ranks; exchanges where the memory is.
        library: The compiled library.
        seconds: Seconds after which a rank that does not come is an error.
    """

    def __init__(self, group: Group, library: NativeLibrary, seconds: float) -> None:
        self.rank, self.size = group.rank, group.size
        meeting = SharedMeeting(group, library, 2 * self.size * _SLOT_BYTES, seconds)
        self.wait = meeting.wait
        self._slots = meeting.content.view(2, self.size, _SLOT_BYTES)
        self._turn = 0

    def pieces(self, x: Tensor) -> Iterator[Tensor]:
        """A contiguous tensor, in pieces that fit in a slot."""
        yield from torch.split(x.view(-1), _SLOT_BYTES // x.element_size())

    def meet(self, x: Tensor) -> Tensor:
        """Exchanges pieces: returns the ranks' tensors, [size, len(x)], valid until the second call after this one."""
        self._turn ^= 1
        parts = self._slots[self._turn, :, : x.nbytes].view(x.dtype)
        parts[self.rank].copy_(x)
        self.wait()
        return parts

    def gather(self, x: Tensor) -> Tensor:
        """The ranks' tensors, [size, ...]."""
        result = x.new_empty(self.size, x.numel())
        start = 0
        for piece in self.pieces(x.contiguous()):
            result[:, start : start + len(piece)] = self.meet(piece)
            start += len(piece)
        return result.view(self.size, *x.shape)


class _SharedSum(ABC):
    """What both methods have in common.

    Args:
        parts: The ranks' memory.
    """

    name = ""
    most_bytes = math.inf

    def __init__(self, parts: SharedMemoryAllReduce) -> None:
        self._parts = parts

    def sum(self, x: Tensor) -> None:
        whole = x.contiguous()
        for piece in self._parts.pieces(whole):
            self._sum(piece)
        if whole is not x:
            x.copy_(whole)

    def gather(self, x: Tensor) -> Tensor:
        return self._parts.gather(x)

    def scatter_sum(self, x: Tensor) -> Tensor:
        parts = self._parts
        rows = x.reshape(parts.size, -1)
        result = x.new_empty(len(x) // parts.size, *x.shape[1:])
        most = _SLOT_BYTES // x.element_size() // parts.size
        for piece, target in zip(torch.split(rows, most, 1), torch.split(result.view(-1), most), strict=True):
            found = parts.meet(piece.reshape(-1)).view(parts.size, parts.size, -1)
            add_up(found[:, parts.rank].unbind(), target)
        return result

    def replayed(self) -> int | None:
        return None

    @abstractmethod
    def _sum(self, piece: Tensor) -> None:
        """Replaces a piece that fits into a slot by the sum of all ranks' pieces."""


class OneShot(_SharedSum):
    """Each rank sums all parts. Implements :class:`~sapwood_worker.model.distributed.all_reduce.SumMethod`."""

    name = "one-shot"

    def _sum(self, piece: Tensor) -> None:
        add_up(self._parts.meet(piece).unbind(), piece)


class TwoShot(_SharedSum):
    """Each rank sums a share, and copies the others'. Implements the same."""

    name = "two-shot"

    def _sum(self, piece: Tensor) -> None:
        parts = self._parts
        found = parts.meet(piece)
        shares: Sequence[tuple[Tensor, ...]] = [part.tensor_split(parts.size) for part in found]
        targets = piece.tensor_split(parts.size)
        add_up([share[parts.rank] for share in shares], targets[parts.rank])
        shares[parts.rank][parts.rank].copy_(targets[parts.rank])  # no other rank reads this share here
        parts.wait()
        for rank, target in enumerate(targets):
            if rank != parts.rank:
                target.copy_(shares[rank][rank])
