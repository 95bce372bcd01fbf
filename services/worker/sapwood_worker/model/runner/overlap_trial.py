"""Measures the least number of tokens for which a model's all-reduces should overlap with the rest of a product or of a layer of
experts, and checks the results.
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
from sapwood_worker.model.layers.attention import Attention
from sapwood_worker.model.layers.latent_attention import LatentAttention
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
"""How many calls are queued at once on a device that computes by itself: as in a step, the host is then ahead of it."""


@dataclass(frozen=True, slots=True)
class _Measured:
    """A layer that represents all of its kind.

    Attributes:
        kind: The kind.
        run: Is timed: of [T, width] and a residual [T, N].
        width: Numbers of a row of its input.
        part: The part of it that is checked for right sums of chunks.
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
    """Sums long products and layers of experts in chunks where that is quicker; called by all ranks together.

    Args:
        parallel: The groups.
        model: The model, or this rank's part of one. The measured part is its first layer without attention, if that is a
            product and an MLP or experts, each with a sum that only norms read. Else it is the widest product with a sum, or only
            the experts.
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
    """The kind of a layer's chunks; None: it cannot be cut."""
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
    """Cuts the measured layer, and all of its kind, in the quickest way, if the results are right."""
    kind, sizes = measured.kind, measured.sizes
    # The same on all ranks, and different in every row, so that experts get tokens as they do from texts.
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
    # All ranks use the slowest rank's seconds, so that all cut in the same way.
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
    """The part of a layer after its attention, as in a step.

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
    attention = getattr(module, "attention", None)
    if not isinstance(module, DecoderLayer) or not isinstance(attention, Attention | LatentAttention):
        return None
    output, mlp = attention.output, module.mlp
    if output.ranks is None or output.ranks.following is None:
        return None
    if not isinstance(mlp, GatedMLP | SparseMLP) or _kind(mlp) is None:
        return None
    return _AfterAttention(output, output.ranks.following, mlp)


class _Pieces:
    """A layer whose chunks are summed while the next chunk is computed. Implements
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
        # The reference: the same chunks, each summed by torch's backend before the next is computed.
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
        # The backend may add the ranks' parts in another order.
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


# Steps of dummy requests. They show the least number of requests for which computing several steps at once in a pipeline
# (micro_batches) pays, and whether the tokens of such steps are right. For devices that compute while their host
# continues.


_KEYS = 1024
"""Tokens of each request, if the pool holds them all: micro-batches save part of the reading of these tokens."""
_ROUNDS = 10
"""Tokens that each request gets in a trial."""
_GAIN = 0.97
"""Several micro-batches are used only if they take at most this share of the time of one."""


def try_micro_batches(runner: ModelRunner, pool: DevicePool, parallel: Parallel, *, always: bool = False) -> None:
    """Sets in the runner's ``info`` the number of micro-batches and the least number of requests for them; called by all ranks
    together.

    Args:
        runner: Runs this rank's part of the model, with one micro-batch for each stage.
        pool: Its keys and values, which are overwritten.
        parallel: The groups.
        always: Whether to use micro-batches even if they do not pay.
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
        # All ranks use the slowest rank's seconds, so that all choose the same.
        one, several = map(max, zip(*parallel.exchange((one, several), tuple[float, float]), strict=True))
        said.append(f"{size} requests: {1e3 * one:.2f} ms, {1e3 * several:.2f} ms")
        if several > _GAIN * one and not always:
            break
        chosen, size = size, size // 2
    choice = f"{stages} at once from {chosen} requests on" if chosen else "one at a time: more at once take as long"
    logger.info(
        "pipeline: steps of decodes: %s (a token of each by one, and by %d: %s)", choice, stages, "; ".join(said)
    )
    micro_batches = {"micro_batches_from": chosen} if chosen else {"micro_batches": 1}
    runner.info = msgspec.structs.replace(info, **micro_batches)


class DecodeTrial:
    """Decodes of dummy requests, one token after another; all ranks launch the same steps.

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
            shares: Into how many steps each round is divided.
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
