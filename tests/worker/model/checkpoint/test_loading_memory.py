"""A model that is rounded while it is loaded is held wide a layer at a time."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

if not torch.cuda.is_available():
    # Read when a kernel's module is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from sapwood_kernels.ops.factory import device_ops
from sapwood_worker.model.loader import load_model

LAYERS, EXPERTS, WIDTH = 6, 8, 128
WIDE = 4 * EXPERTS * 3 * WIDTH * WIDTH
"""Bytes of a layer's experts in float32."""


class Held(TorchDispatchMode):
    """Counts the bytes of all tensors that are held in it, most of all its work at once."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    @property
    def now(self) -> int:
        gc.collect()
        return self._count()

    def _count(self) -> int:
        self._storages = {key: each for key, each in self._storages.items() if not each[0].expired()}
        return sum(size for _, size in self._storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if (
                isinstance(each, torch.Tensor) and not each.is_mkldnn
            ):  # which packs float32 matrices, and has no storage
                storage = StorageWeakRef(each.untyped_storage())
                if storage.cdata not in self._storages:
                    self._storages[storage.cdata] = storage, each.untyped_storage().nbytes()
                    self.most = max(self.most, self._count())
        return result


@pytest.mark.parametrize(("kind", "quantization"), [("cpu", "int8"), ("cuda", "int4")])
def test_no_more_than_a_layer_is_held_wide(tiny_model: Any, kind: str, quantization: str) -> None:
    sizes = {"hidden_size": WIDTH, "moe_intermediate_size": WIDTH, "num_experts": EXPERTS, "num_hidden_layers": LAYERS}
    path: Path = tiny_model("qwen3-moe", **sizes).path
    ops = device_ops("cpu")
    if kind == "cuda":  # how a GPU holds them, here
        ops = pytest.importorskip("sapwood_kernels.ops.cuda").CudaOps(torch.device("cpu"))
    with Held() as held:
        loaded = load_model(
            path, "auto", torch.float32, ops, context_length=None, threads=1, seed=0, quantization=quantization
        )
        assert loaded.quantization == quantization
        left = held.now
    assert held.most <= 1.1 * left + 1.5 * WIDE < LAYERS * WIDE
