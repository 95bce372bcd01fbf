"""Weights of a GGUF file: dequantised, or the blocks as they are stored.

Tensor names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. GGUF stores Gemma norms as the factor itself (1 + w),
and the query and key rows of Llama in interleaved rotary order, which is undone here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from sapwood_common.models.gguf_file import GgufError, GgufFile, GgufTensor
from sapwood_worker.model.checkpoint.gguf_made import made_tensors
from sapwood_worker.model.checkpoint.gguf_names import EACH, block_of, canonical, stored_name
from sapwood_worker.model.checkpoint.gguf_numbers import (
    block_size,
    dequantize_into,
    expert_of,
    slab,
    type_name,
    unreadable,
)
from sapwood_worker.model.checkpoint.place import places
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.fused import FusedRows
from sapwood_worker.model.families.gguf_values import ROPE_TENSORS
from sapwood_worker.model.weight_slot import StoredTensor, WeightSlot

_MATRIX = 2
_ROW = ".shared_expert_gate.weight"
"""How the name of a matrix of one row ends, which files have without that dimension."""


class GgufSource:
    """Implements :class:`sapwood_worker.model.checkpoint.weights.WeightSource`.

    Args:
        file: The open file; it must stay open, but not for the blocks, which are a mapping of their own.
        config: Read from the same file.
        family: The model's family.
    """

    def __init__(self, file: GgufFile, config: ModelConfig, family: ModelFamily) -> None:
        self._file = file
        self._config = config
        self._interleaved, self._names = family.gguf_interleaves, family.gguf_names
        self._mapped: dict[int, Tensor] = {}
        self._made = dict(made_tensors(file, config))
        used = {part.name for made in self._made.values() for part in made.parts}
        self._found = {
            ours: part
            for name, tensor in file.tensors.items()
            # Blocks after the model's are for drafts.
            if name not in used and name not in ROPE_TENSORS and (block_of(name) or 0) < config.num_layers
            for ours, part in self._parts(canonical(name, family.gguf_names), tensor, family.fused(config))
        }

    def _parts(self, name: str, tensor: GgufTensor, fused: FusedRows) -> Iterator[tuple[str, GgufTensor]]:
        """A tensor, or each expert's of it, or the rows of each of the projections that it holds."""
        if EACH in name:
            for expert in range(tensor.shape[0]):
                yield name.replace(EACH, str(expert)), expert_of(self._file, tensor, expert)
            return
        if name.endswith(_ROW) and len(tensor.shape) == 1:
            tensor = replace(tensor, shape=(1, *tensor.shape))
        for ours, place in places(name, self._file.path, tensor.name, fused):
            part = place.part(tensor.shape)
            if part is None:
                yield ours, tensor
                continue
            _, rows = part
            first = rows.start * math.prod(tensor.shape[1:])
            yield ours, slab(self._file, tensor, first, (rows.size, *tensor.shape[1:]))

    def tensors(self) -> dict[str, StoredTensor]:
        found = {
            name: StoredTensor(
                tensor.shape,
                type_name(tensor),
                blocks=partial(self._blocks, name) if len(tensor.shape) == _MATRIX else None,
            )
            for name, tensor in self._found.items()
        }
        return found | {name: StoredTensor(made.shape, made.dtype) for name, made in self._made.items()}

    def stored_name(self, name: str) -> str:
        return stored_name(name, self._names)

    def where(self, name: str) -> str:
        made, tensor = self._made.get(name), self._found.get(name)
        parts = made.parts if made is not None else [] if tensor is None else [tensor]
        if not parts:
            return str(self._file.path)
        return f"{self._file.paths[parts[0].part]}: {', '.join(part.name for part in parts)}"

    def read_into(self, name: str, slot: WeightSlot) -> None:
        if name in self._made:
            self._made[name].read_into(slot)
            return
        tensor, target = self._found[name], slot.target
        interleaved = self._is_interleaved(name)
        if target.dtype == torch.float32 and target.device.type == "cpu" and target.is_contiguous() and not interleaved:
            dequantize_into(self._file, tensor, target.numpy(), slot.index)
            return
        values = torch.empty(target.shape, dtype=torch.float32)
        dequantize_into(self._file, tensor, values.numpy(), slot.index)
        target.copy_(self._halves(values) if interleaved else values)

    def _blocks(self, name: str) -> Tensor:
        tensor = self._found[name]
        rows, columns = tensor.shape
        try:
            per_block, block_bytes = block_size(self._file, tensor)
            width = columns // per_block * block_bytes
            end = tensor.offset + len(self._file.data(tensor, rows * width))
        except GgufError as error:
            raise unreadable(self._file, tensor, error) from error
        if tensor.part not in self._mapped:
            path = self._file.paths[tensor.part]
            # Pages of a private mapping are the file's own, shared by all who map it, as long as nobody writes to them.
            self._mapped[tensor.part] = torch.from_file(
                str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8
            )
        blocks = self._mapped[tensor.part][tensor.offset : end].view(rows, width)
        return self._halves(blocks) if self._is_interleaved(name) else blocks

    def _is_interleaved(self, name: str) -> bool:
        return self._interleaved and (".q_proj." in name or ".k_proj." in name)

    def _halves(self, rows: Tensor) -> Tensor:
        """The file has the rows of pairs side by side, [heads, D / 2, 2, ...]; we want first halves, then second halves."""
        pairs = rows.view(-1, self._config.head_dim // 2, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape)
