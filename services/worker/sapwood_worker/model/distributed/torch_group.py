"""Groups of processes, by ``torch.distributed``: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

import fcntl
import math
import os
import socket
import struct
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from sapwood_common.errors import ConfigError
from sapwood_kernels.ops.contracts import Norm
from sapwood_worker.model.distributed.all_reduce import AllReduce, Choice, add_up
from sapwood_worker.model.distributed.group import Group, ValueT
from sapwood_worker.model.distributed.notes import StoreNotes
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.records.ranks import Waits

_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""NVLink multicast is off, because it can put a host's GPUs out of service, and other programs may share them."""

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_MOST_EXCHANGED = 1 << 24
"""The most bytes of a value that ranks exchange at the start."""
_MOST_SENT = 16
"""How many tensors a rank sends on a CPU before it waits until the first was received. Gloo does not report which were
received."""


class BackendSum:
    """Sums by torch's backend. Implements :class:`~sapwood_worker.model.distributed.all_reduce.SumMethod`.

    On CPUs each rank adds up all ranks' tensors itself, in their order, so that a row's sum does not depend on other rows:
    gloo's own all-reduce begins each part of a tensor with another rank. NCCL has its own order, the same in every run.

    Args:
        group: torch's handle of the group.
        rank: This process's place in it.
        size: Its ranks.
        waiting: Marks this rank as waiting for the others.
    """

    name = "backend"
    most_bytes = math.inf

    def __init__(
        self, group: dist.ProcessGroup, rank: int, size: int, waiting: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._group, self._rank, self._size, self._waiting = group, rank, size, waiting

    def sum(self, x: Tensor) -> None:
        if x.is_cpu:
            add_up(self.gather(x).unbind(), x)
        else:
            dist.all_reduce(x, group=self._group)

    def gather(self, x: Tensor) -> Tensor:
        parts = x.new_empty(self._size, *x.shape)
        with self._waiting():
            dist.all_gather_into_tensor(parts.flatten(0, 1), x.contiguous(), group=self._group)
        return parts

    def scatter_sum(self, x: Tensor) -> Tensor:
        result = x.new_empty(len(x) // self._size, *x.shape[1:])
        if x.is_cpu:
            add_up([part.chunk(self._size)[self._rank] for part in self.gather(x)], result)
        else:
            dist.reduce_scatter_tensor(result, x.contiguous(), group=self._group)
        return result

    def replayed(self) -> int | None:
        return None


class NoSum:
    """Leaves sums out. Implements :class:`~sapwood_worker.model.distributed.all_reduce.SumMethod`.

    Args:
        size: Ranks of the group.
    """

    name = "none"
    most_bytes = math.inf

    def __init__(self, size: int) -> None:
        self._size = size

    def sum(self, x: Tensor) -> None:
        """Nothing."""

    def gather(self, x: Tensor) -> Tensor:
        return x.expand(self._size, *x.shape)

    def scatter_sum(self, x: Tensor) -> Tensor:
        return x[: len(x) // self._size].clone()

    def replayed(self) -> int | None:
        return None


class TorchGroup(Group):
    """Processes.

    Args:
        ranks: Its ranks among all, in order; this process is one of them.
        group: torch's handle of the group.
        waits: Records for which ranks this one waits.

    Attributes:
        ranks: The argument.
        sums: How it sums and gathers tensors; at first with the backend.
    """

    def __init__(self, ranks: Sequence[int], group: dist.ProcessGroup, waits: Waits) -> None:
        self.rank = list(ranks).index(dist.get_rank())
        self.size = len(ranks)
        self.ranks = ranks
        self.backend = BackendSum(group, self.rank, self.size, self.waiting)
        self.sums: AllReduce = AllReduce([Choice(math.inf, self.backend)])
        self._group = group
        self._waits, self._others = waits, sum(1 << rank for rank in ranks if rank != dist.get_rank())
        self._sent: deque[tuple[dist.Work | None, Tensor, int]] = deque()

    def waiting(self) -> AbstractContextManager[None]:
        return self._waits.exchange(self._others)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        before, self.sums = self.sums, AllReduce([Choice(math.inf, NoSum(self.size))])
        try:
            yield
        finally:
            self.sums = before

    def all_reduce(self, x: Tensor) -> Tensor:
        self._count(x)
        self.sums(x)
        return x

    def add_sum(self, x: Tensor, residual: Tensor, norm: Norm) -> Tensor | None:
        self._count(x)
        return self.sums.add(x, residual, norm)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._gathered(x).unbind(), -1)

    def gather_rows(self, x: Tensor) -> Tensor:
        return self._gathered(x).flatten(0, 1)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        self._count(x)
        found = self.sums.scatter_sum(x)
        self._let_go()
        return found

    def reduce(self, x: Tensor, target: int) -> Tensor:
        if x.is_cpu:  # in the order of all other sums
            self.all_reduce(x)
            self._let_go()
            return x
        self._count(x)
        self.sums.note(self.backend.name)
        dist.reduce(x, self.ranks[target], group=self._group)
        return x

    def _count(self, x: Tensor) -> None:
        """Counts an exchange of tensors like x. On CPUs it is counted when it has been waited for."""
        if not x.is_cpu:
            self._waits.count_exchange()

    def _gathered(self, x: Tensor) -> Tensor:
        self._count(x)
        found = self.sums.method(self.size * x.nbytes).gather(x)
        self._let_go()
        return found

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        self._count(x)
        if not x.is_cpu:
            dist.broadcast(x, self.ranks[source], group=self._group)
        elif self.rank != source:
            self.receive(x, source)
        else:  # gloo's own waits until the others have come
            sent = x.clone()
            for target in range(self.size):
                if target != source:
                    self.send(sent, target)
        return x

    def send(self, x: Tensor, target: int) -> None:
        self._count(x)
        if not x.is_cpu:  # in the order of the stream; each pair of ranks has its own NCCL communicator for sends
            dist.send(x, self.ranks[target], group=self._group)
            return
        if len(self._sent) == _MOST_SENT:
            work, _, receiver = self._sent.popleft()
            if work is not None:
                with self._waits.exchange(1 << receiver):
                    work.wait()
        self._sent.append((dist.isend(x, self.ranks[target], group=self._group), x, self.ranks[target]))

    def _let_go(self) -> None:
        """Forgets this rank's sent tensors on a CPU, after an exchange of all ranks: every rank had received them before it
        joined the exchange."""
        while self._sent:
            work, _, _ = self._sent.popleft()
            if work is not None:
                work.wait()

    def receive(self, x: Tensor, source: int) -> Tensor:
        with self._waits.exchange(1 << self.ranks[source]):
            dist.recv(x, self.ranks[source], group=self._group)
        return x

    def exchange(self, value: ValueT, kind: Any) -> list[ValueT]:
        # Not all_gather_object: it unpickles received data, which would run code from a stranger.
        own = msgspec.msgpack.encode(value)
        sizes = self._bytes_of_all(torch.tensor([len(own)]))
        longest = int(sizes.max())
        if int(sizes.min()) < 0 or longest > _MOST_EXCHANGED:
            raise ConfigError(f"a rank exchanges {longest} bytes: at most {_MOST_EXCHANGED} make sense")
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        parts = zip(self._bytes_of_all(padded), sizes.flatten().tolist(), strict=True)
        try:
            return [msgspec.msgpack.decode(part[:size].numpy().tobytes(), type=kind) for part, size in parts]
        except msgspec.MsgspecError as error:
            raise ConfigError(f"a rank exchanges something else than {kind}: {error}") from None

    def _bytes_of_all(self, own: Tensor) -> Tensor:
        """Each rank's tensor; they are on the host, and of one size."""
        parts = own.new_empty(self.size, len(own))
        dist.all_gather_into_tensor(parts.flatten(), own, group=self._group)
        return parts


def grid(tensor: int, pipeline: int, data: int, expert: int) -> dict[str, list[list[int]]]:
    """The ranks of every group, by kind: ``tp``, ``pp``, ``dp`` and ``ep``.

    Ranks of a tensor-parallel group, which communicate most, are neighbours; then come stages of a pipeline, then data-parallel
    copies. An expert-parallel group is ``expert`` ranks of one stage, in order.
    """
    ranks = torch.arange(tensor * pipeline * data).view(data, pipeline, tensor)
    return {
        "tp": ranks.reshape(-1, tensor).tolist(),
        "pp": ranks.transpose(1, 2).reshape(-1, pipeline).tolist(),
        "dp": ranks.permute(1, 2, 0).reshape(-1, data).tolist(),
        "ep": ranks.transpose(0, 1).reshape(-1, expert).tolist(),
    }


def join_groups(
    rank: int,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    data: int = 1,
    expert: int = 1,
    rendezvous: str,
    backend: str,
    timeout: float,
    exchange_timeout: float | None = None,
    listener: int | None = None,
    waits: Waits | None = None,
) -> Parallel:
    """Meets the other ranks, ``tensor * pipeline * data`` in all, and forms the groups; torch's default group has all ranks.

    Sets environment variables: ranks that meet by a file share a machine, and gloo then uses its loopback interface; other ranks
    use the interface that leads to rank 0.

    Args:
        rank: This process's, among all.
        tensor: Ranks of a tensor-parallel group.
        pipeline: Stages of a pipeline.
        data: Data-parallel copies.
        expert: Ranks of an expert-parallel group; divides ``data * tensor``.
        rendezvous: Where they meet: ``tcp://HOST:PORT`` as :func:`_store` returns it, or ``file://PATH``.
        backend: ``gloo``, or ``cpu:gloo,cuda:nccl``.
        timeout: Seconds for the meeting.
        exchange_timeout: Seconds for each exchange after the first; None: the same as for the first.
        listener: On rank 0, the file descriptor of a socket that listens at the rendezvous' port; None: this function opens one.
        waits: Records for which ranks this one waits; None: it is not recorded.

    Raises:
        ConfigError: The sizes do not fit, or other ranks did not join in time.
    """
    world = tensor * pipeline * data
    if not 0 <= rank < world or data * tensor % expert:
        sizes = f"tensor {tensor} x pipeline {pipeline} x data {data}, expert {expert}"
        raise ConfigError(f"rank {rank} of {sizes}: the sizes do not fit")
    if world == 1:
        return Parallel()
    os.environ.update(_NO_MULTICAST)
    # torch 2.13 has another name for it, which 2.11 has not.
    warnings.filterwarnings("ignore", message=".*all_gather_into_tensor", category=FutureWarning)
    if rendezvous.startswith("file:") and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # whatever the machine's name resolves to
    limit = timedelta(seconds=timeout)
    later = timedelta(seconds=exchange_timeout or timeout)
    try:
        if rendezvous.startswith("tcp:"):
            store = _store(rendezvous, rank, world, limit, listener)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
        else:
            dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=world, timeout=limit)
    except (RuntimeError, ValueError, OSError) as error:
        raise ConfigError(f"rank {rank} of {world} did not meet the others at {rendezvous}: {error}") from error
    found: dict[str, Group] = {}
    for kind, groups in grid(tensor, pipeline, data, expert).items():
        for ranks in groups:
            made = dist.new_group(ranks, timeout=later) if len(ranks) > 1 else None  # by all ranks, in this order
            if rank in ranks:
                found[kind] = Group() if made is None else TorchGroup(ranks, made, waits or Waits())
    notes = StoreNotes(PrefixStore("notes", dist.distributed_c10d._get_default_store()), rank, world)
    return Parallel(found["tp"], found["pp"], found["dp"], found["ep"], notes=notes)


def _store(rendezvous: str, rank: int, world: int, limit: timedelta, listener: int | None) -> TCPStore:
    """The store by which ranks on several hosts meet.

    In ``tcp://HOST:PORT`` the host is rank 0's; the route to it determines the network interface. The port is on this host and
    leads to the store.
    """
    host, _, port = rendezvous.removeprefix("tcp://").rpartition(":")
    if sys.platform == "linux" and (interface := _interface_to(host)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        if ":" in host:
            os.environ.setdefault("NCCL_SOCKET_FAMILY", "AF_INET6")
    # torch's other server, on libuv, does not accept a socket that already listens.
    return TCPStore(
        "127.0.0.1",
        int(port),
        world,
        rank == 0,
        limit,
        wait_for_workers=False,
        master_listen_fd=listener if rank == 0 else None,
        use_libuv=False,
    )


def _interface_to(host: str) -> str:
    """The network interface that leads to a host; empty: unknown."""
    try:
        family, _, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    except OSError:
        return ""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(there)  # sends nothing
        except OSError:
            return ""
        own = probe.getsockname()[0]
        if family == socket.AF_INET6:
            return _interface_of(own)
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name.encode()[:15])
            try:
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(found[20:24]) == own:
                return name
    return ""


def _interface_of(address: str) -> str:
    """The network interface that has an IPv6 address; empty: none."""
    number = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    lines = map(str.split, Path("/proc/net/if_inet6").read_text().splitlines())
    return next((name for found, *_, name in lines if found == number), "")
