"""Measures from how many tokens on a model's sums over ranks are to run while the rest of a product, or of a layer of experts, is
computed, and whether what comes of it is right.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from sapwood_common.contract.sampling import SamplingParams
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.distributed.calibration import Trial, as_it_is, time_on_host
from sapwood_worker.model.distributed.group import Group
from sapwood_worker.model.distributed.overlap import (
    CutKind,
    Overlap,
    SideStream,
    SideThread,
    best_table,
    counts_tried,
    sizes_tried,
)
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.distributed.torch_group import TorchGroup
from sapwood_worker.model.families.decoder import DecoderLayer
from sapwood_worker.model.layers.linear import RowLinear
from sapwood_worker.model.layers.mlp import GatedMLP
from sapwood_worker.model.layers.norm import RMSNorm
from sapwood_worker.model.layers.sparse.sparse_mlp import SparseMLP
from sapwood_worker.model.pools.device_pool import DevicePool
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.records.model_info import OVERLAPPED
from sapwood_worker.records.step import Entry, IntArray, LaunchedStep, Step

logger = logging.getLogger(__name__)


_TRIES = 2
_QUEUED = 6
"""Calls that a device gets at once if it computes by itself: as in a step, the host is then ahead of it."""


@dataclass(frozen=True, slots=True)
class _Measured:
    """What stands for all of a kind.

    Attributes:
        kind: The kind.
        run: Is timed: of [T, width] and a residual [T, N].
        width: Numbers of a row of its input.
        part: What of it is looked at, whether pieces are summed rightly.
        sizes: Rows that are tried, ascending.
    """

    kind: CutKind
    run: Callable[[Tensor, None, Tensor], object]
    width: int
    part: RowLinear | SparseMLP
    sizes: Sequence[int]


@torch.inference_mode()
def overlap_sums(
    parallel: Parallel, model: nn.Module, ops: DeviceOps, dtype: torch.dtype, most: int, *, captured: int = 0
) -> None:
    """Has long products and layers of experts be summed in pieces where that is quicker; called by all ranks together.

    Args:
        parallel: The groups.
        model: The model, or this rank's part of one. What is measured is its first layer without attention, where that is a
            product and an MLP, or experts, with a sum each, and norms alone see them. Else it is the widest product with a sum,
            or the experts alone.
        ops: The device's operations.
        dtype: Of activations.
        most: Tokens of the largest step.
        captured: Tokens of the largest step of prompts whose layers are replayed as CUDA graphs: up to there graphs are timed.
    """
    group = parallel.tp
    if group.size == 1 or parallel.rows is not None:
        return
    measured = list(_measured(model, most))
    if not measured:
        return
    overlap = Overlap(group.all_reduce, SideThread() if ops.device.type == "cpu" else SideStream(ops.device))
    group.overlap = overlap
    captured = min(group.exchange(captured, int))  # a rank with a head has none
    for each in measured:
        _choose(each, group, overlap, ops, dtype, captured)
    overlap.summed = 0
    logger.info("all-reduce beside %s", overlap.words or "nothing: that is not quicker here, or not right")


def _measured(model: nn.Module, most: int) -> Iterator[_Measured]:
    """The measurements for a model whose steps have at most this many tokens."""
    modules = list(model.modules())
    ends = [found for each in modules if (found := _after_attention(each)) is not None]
    products = [each for each in modules if isinstance(each, RowLinear) and _kind(each) == "products"]
    experts = [each for each in modules if isinstance(each, SparseMLP) and _kind(each) is not None]
    layers: list[tuple[CutKind, RowLinear | SparseMLP]] = []
    if products:
        layers.append(("products", max(products, key=_inputs)))
    layers += [("layers of experts", each) for each in experts[:1]]
    for kind, layer in layers:
        end = next((each for each in ends if _kind(each.mlp) == kind), None)
        if sizes := sizes_tried(most, kind):
            yield _Measured(kind, end or layer, _inputs(end.output if end else layer), layer, sizes)


def _kind(layer: RowLinear | GatedMLP | SparseMLP) -> CutKind | None:
    """Of what kind its pieces would be; None: it has none."""
    if isinstance(layer, SparseMLP):
        return layer.kind
    return None if layer.ranks is None else layer.ranks.kind


def _inputs(layer: RowLinear | SparseMLP) -> int:
    return layer.shape.columns.size if isinstance(layer, RowLinear) else layer.hidden_size


def _outputs(layer: RowLinear | SparseMLP) -> int:
    return layer.shape.rows if isinstance(layer, RowLinear) else layer.hidden_size


def _choose(
    measured: _Measured, group: Group, overlap: Overlap, ops: DeviceOps, dtype: torch.dtype, captured: int
) -> None:
    """Has what is measured, and all of its kind, be cut as is quickest, if that is right."""
    kind, sizes = measured.kind, measured.sizes
    # Alike on all ranks, and in no two rows: experts are to get tokens as they do from texts.
    numbers = torch.Generator(ops.device).manual_seed(0)
    x = torch.randn(sizes[-1], measured.width, device=ops.device, generator=numbers).to(dtype)
    residual = torch.zeros(sizes[-1], _outputs(measured.part), dtype=dtype, device=ops.device)
    tried = [(rows, count) for rows in sizes for count in counts_tried(rows)]
    own = []
    call: Callable[[], None]
    for rows, count in tried:
        overlap.cut([(0, count)], kind)
        call = partial(_run, measured, x[:rows], residual[:rows], overlap)
        if rows <= captured:
            call = _captured(call)
        own.append(min(_seconds(call, ops) for _ in range(_TRIES)))  # the first is slower
    # All ranks go by the slowest one's seconds, so that they cut alike.
    slowest = list(map(max, *group.exchange(own, list[float])))
    table = best_table([(*each, seconds) for each, seconds in zip(tried, slowest, strict=True)], captured)
    trial = Trial(group, ops, (dtype,), timer=time_on_host, replay=as_it_is if ops.device.type == "cpu" else _captured)
    fault = trial.fault(_Pieces(group, measured, *each, dtype, ops) for each in table if each[1] > 1)
    if fault:
        logger.warning("all-reduce: %s in pieces are not used: %s", kind, fault)
        if group.sums is not None:
            group.sums.refuse(OVERLAPPED, fault)
    overlap.cut([] if fault else table, kind)
    took = ", ".join(
        f"{rows} in {count}: {1e6 * each:.0f} us" for (rows, count), each in zip(tried, slowest, strict=True)
    )
    logger.info("%s of so many tokens, in so many pieces: %s", kind, took)


class _AfterAttention:
    """What of a layer comes after its attention, as it is in a step.

    Args:
        output: Attention's output.
        norm: Sees the residual after it.
        mlp: Sees that.

    Attributes:
        output, mlp: The arguments.
    """

    def __init__(self, output: RowLinear, norm: RMSNorm, mlp: GatedMLP | SparseMLP) -> None:
        self.output, self._norm, self.mlp = output, norm, mlp

    def __call__(self, x: Tensor, gate: None, residual: Tensor) -> None:
        self.output(x, gate, residual)
        self.mlp(residual, self._norm, residual)


def _after_attention(module: nn.Module) -> _AfterAttention | None:
    if not isinstance(module, DecoderLayer):
        return None
    output, mlp = module.attention.output, module.mlp
    if output.ranks is None or output.ranks.following is None:
        return None
    if not isinstance(mlp, GatedMLP | SparseMLP) or _kind(mlp) is None:
        return None
    return _AfterAttention(output, output.ranks.following, mlp)


class _Pieces:
    """Something whose pieces are summed while the next is computed. Implements
    :class:`~sapwood_worker.model.distributed.calibration.Case`.

    Args:
        group: The ranks.
        measured: Has it.
        rows: Tokens.
        count: Pieces.
        dtype: Of activations.
        ops: The device's operations.
    """

    def __init__(
        self, group: Group, measured: _Measured, rows: int, count: int, dtype: torch.dtype, ops: DeviceOps
    ) -> None:
        assert group.overlap is not None
        layer = measured.part
        self._input = torch.empty(rows, _inputs(layer), dtype=dtype, device=ops.device)
        self.x = self._input.view(-1)
        outputs = _outputs(layer)
        self._before = torch.linspace(-1, 1, rows * outputs, device=ops.device).view(rows, -1).to(dtype)
        self._residual = torch.empty_like(self._before)
        self._group, self._layer, self._beside = group, layer, group.overlap
        # What it is compared with: the same pieces, each summed by torch's backend before the next is computed.
        self._apart = Overlap(group.backend.sum if isinstance(group, TorchGroup) else group.all_reduce, _at_once)
        for each in (self._beside, self._apart):
            each.cut([(0, count)], measured.kind)

    def run(self) -> None:
        self._residual.copy_(self._before)
        self._layer(self._input, None, self._residual)
        if self._group.overlap is not None:
            self._group.overlap.settle()

    def wrong(self, every: Tensor) -> str:
        found = self._residual.clone()
        self._group.overlap = self._apart
        self.run()
        self._group.overlap = self._beside
        # The backend may add the ranks' parts up in another order.
        most = 4 * torch.finfo(found.dtype).eps * float(self._residual.abs().max())
        return "" if torch.allclose(found, self._residual, rtol=0, atol=most) else "sum in pieces"


def _at_once(call: Callable[[], object]) -> Callable[[], object]:
    call()
    return lambda: None


def _captured(call: Callable[[], None]) -> Callable[[], None]:
    from sapwood_worker.model.distributed.peer_all_reduce import captured  # only CUDA builds of torch have triton

    return captured(call)


def _run(measured: _Measured, x: Tensor, residual: Tensor, overlap: Overlap) -> None:
    measured.run(x, None, residual)
    overlap.settle()


def _seconds(call: Callable[[], object], ops: DeviceOps) -> float:
    fence = ops.fence()
    fence.set()
    fence.wait()
    calls = _QUEUED if ops.asynchronous else 1
    began = time.perf_counter()
    for _ in range(calls):
        call()
    fence.set()
    fence.wait()
    return (time.perf_counter() - began) / calls


# Steps of dummy requests, which tell from how many requests on it pays that the stages of a pipeline compute several
# steps at once (micro_batches), and whether the tokens of such steps are right. For devices that compute while their host
# continues.


_KEYS = 1024
"""Tokens of each request, if the pool holds them all: micro-batches save part of the reading of these tokens."""
_ROUNDS = 10
"""Tokens that each request gets in a trial."""
_GAIN = 0.97
"""Part of the time of one micro-batch that several have to take at most."""


def try_micro_batches(runner: ModelRunner, pool: DevicePool, parallel: Parallel, *, always: bool = False) -> None:
    """Sets in the runner's ``info`` how many micro-batches there are and from how many requests on; called by all ranks together.

    Args:
        runner: Runs this rank's part of the model, with one micro-batch for each stage.
        pool: Its keys and values, which are overwritten.
        parallel: The groups.
        always: Whether they are used even where that does not pay.
    """
    info, stages = runner.info, parallel.pp.size
    if info.micro_batches == 1:
        return
    for pages in pool.pages.values():
        pages.view(torch.uint8).zero_()
    first = DecodeTrial(runner, min(2 * stages, info.max_running))
    apart = first.tokens(stages, apart=True)  # connects the stages, for which NCCL may wait until a device is at rest
    wrong = max(parallel.exchange(int(first.tokens(stages) != apart), int))
    if wrong:
        logger.warning("pipeline: one step at a time: several at once gave other tokens on a rank")
        runner.info = msgspec.structs.replace(info, micro_batches=1)
        return
    chosen, said = 0, []
    size = info.max_running
    while size >= stages:
        trial = DecodeTrial(runner, size)
        one, several = (min(trial.seconds(shares) for _ in range(_TRIES)) for shares in (1, stages))
        # All ranks go by the slowest one's seconds, so that they choose alike.
        one, several = map(max, zip(*parallel.exchange((one, several), tuple[float, float]), strict=True))
        said.append(f"{size} requests: {1e3 * one:.2f} ms, {1e3 * several:.2f} ms")
        if several > _GAIN * one and not always:
            break
        chosen, size = size, size // 2
    told = f"{stages} at once from {chosen} requests on" if chosen else "one at a time: more at once take as long"
    logger.info("pipeline: steps of decodes: %s (a token of each by one, and by %d: %s)", told, stages, "; ".join(said))
    micro_batches = {"micro_batches_from": chosen} if chosen else {"micro_batches": 1}
    runner.info = msgspec.structs.replace(info, **micro_batches)


class DecodeTrial:
    """Decodes of dummy requests, each a token after another, which all ranks launch alike.

    Args:
        runner: Launches them.
        count: How many requests.
    """

    def __init__(self, runner: ModelRunner, count: int) -> None:
        info, self._runner = runner.info, runner
        room = min(info.num_pages, *(each.num_pages for each in info.windows), info.num_pages)
        each = min(max(1, room // count), -(-_KEYS // info.page_size), info.context_length // info.page_size)
        self._rows = np.arange(count)
        table = (self._rows[:, None] * each + np.arange(each)) % room
        self._pages = np.tile(table.astype(np.int32), (1, 1 + len(info.windows)))
        self._start = max(0, each * info.page_size - _ROUNDS)
        self._rounds = min(_ROUNDS, each * info.page_size)

    def seconds(self, shares: int) -> float:
        """Seconds for a token of each request, with this many micro-batches."""
        began = time.perf_counter()
        self.tokens(shares)
        return (time.perf_counter() - began) / self._rounds

    def tokens(self, shares: int, *, apart: bool = False) -> list[list[int]]:
        """The tokens of each step.

        Args:
            shares: Into how many steps each round goes.
            apart: Whether each step ends before the next is launched.
        """
        launched: deque[LaunchedStep] = deque()
        found: list[list[int]] = []

        def take(keep: int) -> None:
            while len(launched) > keep:
                found.append([token for tokens in launched.popleft().result().token_ids for token in tokens])

        for step in self._steps(shares):
            launched.append(self._runner.launch(step))
            take(0 if apart else shares)
        take(0)
        return found

    def _steps(self, shares: int) -> Iterator[Step]:
        parts = np.array_split(self._rows, shares)
        greedy = SamplingParams(temperature=0.0)
        for at in range(self._rounds):
            for part in parts:
                one = np.ones(len(part), np.int64)
                tokens: IntArray = part % 97 if at == 0 else -one
                step = Step(0, part, one * (self._start + at), one, one, tokens)
                step.pages = self._pages[part]
                step.entries = tuple(Entry(int(row), 0, greedy, 1) for row in part) if at == 0 else ()
                yield step
