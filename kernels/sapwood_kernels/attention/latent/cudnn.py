"""Whether cuDNN computes attention with values of another size than keys, which torch's flash attention does not."""

from __future__ import annotations

import logging
from functools import cache

import torch
import torch.nn.functional as F

logger = logging.getLogger(__name__)


@cache
def takes_narrow(device: torch.device, dtype: torch.dtype, heads: int, dim: int, value_dim: int, tokens: int) -> bool:
    """Tries it with a prompt of this many tokens, as they come from ``LatentHeads.expand``: values between the keys' parts."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    query, key = (torch.zeros(tokens, heads, dim, dtype=dtype, device=device) for _ in range(2))
    value = torch.zeros(tokens, heads, 2 * value_dim, dtype=dtype, device=device)[..., value_dim:]
    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            q, k, v = (each.transpose(0, 1)[None] for each in (query, key, value))
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
    except RuntimeError as reason:
        logger.info("values of prompts are filled up to the size of keys: %s", reason)
        return False
    return True
