"""A model's adapters: read into the host's memory, put into the device's slots, and computed for the rows that have one.

Invariants: an adapter is kept by all ranks or by none. A slot's matrices change only in the device's queue, between the steps
that use them. In a step without adapters' rows no layer does anything; in another, layers do nothing that no adapter in a slot
was made for.

Reading is O(bytes of the file); putting into a slot is one copy for each decoder layer, which goes on while the step computes
the layers before it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sapwood_common import errors
from sapwood_common.errors import InternalError, InvalidArgumentError, ResourceExhaustedError, SapwoodError
from sapwood_kernels.lora.layout import NONE, IntArray, LoraPlace
from sapwood_kernels.lora.slots import GraphRows
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.families.decoder import DecoderModel
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.layers.linear import Linear
from sapwood_worker.model.layers.lora_layer import LoraBatch, LoraLayer
from sapwood_worker.model.lora.adapter import FIELD, Adapter, Limits, Pair, refused
from sapwood_worker.model.lora.gguf_adapter import read_gguf_adapter
from sapwood_worker.model.lora.peft import ends, read_peft
from sapwood_worker.model.pools.host_pool import available_memory
from sapwood_worker.records.lora import Lora, LoraFacts, LoraLoad

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_BARE = "model."
"""How names of modules begin here, and in adapters that were trained on a model without a head do not."""
_REFUSED = {
    "kv_b_proj": "it is folded into the attention's products",
    ".experts.": "only adapters of attention, MLPs and shared experts are; train without experts",
    "embed_tokens": "adapters of embeddings are not; train without",
    "lm_head": "adapters of the output head are not; train without",
    "norm": "a norm is no linear module",
}


class _Told(NamedTuple):
    """What a rank tells the others of an adapter that it was to read.

    Attributes:
        error: The class of the error with which it could not; empty: it could.
        why: The error's text.
        digest: Of what it has read.
        size: Bytes of its part.
    """

    error: str
    why: str
    digest: bytes
    size: int


@dataclass(frozen=True, slots=True)
class _Site:
    """A linear layer that adapters may be for.

    Attributes:
        linear: The layer.
        layer: The place of its decoder layer among this rank's.
        place: Where its matrices lie in the slots.
    """

    linear: Linear
    layer: int
    place: LoraPlace


@dataclass(frozen=True, slots=True)
class _Held:
    """An adapter on the host.

    Attributes:
        rank: The rank for which its matrices are packed.
        layers: For each decoder layer of this rank, its matrices as a slot holds them.
        touched: The sites that they are for.
    """

    rank: int
    layers: Sequence[Tensor]
    touched: frozenset[int]


class LoraStore:
    """Adapters for one model, or for a rank's part of it.

    Args:
        model: The model, whose linear layers will add adapters' products.
        family: Its family.
        ops: The device's operations.
        dtype: The dtype of weights and activations.
        slots: How many adapters the device holds.
        rank: The largest rank of an adapter.
        parallel: The ranks that the model is split over.

    Attributes:
        slots, rank: The arguments.
        batch: The batch that is being computed; its ``applied`` tells whether adapters were.
        key: The sites that adapters in slots have matrices for; it grows, and graphs are captured for each value.

    Raises:
        ResourceExhaustedError: The slots need more memory than the device has.
    """

    def __init__(
        self,
        model: DecoderModel,
        family: ModelFamily,
        ops: DeviceOps,
        dtype: torch.dtype,
        *,
        slots: int,
        rank: int,
        parallel: Parallel,
    ) -> None:
        self.slots, self.rank = slots, rank
        self.batch, self.key = LoraBatch(), frozenset[int]()
        self._family, self._config, self._dtype, self._ops = family, model.config, dtype, ops
        self._notes, self._tp = parallel.notes, parallel.tp
        self._adapters: dict[int, _Held] = {}
        self._sites: list[_Site] = []
        self._own = list(model.own)
        self._slots = ops.lora_slots(slots, -(-rank // ops.lora_multiple) * ops.lora_multiple, dtype)
        for number, layer in enumerate(model.layers):
            linears = [each for each in layer.modules() if isinstance(each, Linear)]
            cells = sum(len(each.shape.parts) * each.shape.columns.size + each.shape.rows for each in linears)
            memory = self._slots.add_layer(cells)
            offset = 0
            for linear in linears:
                sizes = tuple(part.rows.size for part in linear.shape.parts)
                place = LoraPlace(memory, offset, sizes, linear.shape.columns.size)
                linear.lora = LoraLayer(
                    place, self._slots.products, self.batch, partial(self._slots.await_layer, number)
                )
                self._sites.append(_Site(linear, number, place))
                offset += place.cells
        self._cells = [0] * len(model.layers)
        for site in self._sites:
            self._cells[site.layer] += site.place.cells
        # Where a projection lies in several parts of a stored tensor, adapters of that tensor are not served.
        self._fused = family.fused(model.config) if family.groups(model.config) == 1 else {}
        self._limits = self._find_limits(model)

    def _find_limits(self, model: DecoderModel) -> Limits:
        modules: dict[str, tuple[int, int]] = {}
        for site in self._sites:
            columns = site.linear.shape.columns.total
            for part in site.linear.shape.parts:
                modules[part.name] = part.rows.total, columns
        for whole, parts in self._fused.items():
            for index in self._own:
                names = [f"model.layers.{index}.{part}" for part in parts]
                if all(name in modules for name in names):
                    modules[f"model.layers.{index}.{whole}"] = sum(parts.values()), modules[names[0]][1]
        elsewhere = tuple(each for each in model.elsewhere if each.startswith("model.layers."))
        sparse = model.config.sparse
        routers = {} if sparse is None else {f"{sparse.block}.{sparse.router}": "it chooses experts; train without"}
        return Limits(self.rank, modules, elsewhere, _REFUSED | routers)

    @property
    def modules(self) -> Mapping[str, tuple[int, int]]:
        """The modules that adapters may be for: their outputs and inputs."""
        return self._limits.modules

    # Reading, in any thread.

    def read(self, lora: Lora) -> LoraFacts:
        """Reads an adapter on all ranks; see :meth:`sapwood_worker.core.loaded_runner.LoadedRunner.read_lora`."""
        facts = LoraFacts(lora.number, b"", 0, (), 0)
        failed: Exception | None = None
        try:
            with torch.inference_mode():
                held, facts = self._read(lora)
            # Before the others know that it is there: a step with it may come at once.
            self._adapters[lora.number] = held
            own = _Told("", "", facts.digest, facts.bytes)
        except Exception as error:  # the other ranks wait for what this one has to tell
            failed = error
            if isinstance(error, MemoryError | torch.OutOfMemoryError):
                failed = ResourceExhaustedError(f"there is no memory for adapter {lora.name}")
            own = _Told(type(failed).__name__, str(failed), b"", 0)
        try:
            ranks = self._notes.exchange(f"adapter {lora.number}", own, _Told)
            if failed is not None:
                raise failed
            _assure_alike(lora, ranks, own)
        except BaseException:
            self.drop(lora.number)
            raise
        total = sum(each.size for each in ranks)
        logger.info("adapter %s: rank %d, %.1f MB, %s", lora.name, facts.rank, total / 1e6, ", ".join(facts.modules))
        return LoraFacts(lora.number, facts.digest, facts.rank, facts.modules, total)

    def drop(self, number: int) -> None:
        """Forgets an adapter; nothing happens if it was not read."""
        self._adapters.pop(number, None)

    def _read(self, lora: Lora) -> tuple[_Held, LoraFacts]:
        path = Path(lora.path)
        if path.is_dir():
            adapter = read_peft(path, self._limits, self._canonical)
        elif path.suffix == ".gguf":
            adapter = read_gguf_adapter(path, self._limits, self._family, self._config)
        else:
            raise refused(path, "is no folder with an adapter in PEFT's format, nor a .gguf file")
        self._check_complete(adapter)
        largest = max(pair.rank for pair in adapter.pairs.values())
        multiple = self._ops.lora_multiple
        rank = -(-largest // multiple) * multiple
        size = rank * sum(self._cells) * self._dtype.itemsize
        if size > (available_memory() or size):
            raise ResourceExhaustedError(f"adapter {lora.name} takes {size / 1e6:.0f} MB of memory, which are not free")
        layers = [self._slots.host(rank * cells) for cells in self._cells]
        touched = self._pack(adapter, rank, layers)
        named = {match[2] for module in adapter.pairs if (match := _LAYER.fullmatch(module))}
        facts = LoraFacts(lora.number, adapter.digest, largest, tuple(sorted(named)), size)
        return _Held(rank, layers, touched), facts

    def _canonical(self, module: str) -> str:
        """A module's name as the model has it."""
        prefixes = self._family.prefixes
        prefix = next((each for each in prefixes if module.startswith(each)), None)
        if prefix is not None:
            return prefixes[prefix] + module.removeprefix(prefix)
        return f"{_BARE}{module}" if module.startswith("layers.") else module

    def _check_complete(self, adapter: Adapter) -> None:
        """Raises InvalidArgumentError if a module lacks matrices that the adapter's configuration says it has."""
        if not adapter.wanted:
            return
        replaced = {part for parts in self._fused.values() for part in parts}
        for module in self._limits.modules:
            match = _LAYER.fullmatch(module)
            assert match is not None, "linear layers are inside decoder layers"
            if match[2] in replaced or (adapter.layers is not None and int(match[1]) not in adapter.layers):
                continue
            if ends(module, adapter.wanted) and not ends(module, adapter.excluded) and module not in adapter.pairs:
                raise refused(adapter.where, f"tensor {module}.lora_A.weight is missing: target_modules names it")

    def _pack(self, adapter: Adapter, rank: int, layers: Sequence[Tensor]) -> frozenset[int]:
        """Writes an adapter's matrices, this rank's parts of them, as slots hold them; returns the sites that it is for."""
        parts = dict(self._parts(adapter))
        touched = set()
        for number, site in enumerate(self._sites):
            place = LoraPlace([layers[site.layer]], site.place.offset, site.place.parts, site.place.columns)
            a, b = place.matrices(0, rank)
            columns, first = site.linear.shape.columns.slice, 0
            for at, part in enumerate(site.linear.shape.parts):
                size = part.rows.size
                if part.name in parts:
                    pair, start = parts[part.name]
                    touched.add(number)
                    rows = slice(start + part.rows.start, start + part.rows.start + size)
                    a[at * rank : at * rank + pair.rank] = pair.a[:, columns]
                    b[first : first + size, : pair.rank] = pair.b[rows].float() * pair.scale
                    packed = a[at * rank : at * rank + pair.rank], b[first : first + size, : pair.rank]
                    if not all(bool(torch.isfinite(each).all()) for each in packed):
                        said = f"times its scale, {pair.scale:.3g}, has numbers that {self._dtype} does not hold"
                        raise refused(adapter.where, f"tensor {pair.tensors[1]} {said}")
                first += size
        return frozenset(touched)

    def _parts(self, adapter: Adapter) -> Iterator[tuple[str, tuple[Pair, int]]]:
        """By the name of a projection its matrices, and where its outputs begin in B: those of a fused one are cut."""
        for module, pair in adapter.pairs.items():
            match = _LAYER.fullmatch(module)
            fused = self._fused.get(match[2]) if match else None
            if fused is None or match is None:
                yield module, (pair, 0)
                continue
            start = 0
            for part, size in fused.items():
                yield f"model.layers.{match[1]}.{part}", (pair, start)
                start += size

    # Slots and batches, in the thread that launches steps.

    def load(self, loads: Sequence[LoraLoad]) -> None:
        """Puts adapters into slots, for the steps that are launched from now on."""
        held = [(load.slot, self._adapters[load.number]) for load in loads]
        self._slots.load([(slot, each.rank, each.layers) for slot, each in held])
        self.touch(self.key.union(*(each.touched for _, each in held)))

    def touch(self, sites: frozenset[int] | None) -> None:
        """Has layers compute that adapters in slots have matrices for.

        Args:
            sites: Their numbers; None: all.
        """
        self.key = frozenset(range(len(self._sites))) if sites is None else sites
        for number, site in enumerate(self._sites):
            assert site.linear.lora is not None
            site.linear.lora.touched = number in self.key

    @contextmanager
    def computing(self, slots: IntArray) -> Iterator[None]:
        """Within the block, layers add the adapters' products for the rows of a batch.

        Args:
            slots: int64 [T]: each row's slot, -1 without an adapter.
        """
        count = int(np.count_nonzero(slots != NONE))
        if count:
            self._slots.begin(slots)
        with self._with_rows(count):
            yield
        self._slots.await_all()

    def await_loads(self) -> None:
        """Has the device's queue wait until all adapters are in their slots."""
        self._slots.await_all()

    def graph_rows(self, count: int) -> GraphRows:
        """The rows of a batch to capture, of so many rows."""
        return self._slots.graph_rows(count)

    @contextmanager
    def capturing(self, rows: GraphRows) -> Iterator[None]:
        """Within the block, layers add adapters' products for the rows of a batch that is captured."""
        self._slots.begin_captured(rows)
        applied = self.batch.applied
        with self._with_rows(rows.count):
            yield
        self.batch.applied = applied

    def replay(self, rows: GraphRows, slots: IntArray) -> None:
        """Readies a captured batch for its replay: its rows' slots, and the matrices that are on their way."""
        rows.set(slots)
        self._slots.await_all()
        self.batch.applied += int(np.count_nonzero(slots != NONE)) * len(self.key)

    @contextmanager
    def _with_rows(self, count: int) -> Iterator[None]:
        overlap = self._tp.overlap if count else None
        self.batch.rows = count
        if overlap is not None:
            overlap.whole = True
        try:
            yield
        finally:
            self.batch.rows = 0
            if overlap is not None:
                overlap.whole = False


def _assure_alike(lora: Lora, ranks: Sequence[_Told], own: _Told) -> None:
    """Raises an error if a rank has not read an adapter, or has read another one."""
    for rank, each in enumerate(ranks):
        if each.error:
            kind = getattr(errors, each.error, InternalError)
            kind = kind if issubclass(kind, SapwoodError) else InternalError
            raise kind(f"rank {rank}: {each.why}", field=FIELD if kind is InvalidArgumentError else None)
        if each.digest != own.digest:
            raise refused(lora.path, f"rank {rank} has read other bytes than this rank")
