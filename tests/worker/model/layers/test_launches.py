"""What a layer launches on a device with kernels of its own: every fusion that a method states is taken, nothing is added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sapwood_kernels import reference
from sapwood_kernels.ops.contracts import FewRows
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.families.family import attention_layout
from sapwood_worker.model.loader import load_model
from sapwood_worker.model.runner.kv_calibration import TrialPlan

CPU = torch.device("cpu")


class Recording(DeviceOps):
    """A device with the kernels that a GPU has, each computed by its reference; notes what is launched.

    Args:
        few: The most rows of a product of few.
    """

    def __init__(self, few: int) -> None:
        super().__init__(CPU)
        self.launched: list[str] = []
        self._few = few

    def _noted(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            self.launched.append(name)
            count = len(self.launched)
            result = work(*args, **options)
            del self.launched[count:]  # what the reference is made of
            return result

        return run

    def rms_norm(self, weight: Tensor, eps: float, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        return self._noted("norm", super().rms_norm(weight, eps, dtype))

    def gated(self, gate: Any) -> Callable[[Tensor], Tensor]:
        return self._noted("gate", super().gated(gate))

    def store_heads(self, *args: Any) -> Any:
        return self._noted("store", super().store_heads(*args))

    def few_rows(self, weight: Tensor, bias: Tensor | None) -> FewRows:
        return FewRows(self._product("few", weight, bias, None), self._few, norm=0)

    def one_row(self, weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None) -> Any:
        return self._product("row", weight, bias, scales)

    def _product(self, kind: str, weight: Tensor, bias: Tensor | None, scales: Tensor | None) -> Any:
        wide = weight.float() if scales is None else reference.dequantise_blocks(weight, scales)

        def product(x: Tensor, *, norm: Any, gate: Any, add_to: Tensor | None, dtype: Any = None) -> Tensor:
            fused = {"norm": norm, "gate": gate, "add": add_to}
            name = " ".join([kind, *(each for each, given in fused.items() if given is not None)])

            def work() -> Tensor:
                result = (x if norm is None else reference.rms_norm(x, *norm)) @ wide.t() + (
                    0 if bias is None else bias
                )
                result = result if gate is None else reference.silu_mul(result)
                return result if add_to is None else add_to.add_(result)

            return self._noted(name, work)()

        return product

    def scaled_product(self, x: Any, weight: Any, dtype: torch.dtype, *, exact: bool) -> Tensor:
        values, scales = (each.t() for each in weight)
        return self._noted(
            "product", lambda: reference.dequantise_blocks(*x) @ reference.dequantise_blocks(values, scales).t()
        )()

    def quantise(self, x: Tensor, *, grouped: bool) -> Any:
        return self._noted("quantise", super().quantise)(x, grouped=grouped)

    def quantise_normed(self, *args: Any, grouped: bool) -> Any:
        return self._noted("quantise norm", super().quantise_normed)(*args, grouped=grouped)

    def quantise_gated(self, *args: Any, grouped: bool) -> Any:
        return self._noted("quantise gate", super().quantise_gated)(*args, grouped=grouped)


class Torch(TorchFunctionMode):
    """Notes torch's own products, sums and copies."""

    NOTED = ("linear", "addmm_", "add_", "add", "copy_", "clone", "contiguous")

    def __init__(self, launched: list[str]) -> None:
        super().__init__()
        self._launched = launched

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in self.NOTED:
            self._launched.append(name)
        return function(*args, **(kwargs or {}))


ONE_ROW = ["row norm", "store", "row add", "row norm gate", "row add"]


FEW = ["norm", "few", "store", "few add", "norm", "few gate", "few add"]
PLAIN = ["norm", "linear", "store", "addmm_", "norm", "linear", "gate", "addmm_"]
BIASED = ["norm", "linear", "store", "linear", "add_", "norm", "linear", "gate", "linear", "add_"]
FLOAT8 = [
    *("quantise norm", "product", "store", "quantise", "product", "add_"),
    *("quantise norm", "product", "quantise gate", "product", "add_"),
]


@pytest.mark.parametrize(
    ("name", "quantization", "rows", "few", "expected"),
    [
        ("wide", "none", 1, 16, ONE_ROW),
        ("wide", "fp8", 1, 0, ONE_ROW),
        ("wide", "none", 5, 5, FEW),
        ("wide", "none", 5, 4, PLAIN),
        ("llama-biased-tied", "none", 5, 0, BIASED),
        ("wide", "fp8", 5, 0, FLOAT8),
    ],
)
def test_a_layer_launches_what_its_methods_do_not_fuse(tiny_model, name, quantization, rows, few, expected):
    ops = Recording(few)
    loaded = load_model(
        tiny_model(name).path,
        "auto",
        torch.float32,
        ops,
        context_length=None,
        threads=1,
        seed=0,
        quantization=quantization,
    )
    plan = TrialPlan(attention_layout(loaded.config, "float32", 16), rows, torch.float32, CPU)
    attend = plan.attend_cached
    plan.attend_cached = lambda *args: ops._noted("", lambda: attend(*args))()
    ops.launched.clear()
    with torch.inference_mode(), Torch(ops.launched):
        hidden = loaded.model.embedding(torch.arange(3, 3 + rows))
        angles = loaded.model.rotary[0](torch.arange(rows))
        ops.launched.clear()
        for layer in loaded.model.layers:
            layer(hidden, angles, plan)
    assert [each for each in ops.launched if each] == expected * len(loaded.model.layers)
