"""The formats of weights; packages add theirs as entry points of ``GROUP``, each a ``LinearFormat``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sapwood_common.errors import ConfigError
from sapwood_common.plugins import find_part, part_names
from sapwood_kernels.ops.contracts import Gate, Norm
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.quantization.awq import AWQ
from sapwood_worker.model.quantization.bitsandbytes import BITSANDBYTES
from sapwood_worker.model.quantization.compressed import COMPRESSED
from sapwood_worker.model.quantization.dense import DenseMethod
from sapwood_worker.model.quantization.float8 import FP8, FP8_BLOCK, FP8_TENSOR
from sapwood_worker.model.quantization.fp4 import FP4
from sapwood_worker.model.quantization.gguf import GGUF
from sapwood_worker.model.quantization.gptq import GPTQ
from sapwood_worker.model.quantization.grouped import INT4
from sapwood_worker.model.quantization.int8 import INT8
from sapwood_worker.model.quantization.linear_method import (
    Fuses,
    LinearFormat,
    LinearMethod,
    LinearShape,
    Stored,
    TableMethod,
)
from sapwood_worker.model.weight_slot import StoredTensor, WeightSlots, why_no_numbers
from sapwood_worker.settings import LINEAR_METHODS as GROUP

FORMATS = {
    "none": LinearFormat(),
    "fp8": FP8,
    "fp8_block": FP8_BLOCK,
    "fp8_tensor": FP8_TENSOR,
    "int8": INT8,
    "int4": INT4,
    "gptq": GPTQ,
    "awq": AWQ,
    "compressed-tensors": COMPRESSED,
    "fp4": FP4,
    "bitsandbytes": BITSANDBYTES,
    "gguf": GGUF,
}
Keep = Callable[[LinearShape, torch.dtype, DeviceOps, Stored], LinearMethod | None]
"""Makes the method of a layer as the checkpoint stores it; None: it is in another format."""
AS_STORED = " as stored"
"""The suffix after a format's name if the checkpoint's stored weights are kept."""


class LinearMethods:
    """Gives each linear layer of a model its method: what a checkpoint stores in a known format is kept, the rest quantised.

    Args:
        quantization: Name of the format in which to quantise; ``none``: not at all.
        dtype: The dtype of activations, and of weights in no format.
        ops: The device's operations.
        stored: The checkpoint's contents; None: no stored weights are kept.
        widen: Whether formats that a checkpoint's numbers can be read from are not kept, either.
        dummy: With dummy weights, the tensors that a checkpoint would store for each linear layer; None: there is a checkpoint,
            or no format.

    Attributes:
        used: The formats that layers have; ``none``: the model's dtype.
        rounds_layers: Whether any layer was given a method that rounds it; who builds a part of a model says it of the rest.
        rounds_head: Whether an output head was given such a method.

    Raises:
        ConfigError: There is no such format, or weights cannot be quantised to it; or the checkpoint is quantised in a way that
            nothing here reads.
    """

    def __init__(
        self,
        quantization: str,
        dtype: torch.dtype,
        ops: DeviceOps,
        stored: Stored | None = None,
        *,
        widen: bool = False,
        dummy: Callable[[LinearShape], Mapping[str, StoredTensor]] | None = None,
    ) -> None:
        formats = {name: find_part(GROUP, name, FORMATS) for name in part_names(GROUP, FORMATS)}
        asked = find_part(GROUP, quantization, FORMATS)
        wanted = asked.quantise
        if wanted is None and quantization != "none":
            raise ConfigError(f"--quantization: weights are read in {quantization!r}, not quantised to it")
        self._name, self._quantise, self._quantise_head = quantization, wanted, asked.quantise_head
        if stored is not None:
            _check_scheme(stored, formats.values())
        formats = {name: each for name, each in formats.items() if not (widen and each.widens)}
        self._keep = [(name, each.keep) for name, each in formats.items() if each.keep is not None]
        experts = ((name, each.keep_expert or (None if each.widens else each.keep)) for name, each in formats.items())
        self._keep_expert = [(name, keep) for name, keep in experts if keep is not None]
        self._keep_table = [(name, each.keep_table) for name, each in formats.items() if each.keep_table is not None]
        self._dtype = dtype
        self._ops = ops
        self._dummies, self._made = dummy, dict[str, StoredTensor]()
        self._stored = stored if dummy is None or stored is None else replace(stored, tensors=self._made)
        self.used: set[str] = set()
        self.rounds_layers = self.rounds_head = False

    def method(self, shape: LinearShape) -> LinearMethod:
        """The method of a layer.

        Raises:
            ConfigError: The checkpoint stores it in a format that cannot be read; names a tensor of it.
        """
        kept = self._kept(shape)
        if kept is not None:
            return kept
        if self._stored is not None and len(shape.parts) > 1:
            parts = [replace(shape, parts=(part,)) for part in shape.parts]
            alone = [self._kept(part) for part in parts]
            if any(method is not None for method in alone):
                return JoinedMethod(
                    [self._wide(part) if method is None else method for part, method in zip(parts, alone, strict=True)]
                )
        return self._wide(shape)

    def dense(self, shape: LinearShape) -> DenseMethod:
        """Weights in the model's dtype, for every stored format, for a layer that computes with them in its own way.

        Raises:
            ConfigError: Their numbers cannot be read; names a tensor.
        """
        self._assure_wide(shape)
        return DenseMethod(shape, self._dtype, self._ops)

    def stored_expert(self, shape: LinearShape) -> LinearMethod | None:
        """The method of an expert's projections in the format that they are stored in; None: they are held otherwise.

        Raises:
            ConfigError: They are in such a format, and cannot be read; names a tensor.
        """
        return self._kept(shape, self._keep_expert)

    def unlike(self, shape: LinearShape, first: LinearShape) -> ConfigError:
        """The error that an expert's projections are not stored in the format that the first one's are; names what they lack."""
        stored = self._stored or Stored()
        for part, other in zip(shape.parts, first.parts, strict=True):
            kinds = sorted(
                name.removeprefix(other.name) for name in stored.tensors if name.startswith(f"{other.name}.")
            )
            lacking = next((kind for kind in kinds if part.name + kind not in stored.tensors), None)
            if lacking is not None:
                return stored.refusal(part.name + lacking, "the layer's first expert has one")
        return ConfigError(f"{shape.parts[0].name}: stored in another format than the layer's first expert")

    def _kept(self, shape: LinearShape, formats: Sequence[tuple[str, Keep]] | None = None) -> LinearMethod | None:
        if self._stored is None:
            return None
        if self._dummies is not None:
            self._made.update(self._dummies(shape))
        for name, keep in self._keep if formats is None else formats:
            kept = keep(shape, self._dtype, self._ops, self._stored)
            if kept is not None:
                self.used.add(name + AS_STORED)
                return kept
        return None

    def _wide(self, shape: LinearShape) -> LinearMethod:
        self._assure_wide(shape)
        return self.rounded(shape) or DenseMethod(shape, self._dtype, self._ops)

    def keeps(self, name: str, tensor: str) -> bool:
        """Whether the checkpoint stores a tensor, of experts, that only the format ``name`` has; it counts as used then."""
        found = self._stored is not None and tensor in self._stored.tensors
        if found:
            self.used.add(name + AS_STORED)
        return found

    def stores(self, module: str) -> bool:
        """Whether the checkpoint stores any tensor of a module."""
        return self._stored is not None and any(name.startswith(f"{module}.") for name in self._stored.tensors)

    def check_experts(self, names: Iterable[str]) -> None:
        """Checks that experts can be read as numbers: in float8, or in a type that can be that of the model.

        Args:
            names: Their projections.

        Raises:
            ConfigError: The checkpoint stores them in another format.
        """
        stored = self._stored or Stored()
        for name in names:
            _check_wide(name, stored)
            if f"{name}.weight" not in stored.tensors:
                return  # who loads it names all that is missing

    def rounded(self, shape: LinearShape) -> LinearMethod | None:
        """The method that quantises a weight read in the model's dtype; None: the weight stays in that dtype."""
        quantised = None if self._quantise is None else self._quantise(shape, self._dtype, self._ops)
        self.used.add("none" if quantised is None else self._name)
        self.rounds_layers |= quantised is not None
        return quantised

    def table(self, shape: LinearShape, rows: int) -> TableMethod:
        """The method of a table with a row for each token: as the checkpoint stores it, or in the model's dtype.

        Args:
            shape: The table's, or that of a rank's part.
            rows: Rows of every rank's part; what ``shape`` has less is zeros.
        """
        return self._kept_table(shape, rows) or self._wide_table(shape, rows)

    def head(self, shape: LinearShape, rows: int) -> LinearMethod:
        """The method of an output head that is no table of tokens as well; asked for after all layers'.

        It is rounded if the format that was asked for rounds heads, and rounded any of the layers.

        Args:
            shape, rows: See :meth:`table`.
        """
        kept = self._kept_table(shape, rows)
        if kept is None and self._quantised_head(shape, rows):
            return self._kept(shape) or self._wide_table(shape, rows)
        if kept is not None or self._quantise_head is None or not self.rounds_layers:
            return kept or self._wide_table(shape, rows)
        self._assure_wide(shape)
        self.rounds_head = True
        return self._quantise_head(shape, rows, self._dtype, self._ops)

    def _quantised_head(self, shape: LinearShape, rows: int) -> bool:
        """Whether a head is stored in packed codes, as no embedding table is; ``rows`` are the rows of every rank's part."""
        name, tensors = shape.parts[0].name, (self._stored or Stored()).tensors
        if rows != shape.rows:
            return False
        if f"{name}.weight" in tensors:
            return bool(why_no_numbers(f"{name}.weight", tensors))
        return any(tensor.startswith(f"{name}.") for tensor in tensors)

    def _kept_table(self, shape: LinearShape, rows: int) -> TableMethod | None:
        if self._stored is not None and rows == shape.rows:
            for name, keep in self._keep_table:
                kept = keep(shape, self._dtype, self._ops, self._stored)
                if kept is not None:
                    self.used.add(name + AS_STORED)
                    return kept
        return None

    def _wide_table(self, shape: LinearShape, rows: int) -> TableMethod:
        self._assure_wide(shape)
        weight = torch.empty(rows, shape.columns.size, dtype=self._dtype, device=self._ops.device)
        weight[shape.rows :] = 0
        return DenseMethod(shape, self._dtype, self._ops, weight=weight, few_dtype=torch.float32)

    def _assure_wide(self, shape: LinearShape) -> None:
        if self._stored is not None:
            for part in shape.parts:
                _check_wide(part.name, self._stored)


