"""What layers can be rounded to, as compressed-tensors describes and stores it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from sapwood_worker.model.quantizer.gptq import round_by_importance, round_groups

SchemeName = Literal["int4", "int8", "float8"]
_WORD, _BITS = 32, 4
_INT8, _FLOAT8 = 127.0, 448.0


@dataclass(frozen=True, slots=True)
class Rounded:
    """A rounded weight.

    Attributes:
        tensors: As a checkpoint stores it, by what follows the layer's name; rows can be cut out of each but ``weight_shape``.
        numbers: What they stand for, float32 [N, K].
    """

    tensors: dict[str, Tensor]
    numbers: Tensor


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way to store layers.

    Attributes:
        format: compressed-tensors' name of it.
        weights: Its description of the weights.
        activations: That of the activations; None: they stay as they are.
        group: Inputs that share a scale; None: all of them.
        round: Rounds a weight [N, K] with scales of a dtype, by the second moments [K, K] of its inputs, if they are known.
    """

    format: str
    weights: dict[str, Any]
    activations: dict[str, Any] | None
    group: int | None
    round: Callable[[Tensor, Tensor | None, torch.dtype], Rounded]

    def fits(self, columns: int) -> bool:
        """Whether layers of so many inputs can be stored so."""
        return self.group is None or columns % self.group == 0

    def configuration(self, ignored: list[str]) -> dict[str, Any]:
        """``quantization_config`` of a checkpoint whose other linear layers are stored so."""
        group = {
            "targets": ["Linear"],
            "weights": self.weights,
            "input_activations": self.activations,
            "output_activations": None,
            "format": self.format,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": self.format,
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "kv_cache_scheme": None,
            "config_groups": {"group_0": group},
            "ignore": ignored,
        }


def scheme(name: SchemeName, group: int = 128) -> Scheme:
    """The scheme of a name; ``group`` is of int4."""
    if name == "int4":
        weights = _described(_BITS, "int", "group") | {"group_size": group}

        def four_bits(weight: Tensor, moments: Tensor | None, dtype: torch.dtype) -> Rounded:
            return _int4(weight, moments, dtype, group)

        return Scheme("pack-quantized", weights, None, group, four_bits)
    kind, largest, dtype = ("int", _INT8, torch.int8) if name == "int8" else ("float", _FLOAT8, torch.float8_e4m3fn)
    activations = _described(8, kind, "token") | {"dynamic": True, "observer": None}

    def eight_bits(weight: Tensor, moments: Tensor | None, scales_dtype: torch.dtype) -> Rounded:
        return _by_row(weight, scales_dtype, largest, dtype)

    written = "int-quantized" if name == "int8" else "float-quantized"
    return Scheme(written, _described(8, kind, "channel"), activations, None, eight_bits)


def _described(bits: int, kind: str, strategy: str) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": strategy,
        "group_size": None,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }


def _int4(weight: Tensor, moments: Tensor | None, dtype: torch.dtype, group: int) -> Rounded:
    codes, scales = (
        round_groups(weight, dtype, group) if moments is None else round_by_importance(weight, moments, dtype, group)
    )
    numbers = codes.view(len(codes), -1, group) * scales.float()[..., None]
    shifts = torch.arange(0, _WORD, _BITS, dtype=torch.int32, device=codes.device)
    words = ((codes.int() + 8).view(len(codes), -1, _WORD // _BITS) << shifts).sum(-1, dtype=torch.int32)
    tensors = {"weight_packed": words, "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    return Rounded(tensors, numbers.view(weight.shape))


def _by_row(weight: Tensor, scales_dtype: torch.dtype, largest: float, dtype: torch.dtype) -> Rounded:
    scales = (weight.abs().amax(1, keepdim=True) / largest).clamp_(min=1e-6).to(scales_dtype)
    parts = weight / scales.float()
    codes = (parts.round() if dtype == torch.int8 else parts).clamp_(-largest, largest).to(dtype)
    return Rounded({"weight": codes, "weight_scale": scales}, codes.float() * scales.float())
