"""The attention layer's own weights."""

from __future__ import annotations

import threading

import torch

from sapwood_kernels.ops.factory import device_ops
from sapwood_testing.worker.thread_ranks import ThreadGroup
from sapwood_worker.model.attention.backend import AttentionLayer
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.layers.attention import Attention
from sapwood_worker.model.layers.layer import LayerContext
from sapwood_worker.model.quantization.registry import LinearMethods


def test_a_rank_has_the_sinks_of_its_heads():
    ops = device_ops("cpu")
    rank = ThreadGroup(1, [torch.empty(0)] * 2, threading.Barrier(2))
    layer = Attention(
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        constants=AttentionLayer(0, 1.0),
        qk_norm=None,
        qkv_bias=True,
        output_bias=True,
        sinks=True,
        context=LayerContext(
            torch.float32, ops, LinearMethods("none", torch.float32, ops), Parallel(tp=rank), "layers.0.self_attn"
        ),
    )
    slot = layer.weights()["layers.0.self_attn.sinks"]
    assert (slot.shape, slot.index) == ((4,), (slice(2, 4),))
    assert slot.target.shape == (2,)
    assert layer._constants.sinks is slot.target and layer._constants.kind.sinks
