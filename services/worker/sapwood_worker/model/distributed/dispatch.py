"""All-to-all for experts: sends rows to the ranks of their experts."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from sapwood_kernels.experts.payload import GROUP, RowShape, from_float8, to_float8
from sapwood_kernels.native.products import NativeLibrary, load_library
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.distributed.all_reduce import add_up
from sapwood_worker.model.distributed.calibration import Replay, as_it_is
from sapwood_worker.model.distributed.data_parallel import DataParallelRows
from sapwood_worker.model.distributed.expert_exchange import ExpertExchange, RowWays, count
from sapwood_worker.model.distributed.group import Group
from sapwood_worker.model.distributed.shared_memory_all_reduce import SharedMeeting

logger = logging.getLogger(__name__)


# The registry of all-to-all implementations, by kind of device, and the trial that decides whether they are used.


_MOST_BYTES = 128 << 20
"""Bytes of a rank's region, about: 580 rows of DeepSeek-V3's width for each of 8 ranks."""
_MOST_ROWS = 1024
_SECONDS = 1800.0
"""Seconds to wait for a CPU rank before it is an error: it may still read its weights."""
_TURNS = 3


def choose_exchange(group: Group, rows: DataParallelRows, shape: RowShape, ops: DeviceOps) -> ExpertExchange | None:
    """Chooses the all-to-all for experts, if it is right on this machine; called by all ranks together.

    Args:
        group: The ranks. Each rank has some of the experts.
        rows: What each rank has.
        shape: The rows.
        ops: The device's operations.
    """
    bytes_each = group.size * (shape.row_bytes + shape.sum_bytes + 8 * shape.chosen + 16)
    most_rows = max(1, min(_MOST_ROWS, _MOST_BYTES // bytes_each))
    make = _WAYS.get(ops.device.type)
    found = None if make is None else make(group, shape, most_rows, ops.device)
    if found is None:
        logger.warning("--expert-parallel dispatch: ranks do not share memory here: rows go to all ranks")
        return None
    ways, replay, end_trial = found
    if fault := _fault(group, ways, ops, replay):
        logger.warning("--expert-parallel dispatch: it is not used, rows go to all ranks: %s", fault)
        return None
    end_trial()
    kept = "float8" if shape.float8 else shape.dtype
    logger.info("experts: up to %d rows of a rank go to the ranks of their experts only, in %s", most_rows, kept)
    exchange = ExpertExchange(group, rows, ways, ops)
    exchange.forget()
    return exchange


def _fault(group: Group, ways: RowWays, ops: DeviceOps, replay: Replay) -> str:
    """The first fault of the all-to-all on any rank; empty: none."""
    for rows in dict.fromkeys((1, min(5, ways.most_rows), min(70, ways.most_rows))):
        said = group.exchange(_try(group, ways, rows, ops, replay), str)
        faults = [(rank, each) for rank, each in enumerate(said) if each]
        if faults:  # all ranks stop here
            return "rank {}: {}".format(*faults[0])
    return ""


@torch.inference_mode()
def _try(group: Group, ways: RowWays, rows: int, ops: DeviceOps, replay: Replay) -> str:
    """Tests the kernels with this many rows on this machine, once alone and then repeatedly as in steps; returns what is
    wrong."""
    shape, device, experts = ways.shape, ops.device, ways.shape.experts
    each = experts // group.size
    x = torch.empty(rows, shape.width, dtype=shape.dtype, device=device)
    ids = torch.empty(rows, shape.chosen, dtype=torch.int64, device=device)
    weights = torch.empty(rows, shape.chosen, dtype=torch.float32, device=device)
    holders, counts = torch.empty_like(ids), torch.zeros(experts, dtype=torch.int64, device=device)
    out = torch.empty_like(x)
    here = range(group.rank * each, (group.rank + 1) * each)

    def run() -> None:
        found = ways.dispatch(x, ids, weights, holders, rows, counts)
        out.copy_(ways.combine(_made(*found, here), holders, rows))

    said, call = "", run
    for turn in range(_TURNS):
        draw = torch.Generator(device).manual_seed(1000 * turn + group.rank)
        x.copy_(torch.randn(x.shape, generator=draw, device=device))
        ids.copy_(torch.rand(rows, experts, generator=draw, device=device).topk(shape.chosen).indices)
        ids[0, 0] = experts  # none
        weights.copy_(torch.rand(weights.shape, generator=draw, device=device))
        holders.copy_(ids // each)
        every = [group.gather_rows(tensor) for tensor in (x, ids, weights)]
        try:
            if turn == 1:
                call = replay(run)
            counts.zero_()
            call()
            if wrong := _wrong(group, shape, every, out, counts):
                said = f"{wrong} of {rows} rows of {shape.width} numbers"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
    return said


def _made(x: Tensor, ids: Tensor, weights: Tensor, here: range) -> Tensor:
    """The output of dummy experts: each row times the sum of its weights for the experts of this rank."""
    mine = (ids >= here.start) & (ids < here.stop)
    return x * torch.where(mine, weights, 0.0).sum(1, keepdim=True).to(x.dtype)


def _wrong(group: Group, shape: RowShape, every: Sequence[Tensor], out: Tensor, counts: Tensor) -> str:
    """The faults in the results, given all ranks' rows, experts and weights; empty: none."""
    x, ids, weights = every
    if shape.float8:
        x = from_float8(*to_float8(x), x.dtype)
    each = shape.experts // group.size
    parts = [_made(x, ids, weights, range(rank * each, (rank + 1) * each)) for rank in range(group.size)]
    whole, counted = torch.empty_like(x), torch.zeros_like(counts)
    add_up(parts, whole)
    count(ids, counted)
    own = whole.chunk(group.size)[group.rank]
    found = {"the sums": torch.equal(out, own), "the counts": torch.equal(counts, counted)}
    return next((name for name, right in found.items() if not right), "")