def _check_scheme(stored: Stored, formats: Iterable[LinearFormat]) -> None:
    """Raises ConfigError if no format is for the way in which the configuration says that weights are quantised."""
    formats, method = list(formats), stored.quant_method
    if not method:  # then the tensors alone tell
        return
    reading = [each for each in formats if method in each.quant_methods]
    if not reading:
        known = ", ".join(sorted({name for each in formats for name in each.quant_methods}))
        raise stored.unknown("quant_method", method, f"weights quantised in these ways can be read: {known}")
    for each in reading:
        if each.check is not None:
            each.check(stored)


def _check_wide(module: str, stored: Stored) -> None:
    """Raises ConfigError if a module's tensors are no numbers that could be read without a format."""
    weight = stored.tensors.get(f"{module}.weight")
    others: list[str] = []
    if weight is None:  # where its scales alone are there, who loads it says that it is missing
        inside = (name for name in stored.tensors if name.startswith(f"{module}."))
        others = sorted(name for name in inside if not stored.tensors[name].scales)
    if weight is not None and (why := why_no_numbers(f"{module}.weight", stored.tensors)):
        raise stored.refusal(f"{module}.weight", why)
    if any(not name.endswith(".bias") for name in others):
        raise stored.refusal(others[0], "weights of this kind cannot be read")


# A layer whose projections are in different formats.


class JoinedMethod(LinearMethod):
    """Multiplies with each projection by itself.

    Args:
        methods: One for each projection, in the order of outputs.
    """

    def __init__(self, methods: Sequence[LinearMethod]) -> None:
        self._methods = methods

    def slots(self) -> WeightSlots:
        slots: WeightSlots = {}
        for method in self._methods:
            slots |= method.slots()
        return slots

    def finish(self) -> None:
        for method in self._methods:
            method.finish()

    def fuses(self, rows: int) -> Fuses:
        return Fuses()

    def apply(
        self,
        x: Tensor,
        *,
        norm: Norm | None = None,
        gate_before: Gate | None = None,
        gate_after: Gate | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        return torch.cat([method.apply(x) for method in self._methods], 1)
