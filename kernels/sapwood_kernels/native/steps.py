"""Steps of a CPU that are recorded once and replayed in C."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sapwood_kernels.native.products import NativeLibrary

# The C calls of a computation, recorded while it runs and run again without Python: ``replay.c``.
#
# Like a CUDA graph, a repeated run reads and writes the recorded addresses, except the inputs, whose addresses are given for
# each run.


# By replay.c's numbers; which of a function's arguments is its float, if one is.
_KINDS: Mapping[str, tuple[int, int | None]] = {
    "multiply": (0, 9),
    "norm": (1, 5),
    "store_heads": (2, None),
    "attend": (3, None),
}
_ADD = 4
_WORDS = 12  # of a call's arguments; before them a call has its kind, its function and its float
_BEFORE = 3
_aten = torch.ops.aten
_EMPTY = {_aten.empty.memory_format, _aten.empty_like.default, _aten.new_empty.default}


class _Memory:
    """Memory of a recording's tensors: as torch's, but what is freed may be taken by the same recording only.

    A run again writes into the same places in the same order, so that a place may serve several tensors, one after another.
    """

    def __init__(self) -> None:
        self._kept: list[npt.NDArray[np.float32]] = []
        self._free: dict[int, list[npt.NDArray[np.float32]]] = {}

    def empty(self, shape: Sequence[int]) -> Tensor:
        size = int(np.prod(shape))
        free = self._free.setdefault(size, [])
        if free:
            place = free.pop()
        else:
            place = np.empty(size + 16, np.float32)
            place = place[-(place.ctypes.data // 4) % 16 :][:size]  # a cache line's beginning
            self._kept.append(place)
        given = place[:]  # of its own, so that its end is the tensor's
        weakref.finalize(given, free.append, place)
        return torch.from_numpy(given).view(*shape)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what torch computes meanwhile: gives empty tensors their memory, records sums in place, refuses all else."""

    def __init__(self, memory: _Memory, add: Callable[[Tensor, Tensor], None], refuse: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory, self._add, self._refuse = memory, add, refuse

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return (
            False  # else the first use imports torch's compiler, and Triton with it: 0.14 GB that stay, and two seconds
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _EMPTY:
            if result.dtype != torch.float32 or not result.is_contiguous():
                self._refuse(f"{func} of {result.dtype}")
            return self._memory.empty(result.shape) if result.dtype == torch.float32 else result
        if func is _aten.add_.Tensor and _alike(*args) and not kwargs:
            self._add(*args)
        elif func._schema.is_mutable or not _is_view(result, args):
            self._refuse(str(func))
        return result


class Recording:
    """Calls that can be run again.

    Args:
        library: The compiled library.

    Attributes:
        refused: The operation that cannot be recorded; None: there was none.
    """

    def __init__(self, library: NativeLibrary) -> None:
        self.refused: str | None = None
        self._library = library
        self._memory = _Memory()
        self._calls: list[tuple[int, ...]] = []
        self._numbers: list[float] = []
        self._table: npt.NDArray[np.int64]
        self._inputs: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []

    @contextmanager
    def record(self, inputs: Sequence[int]) -> Iterator[None]:
        """Records the calls made inside, which are computed as well.

        Args:
            inputs: Addresses that :meth:`run` names again, of memory that is not freed inside.
        """
        library = self._library
        before = {name: getattr(library, name) for name in (*_KINDS, "rows", "post", "wait")}
        for name, function in before.items():
            setattr(library, name, self._recorder(name, function))
        try:
            with _Watch(self._memory, self._add, self._refuse):
                yield
        finally:
            for name, function in before.items():
                setattr(library, name, function)
        self._table = np.array(self._calls, np.int64).reshape(-1, _BEFORE + _WORDS)
        self._table[:, 2] = np.array(self._numbers, np.float64).view(np.int64)
        for address in inputs:
            at = np.nonzero(self._table[:, _BEFORE:] == address)
            self._inputs.append((at[0], at[1] + _BEFORE))

    def run(self, inputs: Sequence[int], following: Mapping[int, int]) -> None:
        """Runs the calls again.

        Args:
            inputs: The addresses of today, in the order of those recorded.
            following: By an input's place in that order, the number in the argument after it.

        Raises:
            MemoryError: There was no memory for a call.
        """
        table = self._table
        for number, (address, (calls, words)) in enumerate(zip(inputs, self._inputs, strict=True)):
            table[calls, words] = address
            if number in following:
                table[calls, words + 1] = following[number]
        failed = self._library.replay(table.ctypes.data, len(table), self._library.run, torch.get_num_threads())
        if failed:
            raise MemoryError("no memory for a step's products or attention")

    def __len__(self) -> int:
        """How many calls there are."""
        return len(self._table)

    def _refuse(self, reason: str) -> None:
        self.refused = self.refused or reason

    def _recorder(self, name: str, function: Any) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            result: int = function(*arguments)
            if name not in _KINDS:
                self._refuse(name)
                return result
            kind, number = _KINDS[name]
            taken = list(arguments[:-2])
            value = 0.0 if number is None else taken.pop(number)
            address = ctypes.cast(function, ctypes.c_void_p).value or 0
            self._append(kind, address, value, [_address(each) for each in taken])
            return result

        return call

    def _add(self, to: Tensor, other: Tensor) -> None:
        self._append(_ADD, 0, 0.0, [to.data_ptr(), other.data_ptr(), to.numel()])

    def _append(self, kind: int, function: int, number: float, words: list[int]) -> None:
        self._calls.append((kind, function, 0, *words, *[0] * (_WORDS - len(words))))
        self._numbers.append(number)


def _address(argument: Any) -> int:
    if argument is None:
        return 0
    return ctypes.addressof(argument) if isinstance(argument, ctypes.Array) else int(argument)


def _is_view(result: Any, args: Sequence[Any]) -> bool:
    """Whether all tensors that an operation returned lie in its inputs' memory."""
    given = {_memory(each) for each in args} - {None}
    results = result if isinstance(result, tuple | list) else [result]
    return all(_memory(each) in given for each in results)


def _memory(value: Any) -> int | None:
    plain = isinstance(value, Tensor) and value.layout == torch.strided
    return value.untyped_storage().data_ptr() if plain else None


def _alike(to: Tensor, other: Any, *rest: Any) -> bool:
    if not isinstance(other, Tensor) or rest or to.shape != other.shape:
        return False
    return all(each.dtype == torch.float32 and each.is_contiguous() for each in (to, other))


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
            keys: float32 [P, page size, K, D] in any order except that D is last, mutated.
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
        keys: float32 [P, page size, K, D] in any order except that D is last, which is a multiple of :data:`LANES`.
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
