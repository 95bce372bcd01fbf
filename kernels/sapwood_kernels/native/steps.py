"""What a decoder does between its products, on a CPU in float32: ``steps.c``. Definitions: ``reference.py``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood_kernels.native.library import NativeLibrary

LANES = 16
"""Numbers of the widest vector: heads are a multiple of it."""


def norm(library: NativeLibrary, weight: Tensor, eps: float) -> Callable[[Tensor], Tensor]:
    """Computes ``reference.rms_norm`` of float32 [..., N] by a contiguous weight [N]."""
    width = weight.shape[0]

    def apply(x: Tensor) -> Tensor:
        x = x.contiguous()
        result = torch.empty_like(x)
        library.norm(
            *(x.data_ptr(), x.numel() // width, width, width, weight.data_ptr(), eps, result.data_ptr()),
            *(library.run, torch.get_num_threads()),
        )
        return result

    return apply


class _Heads(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim", "page_size")),
        *((name, ctypes.c_void_p) for name in ("query_weight", "key_weight")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("page_stride", "slot_stride", "head_stride")),
    )


class StoreHeads:
    """Norms and rotates query and key heads, whose halves are turned together, and writes keys and values to the cache.

    Args:
        library: The library.
        heads: Query heads: H.
        kv_heads: Key heads: K.
        norm: The weights of a query head's and of a key head's norm, contiguous float32 [D] each, and eps; None: no norm.
    """

    def __init__(
        self, library: NativeLibrary, heads: int, kv_heads: int, norm: tuple[Tensor, Tensor, float] | None
    ) -> None:
        self._library = library
        self._heads, self._kv_heads, self._norm = heads, kv_heads, norm
        # Where the latest keys and values were, which are a layer's own: always the same ones.
        self._places: tuple[object, ...] = ()
        self._layer: _Heads

    def __call__(self, qkv: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> Tensor:
        """Stores a step's keys and values.

        Args:
            qkv: float32 [T, (H + 2K) * D], contiguous.
            cos: float32 [T, 1, D], contiguous, as ``reference.rope`` has it.
            sin: The same.
            keys: float32 [P, page size, K, D] in any order but for D, mutated.
            values: The same, in the same order.
            slots: int64 [T], contiguous.

        Returns:
            The query heads [T, H, D].
        """
        places = keys.data_ptr(), values.data_ptr(), keys.shape, keys.stride()
        if places != self._places:
            self._places, self._layer = places, self._describe(keys, values)
        query = torch.empty(len(qkv), self._heads, keys.shape[3])
        self._library.store_heads(
            *(
                ctypes.addressof(self._layer),
                qkv.data_ptr(),
                cos.data_ptr(),
                sin.data_ptr(),
                slots.data_ptr(),
                len(qkv),
            ),
            *(query.data_ptr(), self._library.run, torch.get_num_threads()),
        )
        return query

    def _describe(self, keys: Tensor, values: Tensor) -> _Heads:
        query_weight, key_weight, eps = (None, None, 0.0) if self._norm is None else self._norm
        pointers = (None if each is None else each.data_ptr() for each in (query_weight, key_weight))
        return _Heads(
            *(self._heads, self._kv_heads, keys.shape[3], keys.shape[1], *pointers, eps),
            *(keys.data_ptr(), values.data_ptr(), *keys.stride()[:3]),
        )


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("page_stride", "slot_stride", "head_stride")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim", "page_size", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        ("sinks", ctypes.c_void_p),
        ("chunked", ctypes.c_int64),
    )


class DecodeAttention:
    """Attention of one token of each request over its cached keys and values.

    Args:
        library: The library.
        keys: float32 [P, page size, K, D] in any order but for D, which is a multiple of :data:`LANES`.
        values: The same, in the same order.
        heads: Query heads.
        scale: Factor of the products.
        window: Keys that a token sees; None: all.
        chunked: Whether these are the ones from the latest multiple of ``window`` on.
        softcap: Products become ``softcap * tanh(product / softcap)``; None: they stay.
        sinks: float32 [H], contiguous: a product of each head's that has no value; None: there are none.
    """

    def __init__(
        self,
        library: NativeLibrary,
        keys: Tensor,
        values: Tensor,
        heads: int,
        scale: float,
        window: int | None,
        chunked: bool,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> None:
        assert keys.dtype == values.dtype == torch.float32 and keys.stride() == values.stride() and keys.stride(3) == 1
        assert keys.shape[3] % LANES == 0
        self._library = library
        self._kept = keys, values, sinks
        self._layer = _Attention(
            *(keys.data_ptr(), values.data_ptr(), *keys.stride()[:3], heads, keys.shape[2], keys.shape[3]),
            *(keys.shape[1], window or 0, scale, softcap or 0.0, None if sinks is None else sinks.data_ptr(), chunked),
        )

    def __call__(
        self, query: Tensor, pages: npt.NDArray[np.int32], lengths: npt.NDArray[np.int64], out: Tensor
    ) -> None:
        """Fills ``out`` [T, H, D], contiguous.

        Args:
            query: float32 [T, H, D], contiguous.
            pages: [T, P]: each request's pages; rows may lie apart.
            lengths: [T], contiguous: how many keys each request has.

        Raises:
            MemoryError: There is no memory for sums.
        """
        failed = self._library.attend(
            *(ctypes.addressof(self._layer), query.data_ptr(), pages.ctypes.data, pages.strides[0] // 4),
            *(lengths.ctypes.data, len(query), out.data_ptr(), self._library.run, torch.get_num_threads()),
        )
        if failed:
            raise MemoryError(f"no memory for the attention of {len(query)} tokens")
