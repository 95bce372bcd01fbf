"""The norm of the next layer, which sees what a mixture of experts has added to: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Read when a kernel's module is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from sapwood_kernels import reference
from sapwood_kernels.experts.routing import Routing
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.layers.context import LayerContext
from sapwood_worker.model.layers.norm import RMSNorm
from sapwood_worker.model.layers.sparse.sparse_mlp import SharedExpert, SparseConfig, SparseMLP
from sapwood_worker.model.quantization.registry import LinearMethods

pytest.importorskip("triton", reason="Triton is not installed")
cuda = pytest.importorskip("sapwood_kernels.ops.cuda")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTH = 32


@pytest.mark.parametrize("gated", [False, True])
def test_it_has_what_is_normed_of_the_sum_unless_more_is_added_to_that(gated: bool) -> None:
    ops = cuda.CudaOps(DEVICE)
    context = LayerContext(torch.float32, ops, LinearMethods("none", torch.float32, ops), Parallel(), "mlp")
    config = SparseConfig(Routing(4, 2), 16, shared=SharedExpert("shared_expert", 16, gated=gated))
    layer = SparseMLP(WIDTH, config, activation="silu", context=context)
    draw = torch.Generator().manual_seed(0)
    for slot in layer.weights().values():
        slot.target.copy_(torch.randn(slot.target.shape, generator=draw) / 5)
    before, after = (RMSNorm(WIDTH, 1e-5, context) for _ in range(2))
    names = set(layer.weights())
    layer.norm_follows(after)
    assert set(layer.weights()) == names, "it is no part of this layer"
    for each in (layer, before, after):
        each.prepare()
    for norm in (before, after):
        norm.weight.copy_(torch.rand(WIDTH, generator=draw) + 0.5)
    hidden = torch.randn(5, WIDTH, generator=draw).to(DEVICE)
    layer(hidden, before, hidden)
    assert after.has(hidden) is not gated  # a gated expert comes after the sum
    alone = layer(hidden.clone(), before)
    assert not after.has(alone), "who adds it to a residual by itself has that normed"
    torch.testing.assert_close(after(hidden), reference.rms_norm(hidden, after.weight, 1e-5))
