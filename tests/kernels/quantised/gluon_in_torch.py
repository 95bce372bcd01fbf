"""A stand-in for Gluon, which has no interpreter: a kernel's body runs in Python with torch's tensors; layouts mean nothing."""

from __future__ import annotations

import itertools
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


def _load(pointer: _Pointer, mask: Tensor | None = None, other: float = 0) -> Tensor:
    at = pointer.at.as_subclass(torch.Tensor)
    inside = torch.ones_like(at, dtype=torch.bool) if mask is None else mask.as_subclass(torch.Tensor).expand_as(at)
    assert ((at >= 0) & (at < pointer.base.numel()))[inside].all(), "reads beyond a tensor"
    found = pointer.base[torch.where(inside, at, 0)]
    return _value(torch.where(inside, found, torch.tensor(other, dtype=found.dtype)))


class _Shared:
    """Shared memory; what nobody wrote is not a number."""

    def __init__(self, dtype: torch.dtype, shape: list[int]) -> None:
        self.values = torch.full(shape, float("nan") if dtype.is_floating_point else 0, dtype=dtype)

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


def _seen(kept: _Shared, shape: list[int], layout: Any) -> _Shared:
    """Another view of the same memory."""
    return kept._part(kept.values.view(shape))


def _fetch(source: Any, at: list[int], barrier: _Shared, target: _Shared, pred: bool) -> None:
    """The bulk copy, done at once; beyond the tensor there is 0."""
    if pred:
        found = source.base[at[0] :, at[1] :][: source.block_shape[0], : source.block_shape[1]]
        target.values.zero_()[: found.shape[0], : found.shape[1]] = found
        barrier.values += 1


def _wait(barrier: _Shared, phase: int) -> None:
    assert barrier.values.item() % 2 != phase, "waits for what does not come"


_MBARRIER = SimpleNamespace(
    wait=_wait, MBarrierLayout=lambda: None, **dict.fromkeys(("init", "expect", "invalidate"), lambda *_, **__: None)
)


def _minimum(one: Any, other: Any) -> Any:
    return one.clamp(max=other) if isinstance(one, Tensor) else min(one, other)


_GL = SimpleNamespace(
    allocate_shared_memory=lambda dtype, shape, layout: _Shared(dtype, shape), int16=torch.int16,
    int8=torch.int8, int32=torch.int32, int64=torch.int64, float16=torch.float16, bfloat16=torch.bfloat16, float32=torch.float32,
    arange=lambda start, end, layout: _value(torch.arange(start, end)),
    broadcast=lambda one, other: tuple(torch.broadcast_tensors(one, other)),
    convert_layout=lambda tensor, layout: tensor, exp=torch.exp, expand_dims=torch.unsqueeze,
    full=lambda shape, value, dtype, layout: _value(torch.full(shape, value, dtype=dtype)), load=_load,
    join=lambda one, other: torch.stack((one, other), -1), maximum=lambda one, other: one.clamp(min=other),
    minimum=_minimum, permute=lambda tensor, order: tensor.permute(order),
    reduce=lambda values, axis, combine: values.amax(axis), reshape=lambda tensor, shape: tensor.reshape(shape),
    rsqrt=torch.rsqrt, split=lambda tensor: tensor.unbind(-1), where=torch.where,
    static_range=range, store=_store, sum=lambda tensor, axis: tensor.sum(axis),
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
    waits = dict.fromkeys(("_together", "gdc_launch_dependents", "gdc_wait"), lambda: None)
    layouts = dict.fromkeys(("_code_layout", "_input_layout", "scale_layout", "_digit_layout"), lambda *_: None)

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
        "mbarrier": _MBARRIER,
        "warpgroup_mma": lambda a, b, total, is_async: total + a.float() @ b.values.float(),
        "warpgroup_mma_wait": lambda outstanding, deps: tuple(deps),
        **waits,
        **layouts,
    }
    names |= {name: body(function) for name, function in others.items()}
    run = body(kernel)

    class Launcher:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*arguments: Any, num_warps: int, launch_pdl: bool = False, **constants: Any) -> None:
                given = [_given(each) for each in arguments]
                for program in itertools.product(*map(range, grid)):
                    _GL.program_id = program.__getitem__
                    run(*given, **constants)

            return launch

    return Launcher()
