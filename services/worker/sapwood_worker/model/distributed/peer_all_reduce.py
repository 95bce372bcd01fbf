"""All-reduce over memory of GPUs that the processes of a host read and write directly."""

from __future__ import annotations

import ctypes
from abc import ABC
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from sapwood_kernels.ops.contracts import Norm
from sapwood_kernels.ranks.triton_all_reduce import PROGRAMS, PeerAllReduce
from sapwood_kernels.ranks.triton_meeting import WAIT_FOREVER
from sapwood_kernels.ranks.triton_row_exchange import RowExchange
from sapwood_worker.model.distributed.group import Group
from sapwood_worker.model.distributed.torch_group import TorchGroup

# All-reduce for ranks with a GPU each on one host, over memory of each other's GPUs.


# Memory of a GPU that the processes of the host's other GPUs read and write: CUDA IPC, by the driver's own calls.
#
# torch's allocator would share whole blocks of its own. Separate memory does not interfere with it, or with the trials that
# measure free memory.


_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * _HANDLE_BYTES),)


class PeerMemory:
    """A region of each rank's GPU, zero at first, which lasts as long as the process; made by all ranks together.

    Args:
        group: The ranks, on one host; exchanges where the memory is.
        num_bytes: Bytes of a region.
        device: This rank's GPU, with its index.

    Attributes:
        addresses: The address of each rank's region in this process.

    Raises:
        RuntimeError: Not all ranks can reach all regions; every rank raises it.
    """

    def __init__(self, group: Group, num_bytes: int, device: torch.device) -> None:
        torch.cuda.synchronize(device)  # makes the device's context the current one
        index = device.index
        handle, address, said = b"", ctypes.c_uint64(), ""
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
            self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
            torch.cuda.synchronize(device)
            own = _Handle()
            self._call("cuIpcGetMemHandle", ctypes.byref(own), address)
            handle = bytes(own.bytes)
        except (OSError, AttributeError, RuntimeError) as error:
            said = str(error)
        found = group.exchange((handle, index, said), tuple[bytes, int, str])
        _raise_first([fault for _, _, fault in found])
        self.addresses: list[int] = []
        try:
            for rank, (theirs, there, _) in enumerate(found):
                self.addresses.append(address.value if rank == group.rank else self._open(theirs, index, there))
        except RuntimeError as error:
            said = str(error)
        _raise_first(group.exchange(said, str))

    def _open(self, handle: bytes, here: int, there: int) -> int:
        """Another rank's region."""
        if here != there:
            native = ctypes.c_int()
            self._call("cuDeviceGetP2PAttribute", ctypes.byref(native), _NATIVE_ATOMICS, here, there)
            if not native.value:
                raise RuntimeError(f"GPUs {here} and {there} have no link that signals can be written over")
        address = ctypes.c_uint64()
        content = _Handle((ctypes.c_ubyte * _HANDLE_BYTES)(*handle))
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), content, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return address.value

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._driver, name)(*arguments):
            raise RuntimeError(f"{name}: CUDA error {code}")


def _raise_first(said: Sequence[str]) -> None:
    for rank, fault in enumerate(said):
        if fault:
            raise RuntimeError(f"rank {rank}: {fault}")


MOST_BYTES = 16 << 20
"""About the largest size of a tensor that is summed this way. The memory for it is six times this size."""
_TRIAL_TRIES = 1 << 23
"""How often a rank polls for other ranks' data during a trial: for some seconds, because they may still compile the kernel."""
_CALLS, _REPLAYS, _ROUNDS = 10, 3, 5
"""How a method is timed: calls in a graph, replays of the graph in a round, and rounds."""


