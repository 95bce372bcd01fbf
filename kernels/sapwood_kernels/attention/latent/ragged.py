"""Attention of several requests over keys that lie one request after the other, in one launch: torch's flash attention.

torch's public function takes requests of one length at a time; a launch each takes the host longer than a short prompt's takes a
GPU, and fills it with one prompt's heads only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sapwood_kernels.ops.device import DeviceOps

_MOST_DIM = 256
"""Numbers of a head that torch's flash attention takes at most."""


@dataclass(frozen=True, slots=True)
class Ragged:
    """Where B requests' tokens and keys are.

    Attributes:
        queries: int32 [B + 1] on the device: where each request's tokens begin, and where the last one's end.
        keys: int32 [B + 1]: the same of keys; a request's tokens are the last of them.
        most_queries, most_keys: The most that a request has.
    """

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int

    @classmethod
    def of(cls, queries: Sequence[int], keys: Sequence[int], ops: DeviceOps) -> Ragged:
        """Of this many tokens and keys of each request."""
        starts = np.zeros((2, len(keys) + 1), np.int32)
        np.cumsum((queries, keys), axis=1, out=starts[:, 1:])
        of_queries, of_keys = ops.to_device(starts)
        return cls(of_queries, of_keys, max(queries), max(keys))


def serves(query: Tensor) -> bool:
    """Whether queries [T, H, D] can be attended so."""
    if not query.is_cuda or torch.version.cuda is None or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    dim, able = query.shape[2], torch.cuda.get_device_capability(query.device) >= (8, 0)
    return able and dim % 8 == 0 and dim <= _MOST_DIM


def ragged_attention(query: Tensor, key: Tensor, value: Tensor, at: Ragged, scale: float) -> Tensor:
    """Causal attention of each request's last tokens over its keys.

    Args:
        query: [T, H, D], of a kind that is served (:func:`serves`).
        key, value: [M, H, D].
        at: Which of them are whose.
        scale: Factor of the scores.

    Returns:
        [T, H, D].
    """
    # A causal mask is aligned to the last key, as in flash attention from version 2.1 on.
    found: Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, at.queries, at.keys, at.most_queries, at.most_keys, 0.0, True, False, scale=scale
    )[0]
    return found
