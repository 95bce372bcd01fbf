"""A stand-in for Gluon, which has no interpreter: a kernel's body runs in Python with torch's tensors; layouts mean nothing."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class _Value(torch.Tensor):
    """A tensor with what kernels ask of Gluon's."""

    type = SimpleNamespace(layout=None)  # type: ignore[assignment]

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Tensor:  # type: ignore[override]
        return self.view(dtype) if bitcast else super().to(dtype)


def _value(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(_Value)


class _Pointer:
    """Elements from a tensor's first one on, by their numbers."""

    def __init__(self, base: Tensor, at: Any = 0) -> None:
        elements = base.untyped_storage().nbytes() // base.itemsize - base.storage_offset()
        self.base, self.at = base.as_strided((elements,), (1,)), at
        self.dtype = SimpleNamespace(element_ty=base.dtype)

    def __add__(self, offset: Any) -> _Pointer:
        return _Pointer(self.base, self.at + offset)


def _load(
    pointer: _Pointer, mask: Tensor | None = None, other: float = 0, cache_modifier: str = "", eviction_policy: str = ""
) -> Tensor:
    plain = {torch.uint16: torch.int16, torch.float8_e4m3fn: torch.uint8}.get(pointer.base.dtype)
    if plain is not None:  # torch cannot choose among these
        return _load(_Pointer(pointer.base.view(plain), pointer.at), mask, other).view(pointer.base.dtype)
    at = torch.as_tensor(pointer.at).as_subclass(torch.Tensor)
    inside = torch.ones_like(at, dtype=torch.bool) if mask is None else mask.as_subclass(torch.Tensor).expand_as(at)
    assert ((at >= 0) & (at < pointer.base.numel()))[inside].all(), "reads beyond a tensor"
    found = pointer.base[torch.where(inside, at, 0)]
    return _value(torch.where(inside, found, torch.tensor(other, dtype=found.dtype)))


class _Shared:
    """Shared memory; what nobody wrote is not a number."""

    layout: Any = None

    def __init__(self, dtype: torch.dtype, shape: list[int]) -> None:
        self.values = torch.full(shape, float("nan") if dtype.is_floating_point else 0, dtype=dtype)

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def _part(self, values: Tensor) -> _Shared:
        part = _Shared.__new__(_Shared)
        part.values = values
        return part

    def index(self, at: int) -> _Shared:
        return self._part(self.values[at])

    def permute(self, order: tuple[int, ...]) -> _Shared:
        return self._part(self.values.permute(order))

    def slice(self, start: int, length: int, dim: int) -> _Shared:
        return self._part(self.values.narrow(dim, start, length))

    def store(self, values: Tensor) -> None:
        self.values.copy_(values.as_subclass(torch.Tensor))

    def load(self, layout: Any) -> Tensor:
        return _value(self.values.clone())


def _store(pointer: _Pointer, values: Tensor, mask: Tensor | bool = True) -> None:
    at, values, mask = torch.broadcast_tensors(pointer.at, values, torch.as_tensor(mask))
    pointer.base[at[mask].as_subclass(torch.Tensor)] = values[mask].as_subclass(torch.Tensor)


def _widen(codes: Tensor, zero: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """What the kernel's assembly does, which is not run here."""
    bits = codes.to(torch.int32)
    one = 0x6400 if dtype == torch.float16 else 0x4300
    less = (zero.to(torch.int32) - one).to(dtype)
    return tuple(((bits >> 4 * i & 15).to(dtype) - less) for i in range(4))


def _widen_scaled(codes: Tensor, zero: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(each * scale for each in _widen(codes, zero, dtype))


def _halves(codes: Tensor) -> tuple[Tensor, Tensor]:
    return (codes & 15).to(torch.int8), (codes >> 4).to(torch.int8)


def _digits_of(words: Tensor) -> Tensor:
    one, two, three = (((words >> 8 * i & 255) - 128).to(torch.int8) for i in range(3))
    return torch.stack((torch.stack((one, three), -1), torch.stack((two, torch.zeros_like(one)), -1)), -1)


def _seen(kept: _Shared, *how: Any) -> _Shared:
    """Another view of the same memory: a shape and a layout, and before them a dtype or the same."""
    *dtype, shape, _ = how
    return kept._part(kept.values.view(-1).view(dtype[0] if dtype else kept.dtype).view(shape))


class _Barriers:
    """Barriers of shared memory, by where they lie; what waits longer than a while for one waits for what does not come."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # Arrivals of a phase, those that are missing, bytes that are, and phases that are over.
        self._left: dict[int, list[int]] = {}

    def init(self, barrier: _Shared, count: int) -> None:
        self._left[barrier.values.data_ptr()] = [count, count, 0, 0]

    def arrive(self, barrier: _Shared, count: int = 1, pred: bool = True) -> None:
        self._change(barrier, count, 0, pred)

    def expect(self, barrier: _Shared, size: int, pred: bool = True) -> None:
        self._change(barrier, 1, size, pred)

    def copied(self, barrier: _Shared, size: int) -> None:
        self._change(barrier, 0, -size, True)

    def wait(self, barrier: _Shared, phase: int) -> None:
        with self._changed:
            left = self._left[barrier.values.data_ptr()]
            came = self._changed.wait_for(lambda: left[3] % 2 != phase, timeout=5)
        assert came, "waits for what does not come"

    def _change(self, barrier: _Shared, arrivals: int, size: int, pred: bool) -> None:
        if not pred:
            return
        with self._changed:
            left = self._left[barrier.values.data_ptr()]
            left[1] -= arrivals
            left[2] += size
            assert left[1] >= 0, "more arrive than a phase has"
            if left[1:3] == [0, 0]:
                left[1], left[3] = left[0], left[3] + 1
            self._changed.notify_all()


_BARRIERS = _Barriers()
_MBARRIER = SimpleNamespace(
    **{name: getattr(_BARRIERS, name) for name in ("init", "arrive", "expect", "wait")},
    MBarrierLayout=lambda: None,
    invalidate=lambda barrier: None,
)


def _fetch(source: Any, at: list[int], barrier: _Shared, target: _Shared, pred: bool = True) -> None:
    """The bulk copy, done at once; beyond the tensor there is 0."""
    if pred:
        place = zip(at, source.block_shape, strict=True)
        found = source.base[tuple(slice(first, first + size) for first, size in place)]
        target.values.zero_()[tuple(slice(size) for size in found.shape)] = found
        _BARRIERS.copied(barrier, target.values.nbytes)


def _send(target: Any, at: list[int], source: _Shared) -> None:
    """The bulk copy back; nothing goes beyond the tensor."""
    place = target.base[tuple(slice(first, first + size) for first, size in zip(at, target.block_shape, strict=True))]
    place.copy_(source.values[tuple(map(slice, place.shape))])


def _warp_specialize(
    parts: list[tuple[Callable[..., None], tuple[Any, ...]]], warps: list[int], registers: list[int]
) -> None:
    """Parts of a program, each in a thread."""
    failed: list[BaseException] = []

    def run(part: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            part(*arguments)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=each) for each in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def _put(target: Any, at: list[int], source: _Shared) -> None:
    """The bulk copy to a tensor; nothing goes beyond it."""
    place = zip(at, source.values.shape, strict=True)
    found = target.base[tuple(slice(first, first + size) for first, size in place)]
    found.copy_(source.values[tuple(slice(size) for size in found.shape)])


def _copy(target: _Shared, source: _Pointer) -> None:
    target.store(_load(source))


def _waited(outstanding: int, deps: list[Tensor]) -> Any:
    return deps[0] if len(deps) == 1 else tuple(deps)


def _multiplied_by_a_group(a: Any, b: _Shared, total: Tensor, is_async: bool, use_acc: bool = True) -> Tensor:
    left = a.values if isinstance(a, _Shared) else a
    product = left.float() @ b.values.float()
    return total + product if use_acc else _value(product)


_ADDS = threading.Lock()


def _add(pointer: _Pointer, value: int, sem: str) -> int:
    """What adds nothing waits for what other programs write. Those after it have not run."""
    with _ADDS:
        found = int(pointer.base[pointer.at])
        pointer.base[pointer.at] = found + value
    assert value or found, "waits for a program that may not have begun"
    return found


def _or(pointer: _Pointer, value: int, sem: str) -> None:
    with _ADDS:
        pointer.base[pointer.at] = int(pointer.base[pointer.at]) | value


def _maximum(one: Any, other: Any) -> Any:
    return one.clamp(min=other) if isinstance(one, Tensor) else max(one, other)


def _minimum(one: Any, other: Any) -> Any:
    return one.clamp(max=other) if isinstance(one, Tensor) else min(one, other)


_GL = SimpleNamespace(
    allocate_shared_memory=lambda dtype, shape, layout: _Shared(dtype, shape), int16=torch.int16,
    int8=torch.int8, uint8=torch.uint8, uint16=torch.uint16, int32=torch.int32, int64=torch.int64,
    float16=torch.float16, bfloat16=torch.bfloat16, float32=torch.float32, abs=torch.abs,
    max=lambda tensor, axis: tensor.amax(axis),
    atomic_add=_add, atomic_or=_or,
    arange=lambda start, end, layout: _value(torch.arange(start, end)),
    broadcast=lambda one, other: tuple(torch.broadcast_tensors(one, other)),
    constexpr=lambda value: value, convert_layout=lambda tensor, layout, assert_trivial=False: tensor,
    exp=torch.exp, expand_dims=torch.unsqueeze,
    full=lambda shape, value, dtype, layout: _value(torch.full(shape, value, dtype=dtype)), load=_load,
    join=lambda one, other: torch.stack((one, other), -1), maximum=_maximum,
    minimum=_minimum, permute=lambda tensor, order: tensor.permute(order),
    reduce=lambda values, axis, combine: values.amax(axis), reshape=lambda tensor, shape: tensor.reshape(shape),
    rsqrt=torch.rsqrt, split=lambda tensor: tensor.unbind(-1), where=torch.where,
    static_range=range, store=_store, warp_specialize=_warp_specialize, sum=lambda tensor, axis: tensor.sum(axis),
    zeros=lambda shape, dtype, layout: _value(torch.zeros(shape, dtype=dtype)),
    **dict.fromkeys(
        ("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "BlockedLayout", "SwizzledSharedLayout"),
        lambda *_, **__: None,
    ),
)  # fmt: skip


def _multiplied(a: Tensor, b: Tensor, total: Tensor) -> Tensor:
    return total + (a.float() @ b.float()).to(total.dtype)  # whole numbers are exact: less than 2^24


def _given(argument: Any) -> Any:
    if hasattr(argument, "block_shape"):  # the descriptor of a bulk copy
        base, shape = argument.base, argument.block_shape
        return SimpleNamespace(base=base, block_shape=shape, dtype=base.dtype, layout=None)
    return _Pointer(argument) if isinstance(argument, Tensor) else argument


def in_torch(kernel: Any, **others: Any) -> Any:
    """A kernel that runs in torch: launched as the kernel is, each program in turn.

    Args:
        kernel: The kernel.
        others: Its module's other functions of Gluon, by name.
    """
    waits = dict.fromkeys(("_together", "fence_async_shared", "gdc_launch_dependents", "gdc_wait"), lambda: None)
    layouts = dict.fromkeys(
        ("_code_layout", "_input_layout", "scale_layout", "_digit_layout", "_word_layout"), lambda *_: None
    )

    def body(function: Any) -> Callable[..., Any]:
        return FunctionType(function.fn.__code__, names)

    names: dict[str, Any] = {
        "gl": _GL,
        "range": range,
        "mma_v2": _multiplied,
        "_widen": _widen,
        "_widen_scaled": _widen_scaled,
        "_halves": _halves,
        "_digits_of": _digits_of,
        "_seen": _seen,
        "_fetch": _fetch,
        "_send": _send,
        "_for_copies": lambda number: None,
        "mbarrier": _MBARRIER,
        "_put": _put,
        "_copy": _copy,
        "tma": SimpleNamespace(store_wait=lambda pending: None),
        # A warp group's threads arrive one by one.
        "async_copy": SimpleNamespace(mbarrier_arrive=lambda barrier, increment_count: _BARRIERS.arrive(barrier, 128)),
        "warpgroup_mma": _multiplied_by_a_group,
        "warpgroup_mma_wait": _waited,
        **waits,
        **layouts,
    }
    names |= {name: body(function) for name, function in others.items()}
    run = body(kernel)

    class Launcher:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*arguments: Any, num_warps: int, launch_pdl: bool = False, **constants: Any) -> None:
                given = [_given(each) for each in arguments]
                _GL.num_programs = grid.__getitem__
                for program in itertools.product(*map(range, grid)):
                    _GL.program_id = program.__getitem__
                    run(*given, **constants)

            return launch

    return Launcher()