_Found = tuple[RowWays, Replay, Callable[[], None]]


def _on_cpus(group: Group, shape: RowShape, most_rows: int, device: torch.device) -> _Found | None:
    library = load_library()
    if not all(group.exchange(library is not None and hasattr(os, "memfd_create"), bool)):
        return None
    assert library is not None
    return SharedRows(group, shape, most_rows, library, _SECONDS), as_it_is, lambda: None


def _on_gpus(group: Group, shape: RowShape, most_rows: int, device: torch.device) -> _Found | None:
    from sapwood_worker.model.distributed.peer_all_reduce import captured
    from sapwood_worker.model.distributed.peer_dispatch import PeerWays  # only CUDA builds of torch have triton

    try:
        ways = PeerWays(group, shape, most_rows, device)
    except RuntimeError as error:
        logger.warning("experts: %s", error)
        return None
    return ways, captured, ways.wait_forever


_WAYS: Mapping[str, Callable[[Group, RowShape, int, torch.device], _Found | None]] = {"cpu": _on_cpus, "cuda": _on_gpus}


# All-to-all between CPU processes of one host, over memory that they share.
class SharedRows:
    """Implements :class:`~sapwood_worker.model.distributed.expert_exchange.RowWays`; made by all ranks together.

    The memory has one place for each row of each rank at each rank. The places are overwritten without further synchronisation:
    a rank that begins the next dispatch has met all others in the combine of this one, and they begin that when their experts no
    longer need the rows.

    Args:
        group: The ranks.
        shape: The rows.
        most_rows: Rows of a rank at a time, at most.
        library: The compiled library.
        seconds: Seconds to wait for a rank before it is an error.
    """

    def __init__(self, group: Group, shape: RowShape, most_rows: int, library: NativeLibrary, seconds: float) -> None:
        self.shape, self.most_rows = shape, most_rows
        self.moved = torch.zeros(2, dtype=torch.int64)
        self._rank, self._size = group.rank, group.size
        pairs = self._size, self._size, most_rows  # the rank that gets the row, and the rank that sent it
        kinds: list[tuple[tuple[int, ...], torch.dtype]] = [
            ((self._size, most_rows, shape.chosen), torch.int64),
            ((self._size, most_rows, shape.chosen), torch.float32),
            (pairs, torch.bool),
            ((*pairs, shape.width), torch.float8_e4m3fn if shape.float8 else shape.dtype),
            ((*pairs, -(-shape.width // GROUP)), torch.uint8),
            ((*pairs, shape.width), shape.dtype),
        ]
        sizes = [-(-torch.Size(shape).numel() * dtype.itemsize // 64) * 64 for shape, dtype in kinds]
        self._meeting = SharedMeeting(group, library, sum(sizes), seconds)
        parts = [
            part[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)
            for part, (shape, dtype) in zip(torch.split(self._meeting.content, sizes), kinds, strict=True)
        ]
        self._ids, self._weights, self._came, self._rows, self._exponents, self._sums = parts

    def dispatch(
        self, x: Tensor, ids: Tensor, weights: Tensor, holders: Tensor, rows: int, counts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        rank, own, shape = self._rank, len(x), self.shape
        self._ids[rank, :rows] = shape.experts
        self._ids[rank, :own] = ids
        self._weights[rank, :rows] = 0
        self._weights[rank, :own] = weights
        self._came[:, rank, :rows] = False
        codes, exponents = to_float8(x) if shape.float8 else (x, None)
        for target in range(self._size):
            mine = (holders == target).any(1).nonzero()[:, 0]
            self._came[target, rank, mine] = True
            self._rows[target, rank, mine] = codes[mine]
            if exponents is not None:
                self._exponents[target, rank, mine] = exponents[mine]
        self._meeting.wait()
        came = self._came[rank, :, :rows]
        found = x.new_empty(self._size, rows, shape.width)
        taken = self._rows[rank, :, :rows][came]
        found[came] = from_float8(taken, self._exponents[rank, :, :rows][came], x.dtype) if shape.float8 else taken
        every = self._ids[:, :rows].flatten(0, 1)
        count(every, counts)
        everywhere = self._came[:, :, :rows]
        self.moved[0] += everywhere.sum() - everywhere.diagonal().sum()
        self.moved[1] += (every < shape.experts).any(1).sum()
        return found.flatten(0, 1), every, self._weights[:, :rows].flatten(0, 1)

    def combine(self, part: Tensor, holders: Tensor, rows: int) -> Tensor:
        rank, parts = self._rank, part.view(self._size, rows, -1)
        for source in range(self._size):
            came = self._came[rank, source, :rows].nonzero()[:, 0]
            self._sums[source, rank, came] = parts[source, came]
        self._meeting.wait()
        total = torch.zeros(len(holders), self.shape.width)
        for target in range(self._size):
            here = (holders == target).any(1).nonzero()[:, 0]
            total[here] += self._sums[rank, target, here].float()
        return total.to(part.dtype)
