"""Weights of a GGUF file: dequantised, or the blocks as they are stored.

Tensor names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. GGUF stores Gemma norms as the factor itself (1 + w),
and the query and key rows of Llama in interleaved rotary order, which is undone here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import gguf
import torch
from torch import Tensor

from sapwood_common.models.gguf_file import GgufError, GgufFile, GgufTensor
from sapwood_worker.model.checkpoint.gguf_numbers import dequantize_into, type_name, unreadable
from sapwood_worker.model.checkpoint.place import places
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.families.fused import FusedRows
from sapwood_worker.model.families.gguf_values import ROPE_TENSORS
from sapwood_worker.model.weight_slot import StoredTensor, WeightSlot

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)")
_MATRIX = 2


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
        self._interleaved = family.gguf_interleaves
        self._mapped: Tensor | None = None
        self._found = {
            ours: part
            for name, tensor in file.tensors.items()
            if name not in ROPE_TENSORS
            for ours, part in self._parts(_canonical(name, family.gguf_names), tensor, family.fused(config))
        }

    def _parts(self, name: str, tensor: GgufTensor, fused: FusedRows) -> Iterator[tuple[str, GgufTensor]]:
        """A tensor, or the rows of each of the projections that it holds."""
        for ours, place in places(name, self._file.path, tensor.name, fused):
            part = place.part(tensor.shape)
            if part is None:
                yield ours, tensor
                continue
            _, rows = part
            width = math.prod(tensor.shape[1:])
            try:
                per_block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.type)]
            except (ValueError, KeyError) as error:
                raise unreadable(self._file, tensor, error) from error
            offset = tensor.offset + rows.start * width // per_block * block_bytes
            yield ours, replace(tensor, shape=(rows.size, *tensor.shape[1:]), offset=offset)

    def tensors(self) -> dict[str, StoredTensor]:
        return {
            name: StoredTensor(
                tensor.shape,
                type_name(tensor),
                blocks=partial(self._blocks, name) if len(tensor.shape) == _MATRIX else None,
            )
            for name, tensor in self._found.items()
        }

    def where(self, name: str) -> str:
        tensor = self._found.get(name)
        return f"{self._file.path}: {tensor.name}" if tensor is not None else str(self._file.path)

    def read_into(self, name: str, slot: WeightSlot) -> None:
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
            per_block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.type)]
            width = columns // per_block * block_bytes
            end = tensor.offset + len(self._file.data(tensor, rows * width))
        except (ValueError, KeyError, GgufError) as error:
            raise unreadable(self._file, tensor, error) from error
        if self._mapped is None:
            size = self._file.path.stat().st_size
            # Pages of a private mapping are the file's own, shared by all who map it, as long as nobody writes to them.
            self._mapped = torch.from_file(str(self._file.path), shared=False, size=size, dtype=torch.uint8)
        blocks = self._mapped[tensor.offset : end].view(rows, width)
        return self._halves(blocks) if self._is_interleaved(name) else blocks

    def _is_interleaved(self, name: str) -> bool:
        return self._interleaved and (".q_proj." in name or ".k_proj." in name)

    def _halves(self, rows: Tensor) -> Tensor:
        """The file has the rows of pairs side by side, [heads, D / 2, 2, ...]; we want first halves, then second halves."""
        pairs = rows.view(-1, self._config.head_dim // 2, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape)


def _canonical(stored: str, names: Mapping[str, str]) -> str:
    match = _NAME.fullmatch(stored)
    if match is None:
        return stored
    block, part, kind = match.groups()
    if block is None:
        return f"{_TOP[part]}.{kind}" if part in _TOP else stored
    ours = {**_BLOCK, **names}.get(part)
    return f"model.layers.{block}.{ours}.{kind}" if ours is not None else stored
