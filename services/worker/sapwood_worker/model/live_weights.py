"""Weights that change while the model serves: staged beside those in use, checked, then exchanged between two steps.

States of an update: *staged*, bucket by bucket; *ready*, when nothing is missing and what is quantised has been; *live*. The
update that was live before is kept for a rollback, if asked. An error at any point before *live* changes nothing.

Invariants: a step computes with the weights of one update. An update is ready on all ranks or on none: they tell each other by
the store at which they have met. Tensors that are copied stay at their addresses, so captured graphs stay valid; methods that are
rebuilt are exchanged as objects, which is done only where nothing is captured.

Staging is O(bytes) in a thread beside the steps, and takes as much memory as what is staged. The exchange is O(bytes), in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import xxhash
from torch import Tensor

from sapwood_common import errors
from sapwood_common.errors import (
    ConfigError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    SapwoodError,
    UnimplementedError,
)
from sapwood_worker.model import released_memory
from sapwood_worker.model.checkpoint.safetensors_source import SafetensorsSource, checkpoint_files
from sapwood_worker.model.checkpoint.weights import load_weights
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.distributed.trainer_group import TrainerGroups
from sapwood_worker.model.families.decoder import DecoderModel
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.layers.layer import Layer, RebuiltLayer
from sapwood_worker.model.quantization.linear_method import LinearMethod
from sapwood_worker.model.weight_slot import WeightSlot, WeightSlots
from sapwood_worker.records.weights import WeightBucket, WeightsFacts

logger = logging.getLogger(__name__)

_FIELD = "tensors"


class _Told(NamedTuple):
    """What a rank tells the others of what it was to stage: the class and text of its error, if it has one, and how many tensors
    the bucket has."""

    error: str
    why: str
    tensors: int


@dataclass(slots=True)
class _Staged:
    """The tensors of an update.

    Attributes:
        slots: By name, the slots with the new tensors. After the exchange they hold the old ones.
        methods: By layer, the method that was built for it. After the exchange the old one.
        hashes: By name as it is stored, a hash of each tensor; only on the first rank.
        ready: Whether it may be exchanged.
        digest: Of all weights, once it is ready.
    """

    slots: WeightSlots = field(default_factory=dict)
    methods: dict[RebuiltLayer, LinearMethod] = field(default_factory=dict)
    hashes: dict[str, bytes] = field(default_factory=dict)
    ready: bool = False
    digest: bytes = b""


class LiveWeights:
    """The weights of a model, or of a rank's part of it.

    Args:
        model: The model.
        family: Its family.
        parallel: The ranks that it is split over.
        threads: Tensors read at once.
        captures: Whether graphs hold the addresses of weights.
        device: Where the model computes.
        exchanged: Called after each exchange.

    Attributes:
        digest: 16 bytes that stand for the weights in use; empty: they are those of the start.
        groups: Those that trainers lead.
    """

    def __init__(
        self,
        model: DecoderModel,
        family: ModelFamily,
        parallel: Parallel,
        *,
        threads: int,
        captures: bool,
        device: torch.device,
        exchanged: Callable[[], None] = lambda: None,
    ) -> None:
        self.digest = b""
        self._model, self._family, self._parallel = model, family, parallel
        self._threads, self._captures, self._exchanged = threads, captures, exchanged
        self._staged: dict[int, _Staged] = {}
        self._previous: _Staged | None = None
        self._first = parallel.tp.rank == 0 and parallel.pp.rank == 0
        rank = parallel.pp.rank * parallel.tp.size + parallel.tp.rank
        self.groups = TrainerGroups(rank, device)

    # Staging, in any thread, one call at a time.

    def stage(self, bucket: WeightBucket) -> WeightsFacts:
        """Reads a bucket's tensors on all ranks.

        Raises:
            InvalidArgumentError: A tensor is unknown, of another shape or type, or damaged; names it. The update is dropped.
            ResourceExhaustedError: There is no memory for it. The update is dropped.
            UnimplementedError: The model has weights that cannot be changed; names one.
        """

        def work() -> int:
            staged = self._staged.setdefault(bucket.update, _Staged())
            if not bucket.group:
                return self._stage(bucket, staged)
            with self.groups.received(bucket.group, bucket.tensors) as path:
                return self._stage(msgspec.structs.replace(bucket, path=str(path)), staged)

        self._together(bucket.update, f"weights {bucket.number}", work)
        return self._facts(self._staged[bucket.update])

    def ready(self, update: int, *, partial: bool) -> WeightsFacts:
        """Checks that an update is complete, and makes it ready on all ranks.

        Args:
            update: Its number.
            partial: Whether tensors that were not staged stay as they are; else all of the model's are needed.

        Raises:
            InvalidArgumentError: Tensors are missing; names them. The update is dropped.
            ResourceExhaustedError: There is no memory for it. The update is dropped.
        """

        def work() -> int:
            staged = self._staged.setdefault(update, _Staged())
            self._finish(staged, partial=partial)
            return 0  # stages have different numbers of tensors

        self._together(update, f"weights {update} ready", work)
        return self._facts(self._staged[update])

    def drop(self, update: int) -> None:
        """Forgets what is staged of an update; nothing happens if nothing is."""
        self._staged.pop(update, None)

    # The exchange, in the thread that launches steps, when no step is being computed.

    def exchange(self, update: int, *, keep: bool) -> None:
        """Has the model compute with an update that is ready.

        Args:
            update: Its number; 0: what :attr:`previous` keeps.
            keep: Whether to keep the present weights for a rollback.
        """
        staged = self._previous if not update else self._staged.pop(update)
        assert staged is not None and staged.ready, "it was not made ready"
        with torch.inference_mode():
            self._swap(staged)
        staged.digest, self.digest = self.digest, staged.digest
        self._previous = staged if keep else None
        self._exchanged()

    # Sleep, in the thread that launches steps, when no step is being computed.

    def release(self, folder: Path) -> int:
        """Gives the memory of weights back, and keeps what they are in a file of ``folder``. Returns how many bytes.

        Raises:
            UnimplementedError: Some are not held as they were read; names one.
            OSError: They cannot be written.
        """
        memory = self._memory()
        released_memory.write(memory, folder / f"weights-{self._parallel.tp.rank}-{self._parallel.pp.rank}")
        size = released_memory.release(memory)
        for layer in self._layers():
            layer.forget_copies()
        return size

    def restore(self, folder: Path) -> None:
        """Has the weights again. Raises OSError if the file is not there."""
        path = folder / f"weights-{self._parallel.tp.rank}-{self._parallel.pp.rank}"
        with torch.inference_mode():
            released_memory.read(self._memory(), path)
            for layer in self._layers():
                layer.finish()
        path.unlink()
        self._exchanged()

    def _memory(self) -> list[torch.UntypedStorage]:
        for layer in self._layers():
            if layer.renewal != "copy":
                raise UnimplementedError(f"{layer.weight_name} is rounded: its memory is not given back")
        return released_memory.storages(slot.target for slot in self._copied().values())

    @property
    def rolls_back(self) -> bool:
        """Whether the weights before the last update are kept."""
        return self._previous is not None

    def _together(self, update: int, note: str, work: Callable[[], int]) -> None:
        """Does something on all ranks; drops the update on all of them if one of them cannot."""
        failed: Exception | None = None
        count = 0
        try:
            with torch.inference_mode():
                count = work()
        except Exception as error:  # the other ranks wait for what this one has to tell
            failed = error
            if isinstance(error, ConfigError):
                failed = InvalidArgumentError(str(error), field=_FIELD)
            elif isinstance(error, MemoryError | torch.OutOfMemoryError):
                failed = ResourceExhaustedError("there is no memory for another copy of the weights")
            if not isinstance(failed, SapwoodError):
                logger.exception("weights were not staged")
        own = _Told("" if failed is None else type(failed).__name__, "" if failed is None else str(failed), count)
        try:
            ranks = self._parallel.notes.exchange(note, own, _Told)
            if failed is not None:
                raise failed
            _assure_alike(ranks, own)
        except BaseException:
            self.drop(update)
            raise

    def _stage(self, bucket: WeightBucket, staged: _Staged) -> int:
        if staged.ready:
            raise InvalidArgumentError("the update is complete already", field="update_id")
        if self._parallel.redundant_experts:
            raise UnimplementedError("weights of experts that move between ranks cannot be updated")
        model, config, path = self._model, self._model.config, Path(bucket.path)
        for file in checkpoint_files(path):
            if file.suffix == ".bin":
                raise InvalidArgumentError(f"{file}: pickles are not read here: give safetensors", field="path")
        source = SafetensorsSource(
            path,
            self._family,
            tied=config.tie_word_embeddings,
            skipped=tuple(f"model.layers.{config.num_layers + index}." for index in range(config.draft_layers)),
            fused=self._family.fused(config),
            groups=self._family.groups(config),
        )
        stored = source.tensors()
        if not stored:
            raise InvalidArgumentError(f"{path}: holds no tensor of the model", field="path")
        known = self._slots(staged)
        for name in stored.keys() & known.keys():
            if name in staged.slots:
                raise InvalidArgumentError(f"tensor {name} is there twice in one update", field=_FIELD)
            if known[name].filled and known[name].target.numel():
                raise UnimplementedError(f"tensor {name} is mapped from a file and cannot be changed")
        new = {name for method in staged.methods.values() for name in method.slots()}
        wanted = {name: slot if name in new else _beside(slot) for name, slot in known.items() if name in stored}
        load_weights(wanted, source, config.norm_offset, self._threads, model.elsewhere, stored=stored)
        staged.slots |= wanted
        if self._first or bucket.checksums:
            hashes = source.hashes()
            for name, given in bucket.checksums.items():
                if name not in hashes:
                    raise InvalidArgumentError(f"tensor {name} is missing", field=_FIELD)
                if hashes[name] != given:
                    raise InvalidArgumentError(
                        f"tensor {name} has checksum {hashes[name].hex()}, not {given.hex()}", field=_FIELD
                    )
            staged.hashes |= hashes
        return len(stored)

    def _slots(self, staged: _Staged) -> WeightSlots:
        """Every slot of the model: of methods that are rebuilt, those of new ones."""
        slots: WeightSlots = {}
        for layer in self._layers():
            if layer.renewal == "copy":
                slots |= layer.slots()
                continue
            if layer.renewal == "refuse" or self._captures:
                why = (
                    "its format does not allow it" if layer.renewal == "refuse" else "captured graphs hold its address"
                )
                raise UnimplementedError(f"the weights of {layer.weight_name} cannot be changed: {why}")
            assert isinstance(layer, RebuiltLayer), layer
            if layer not in staged.methods:
                staged.methods[layer] = layer.rebuilt()
            slots |= staged.methods[layer].slots()
        return slots

    def _finish(self, staged: _Staged, *, partial: bool) -> None:
        if not staged.slots:
            raise InvalidArgumentError("no tensor was given", field=_FIELD)
        missing = [] if partial else sorted(self._slots(staged).keys() - staged.slots.keys())
        for layer, method in [*staged.methods.items()]:
            names = method.slots().keys()
            if not names & staged.slots.keys():
                del staged.methods[layer]
                continue
            missing += sorted(names - staged.slots.keys())
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise InvalidArgumentError(f"tensors {', '.join(missing[:3])}{more} are missing", field=_FIELD)
        for method in staged.methods.values():
            for name in method.slots():
                del staged.slots[name]
            method.finish()
        state = xxhash.xxh3_128(self.digest if partial else b"")
        for name in sorted(staged.hashes):
            state.update(f"{name}\n".encode() + staged.hashes[name])
        staged.digest, staged.ready = state.digest(), True

    def _swap(self, staged: _Staged) -> None:
        """Exchanges what is staged with what is in use, and readies the layers."""
        for rebuilt, method in [*staged.methods.items()]:
            staged.methods[rebuilt] = rebuilt.put_method(method)
        touched = staged.slots.keys()
        slots = self._copied() if touched else {}
        for name, slot in staged.slots.items():
            live = slots[name].target
            if live.numel():
                before = live.clone()
                live.copy_(slot.target)
                slot.target.copy_(before)
        for layer in self._layers():
            # Where graphs hold addresses, products hold their weights by address, too: there is nothing to ready.
            if not self._captures and layer.renewal == "copy" and not touched.isdisjoint(layer.depends_on()):
                layer.finish()

    def _copied(self) -> WeightSlots:
        slots: WeightSlots = {}
        for layer in self._layers():
            if layer.renewal == "copy":
                slots |= layer.slots()
        return slots

    def _layers(self) -> Iterator[Layer]:
        return (each for each in self._model.modules() if isinstance(each, Layer))

    def _facts(self, staged: _Staged) -> WeightsFacts:
        size = sum(slot.target.nbytes for slot in staged.slots.values())
        return WeightsFacts(staged.digest, len(staged.hashes), size)


def _beside(slot: WeightSlot) -> WeightSlot:
    """The slot with a tensor of its own."""
    if slot.filled:  # of another rank
        return slot
    target: Tensor = torch.empty(slot.target.shape, dtype=slot.target.dtype, device=slot.target.device)
    return replace(slot, target=target)


def _assure_alike(ranks: list[_Told], own: _Told) -> None:
    """Raises an error if a rank could not stage what the others have, or has found something else."""
    for rank, each in enumerate(ranks):
        if each.error:
            kind = getattr(errors, each.error, InternalError)
            kind = kind if issubclass(kind, SapwoodError) else InternalError
            raise kind(f"rank {rank}: {each.why}", field=_FIELD if kind is InvalidArgumentError else None)
        if each.tensors != own.tensors:
            raise InvalidArgumentError(f"rank {rank} has found {each.tensors} tensors, this one {own.tensors}")
