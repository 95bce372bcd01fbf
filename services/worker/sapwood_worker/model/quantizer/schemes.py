"""The formats that a checkpoint can be written in, GPTQ's rounding among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

# Rounding to 4 bits with a scale for each group of inputs: to the nearest, or so that a layer's outputs change least.
#
# Source of the second: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
# Transformers", 2022. Columns are rounded one after another; the error of each is spread over those to come, as the
# second moments of the inputs say.


_LEAST, _MOST = -8, 7
_DAMPING = 0.01
"""Share of the mean moment that is added to each, so that the matrix can be inverted."""


def round_groups(weight: Tensor, dtype: torch.dtype, group: int) -> tuple[Tensor, Tensor]:
    """The nearest numbers.

    Args:
        weight: float32 [N, K].
        dtype: The scales' dtype.
        group: Inputs that share a scale; divides K.

    Returns:
        Codes from -8 to 7, float32 [N, K], and scales [N, K / group].
    """
    parts = weight.view(len(weight), -1, group)
    scales = _scales(parts, dtype)
    return _codes(parts, scales[..., None]).view(weight.shape), scales


def round_by_importance(weight: Tensor, moments: Tensor, dtype: torch.dtype, group: int) -> tuple[Tensor, Tensor]:
    """The quantised values that change outputs least; arguments and result are those of :func:`round_groups`.

    Args:
        weight: float32 [N, K].
        moments: The inputs' second moments, [K, K], times any factor.
        dtype: The scales' dtype.
        group: Inputs that share a scale; divides K.
    """
    moments = moments.double()
    diagonal = moments.diagonal()
    unseen = diagonal == 0
    moments = moments + torch.diag(diagonal.mean() * _DAMPING + unseen.double())
    # Rows of the upper factor of the inverse: how an error of a column is made up for by those after it.
    spread = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(moments)), upper=True).float()
    left = weight.clone()
    codes, scales = torch.empty_like(weight), []
    for first in range(0, weight.shape[1], group):
        block = slice(first, first + group)
        scale = _scales(left[:, block], dtype)
        scales.append(scale)
        errors = torch.empty_like(left[:, block])
        for column in range(first, first + group):
            values = left[:, column]
            codes[:, column] = _codes(values, scale)
            error = (values - codes[:, column] * scale.float()) / spread[column, column]
            left[:, column : block.stop] -= error[:, None] * spread[column, column : block.stop]
            errors[:, column - first] = error
        left[:, block.stop :] -= errors @ spread[block, block.stop :]
    return codes, torch.stack(scales, 1)


def _scales(parts: Tensor, dtype: torch.dtype) -> Tensor:
    return (parts.abs().amax(-1) * 2 / (_MOST - _LEAST)).clamp_(min=1e-6).to(dtype)


def _codes(values: Tensor, scales: Tensor) -> Tensor:
    return (values / scales.float()).round_().clamp_(_LEAST, _MOST)


SchemeName = Literal["int4", "int8", "float8"]
_WORD, _BITS = 32, 4
_INT8, _FLOAT8 = 127.0, 448.0


@dataclass(frozen=True, slots=True)
class Rounded:
    """A rounded weight.

    Attributes:
        tensors: As a checkpoint stores it, by what follows the layer's name; rows can be cut out of each but ``weight_shape``.
        numbers: The values that the codes stand for, float32 [N, K].
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
        """Whether the scheme can store layers with this many inputs."""
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