class _PeerMethod(ABC):
    """The common part of the methods.

    Args:
        sums: The kernels; all methods share them.
        two_shot: Whether it is the two-shot method. Until :meth:`wait_forever` is called, a sum gives up with a wrong result if
    another rank does not join.
    """

    _normed: ClassVar[bool]

    def __init__(self, sums: PeerAllReduce, *, two_shot: bool) -> None:
        self.name = ("two-shot" if two_shot else "one-shot") + ("+norm" if self._normed else "")
        self.most_bytes: float = sums.most_bytes(two_shot=two_shot)
        self._tries = _TRIAL_TRIES
        self._sums, self._two_shot = sums, two_shot

    def wait_forever(self) -> None:
        """Ends the trial: from now on calls wait without limit."""
        self._tries = WAIT_FOREVER

    def replayed(self) -> int | None:
        return self._sums.calls(two_shot=self._two_shot, normed=self._normed)


class PeerSum(_PeerMethod):
    """Implements :class:`~sapwood_worker.model.distributed.all_reduce.SumMethod`.

    Args:
        sums: As for all.
        rows: Exchanges rows; it is the same for both methods.
        two_shot: As for all.
    """

    _normed = False

    def __init__(self, sums: PeerAllReduce, rows: RowExchange, *, two_shot: bool) -> None:
        super().__init__(sums, two_shot=two_shot)
        self._rows = rows

    def sum(self, x: Tensor) -> None:
        whole = x.contiguous()
        self._sums.sum(whole, two_shot=self._two_shot, tries=self._tries)
        if whole is not x:
            x.copy_(whole)

    def gather(self, x: Tensor) -> Tensor:
        return self._rows.gather(x.contiguous(), self._tries)

    def scatter_sum(self, x: Tensor) -> Tensor:
        return self._rows.scatter_sum(x.contiguous(), self._tries)

    def replayed(self) -> int | None:
        # Sums of a rank's own rows are reported as one-shot, because each rank reads all parts.
        return self._sums.calls(two_shot=self._two_shot) + (0 if self._two_shot else self._rows.calls())


class PeerNormedSum(_PeerMethod):
    """Implements :class:`~sapwood_worker.model.distributed.all_reduce.NormedMethod`."""

    _normed = True

    def takes(self, x: Tensor, residual: Tensor) -> bool:
        return self._sums.takes_rows(x, residual, two_shot=self._two_shot)

    def add(self, x: Tensor, residual: Tensor, norm: Norm) -> Tensor | None:
        return self._sums.add_normed(x, residual, norm.weight, norm.eps, two_shot=self._two_shot, tries=self._tries)


def make_peer_sums(group: TorchGroup, device: torch.device) -> tuple[list[PeerSum], list[PeerNormedSum]]:
    """Makes the methods over memory that all ranks reach; called by all ranks together.

    Raises:
        RuntimeError: They do not.
    """
    unit = PROGRAMS * 16 * group.size
    most = MOST_BYTES // unit * unit
    num_bytes = PeerAllReduce.region_bytes(most)
    memory = PeerMemory(group, num_bytes + RowExchange.region_bytes(most, group.size), device)
    sums = PeerAllReduce(memory.addresses, group.rank, most, device)
    rows = RowExchange([each + num_bytes for each in memory.addresses], group.rank, most, device)
    ways = False, True
    return [PeerSum(sums, rows, two_shot=each) for each in ways], [PeerNormedSum(sums, two_shot=each) for each in ways]


def captured(call: Callable[[], None]) -> Callable[[], None]:
    """Replays a CUDA graph of the call, as decode steps do."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph.replay


def time_on_gpu(call: Callable[[], None]) -> float:
    """The time of one call, from a CUDA graph of many calls: the quickest of some rounds, by the GPU's clock.

    A round begins with an untimed replay, in which the ranks wait for each other.
    """

    def some() -> None:
        for _ in range(_CALLS):
            call()

    replay = captured(some)
    seconds = []
    for _ in range(_ROUNDS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        replay()
        began.record()
        for _ in range(_REPLAYS):
            replay()
        ended.record()
        torch.cuda.synchronize()
        seconds.append(began.elapsed_time(ended) / 1e3 / (_CALLS * _REPLAYS))
    return float(min(seconds))
