"""A shared expert that is computed among the others: the sum that it has by itself, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    # Read when a kernel's module is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from sapwood_kernels.experts.routing import Routing
from sapwood_kernels.ops.device import DeviceOps
from sapwood_testing.worker.thread_ranks import make_groups
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.layers.layer import LayerContext
from sapwood_worker.model.layers.sparse.sparse_mlp import SharedExpert, SparseConfig, SparseMLP
from sapwood_worker.model.quantization.linear_method import LinearMethod, LinearShape
from sapwood_worker.model.quantization.registry import LinearMethods

pytest.importorskip("triton", reason="Triton is not installed")
cuda = pytest.importorskip("sapwood_kernels.ops.cuda")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = SparseConfig(Routing(4, 2), 16, shared=SharedExpert("shared_experts", 48))


def context_of(ops: DeviceOps, methods: LinearMethods | None = None, parallel: Parallel | None = None) -> LayerContext:
    methods = methods or LinearMethods("none", torch.float32, ops)
    return LayerContext(torch.float32, ops, methods, parallel or Parallel(), "mlp")


def filled(layer: SparseMLP) -> SparseMLP:
    """With dummy weights, the same for all."""
    for name, slot in sorted(layer.weights().items()):
        draw = torch.Generator().manual_seed(sum(map(ord, name)))
        slot.target.copy_(torch.randn(slot.target.shape, generator=draw) / 5)
    layer.prepare()
    return layer


def mixture(config: SparseConfig, ops: DeviceOps, parallel: Parallel | None = None, method: str = "none") -> SparseMLP:
    context = context_of(ops, LinearMethods(method, torch.float32, ops), parallel)
    return filled(SparseMLP(32, config, activation="silu", context=context))


@pytest.mark.parametrize("tokens", [1, 7, 20])
def test_a_shared_expert_is_some_more_that_all_tokens_go_to(tokens: int):
    x = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(tokens)).to(DEVICE)
    ours, theirs = (mixture(CONFIG, ops(torch.device(DEVICE))) for ops in (cuda.CudaOps, DeviceOps))
    assert ours.shared is None and theirs.shared is not None
    torch.testing.assert_close(ours(x, None), theirs(x, None), rtol=1e-4, atol=1e-4)
    assert ours.router.counts.tolist() == theirs.router.counts.tolist() and int(ours.router.counts.sum()) == 2 * tokens


def test_a_shared_expert_unlike_the_others_is_computed_apart():
    ops = cuda.CudaOps(torch.device(DEVICE))
    gated = replace(CONFIG, shared=SharedExpert("shared_expert", 48, gated=True))
    for config in (gated, replace(CONFIG, shared=SharedExpert("shared_experts", 40))):
        assert mixture(config, ops).shared is not None
    assert mixture(CONFIG, ops, method="int8").shared is not None
    assert mixture(CONFIG, ops, Parallel(tp=make_groups(2)[0])).shared is not None
    ops.joins_shared = False
    assert mixture(CONFIG, ops).shared is not None


@pytest.mark.parametrize("rows", [32, 64])
def test_a_shared_expert_stays_apart_where_one_matrix_of_the_others_is_rounded(rows: int):
    class Some(LinearMethods):
        def rounded(self, shape: LinearShape) -> LinearMethod | None:
            return super().rounded(shape) if (shape.rows, shape.columns.size) == (rows, 32) else None

    ops = cuda.CudaOps(torch.device(DEVICE))
    config = replace(CONFIG, intermediate_size=32, shared=SharedExpert("shared_experts", 64))
    layer = filled(SparseMLP(32, config, activation="silu", context=context_of(ops, Some("int8", torch.float32, ops))))
    assert layer.shared is not None and layer.joined == 0
    x = torch.randn(200, 32, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    theirs = filled(SparseMLP(32, config, activation="silu", context=context_of(ops)))
    torch.testing.assert_close(layer(x, None), theirs(x, None), rtol=0.1, atol=0.1)
