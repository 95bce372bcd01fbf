"""Layers with states take prompts of any lengths by kernels as in plain torch: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sapwood_kernels.ops.factory import device_ops
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.layers.layer import LayerContext
from sapwood_worker.model.layers.state.gated_delta_net import GatedDeltaConfig
from sapwood_worker.model.layers.state.lightning_attention import LightningConfig
from sapwood_worker.model.layers.state.mamba1 import Mamba1Config
from sapwood_worker.model.layers.state.mamba2 import Mamba2Config
from sapwood_worker.model.layers.state.short_convolution import ShortConvolutionConfig
from sapwood_worker.model.pools.state_pool import StatePool
from sapwood_worker.model.quantization.registry import LinearMethods

pytest.importorskip("triton", reason="Triton is not installed")
ON_GPU = torch.cuda.is_available()
TritonPrompts = pytest.importorskip("sapwood_kernels.state.triton_prompts").TritonPrompts

DEVICE = "cuda" if ON_GPU else "cpu"
WIDTH = 48
ROWS, SNAPSHOTS = 4, 4
LAYERS = {
    "delta net": GatedDeltaConfig(2, 4, 16, 24, taps=4, eps=1e-6),
    "delta net, projections apart": GatedDeltaConfig(2, 6, 16, 16, taps=3, eps=1e-6, joined=False),
    "Mamba 2": Mamba2Config(4, 16, 2, 20, 4, 1e-5, convolution_bias=True, bias=False, output_bias=False),
    "Mamba 2 with steps bounded": Mamba2Config(
        2,
        32,
        1,
        16,
        4,
        1e-5,
        convolution_bias=False,
        bias=True,
        output_bias=True,
        step_limits=(0.01, 0.7),
        norm="before",
    ),
    "Mamba 1": Mamba1Config(40, 12, 4, 8, 1e-6, convolution_bias=True, bias=False),
    "lightning attention": LightningConfig(2, 16, layers=4),
    "short convolution": ShortConvolutionConfig(WIDTH, 3, bias=True),
}
STEPS = [
    ([70, 1, 5], [[0, 3, 0], [0, 66, 2], [2, 5, 1]]),
    ([2, 1, 65], []),
]
"""Tokens of each request in a step, and where snapshots are taken: request, tokens, snapshot."""


def taken(name: str, dtype: torch.dtype, by_kernels: bool) -> tuple[list[torch.Tensor], torch.Tensor, int]:
    """A layer's results for the steps, its states after them, and how often kernels were called."""
    ops = device_ops(DEVICE)
    kernels = ops.state_prompts = TritonPrompts() if by_kernels else None
    torch.manual_seed(len(name))
    context = LayerContext(dtype, ops, LinearMethods("none", dtype, ops), Parallel(), "layer")
    config = LAYERS[name]
    layer = config.build(WIDTH, 0, context)
    for slot in layer.weights().values():
        slot.target.copy_(torch.randn(slot.target.shape) * 0.3)
    layer.prepare()
    pool = StatePool([0], ROWS, SNAPSHOTS, config.numbers, torch.device(DEVICE))
    results = []
    for counts, saves in STEPS:
        hidden = torch.randn(sum(counts), WIDTH).to(DEVICE, dtype)
        plan = pool.plan(np.array([2, 0, 3]), np.array(counts), np.array(saves, np.int64).reshape(-1, 3), ops)
        results.append(layer.forward(hidden, None, None, SimpleNamespace(states=plan)))
    return results, pool.layer(0), 0 if kernels is None else kernels.launches


@pytest.mark.parametrize("name", LAYERS)
def test_kernels_take_prompts_through_a_layer_as_torch_does(name: str):
    # Numbers of 16 bits are compared with float32 ones: their own torch rounds them elsewhere.
    dtype, limit = (torch.bfloat16, 3e-2) if ON_GPU else (torch.float32, 3e-5)
    with torch.inference_mode():
        got, states, launches = taken(name, dtype, by_kernels=True)
        wanted, expected, _ = taken(name, torch.float32, by_kernels=False)
    assert launches >= len(STEPS), "the kernels did not run"
    for each, other in zip((*got, states), (*wanted, expected), strict=True):
        assert (each.float() - other).norm() < limit * other.norm()
    assert torch.equal(states[1], torch.zeros_like(states[1])), "a slot of no request was written"
