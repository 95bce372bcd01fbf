"""Rounding to 4 bits with a scale for each group of inputs: to the nearest, or so that a layer's outputs change least.

Source of the second: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022.
Columns are rounded one after another; the error of each is spread over those to come, as the second moments of the inputs say.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    """The numbers by which outputs change least; arguments and result as of :func:`round_groups`.

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
