"""Output heads in 8 bits: the method's numbers on each device, which heads are rounded, and ranks' parts of one."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Read when a kernel's module is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from sapwood_kernels import reference
from sapwood_kernels.ops.device import DeviceOps
from sapwood_kernels.ops.factory import device_ops
from sapwood_kernels.quantised.int8 import round_weight
from sapwood_testing.worker.split_models import load, logits_of
from sapwood_testing.worker.thread_ranks import run_grid, run_ranks
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.layers.embedding import VocabParallelHead
from sapwood_worker.model.layers.layer import LayerContext
from sapwood_worker.model.layers.norm import RMSNorm
from sapwood_worker.model.quantization.int8 import Int8Head
from sapwood_worker.model.quantization.linear_method import LinearShape, Part
from sapwood_worker.model.quantization.registry import LinearMethods
from sapwood_worker.model.weight_slot import Span, whole

WIDTH = {"hidden_size": 128, "num_attention_heads": 8}
"""What groups of 128 need."""
TOKENS = [3 + i * 7 % 90 for i in range(9)]


def ops_of(kind: str) -> DeviceOps:
    if kind == "torch":
        return DeviceOps(torch.device("cpu"))
    if kind == "cpu":
        return device_ops("cpu")
    cuda = pytest.importorskip("sapwood_kernels.ops.cuda")
    ops: DeviceOps = cuda.CudaOps(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return ops


@pytest.mark.parametrize("count", [1, 7, 65])
@pytest.mark.parametrize("kind", ["torch", "cpu", "cuda"])
def test_logits_are_those_of_the_rounded_numbers(kind: str, count: int):
    torch.manual_seed(count)
    ops, dtype = ops_of(kind), torch.bfloat16
    made = Int8Head(LinearShape((Part("lm_head", Span(60, 50, 110)),), whole(96)), 60, dtype, ops)
    ((name, slot),) = made.slots().items()
    assert (name, slot.shape) == ("lm_head.weight", (110, 96))
    weight = torch.randn(50, 96).to(dtype)
    slot.target.copy_(weight)
    made.finish()
    assert not made.slots(), "it is held once, rounded"
    norm = RMSNorm(96, 1e-5, LayerContext(dtype, ops, LinearMethods("none", dtype, ops), Parallel()))
    norm.weight.copy_(torch.rand(96) + 0.5)
    x = torch.randn(count, 96).to(dtype)
    codes, scales = round_weight(weight)
    wanted = reference.rms_norm(x.float(), norm.weight.cpu(), 1e-5) @ (codes * scales).t()
    assert made.fuses(count).norm
    got = made.apply(x.to(ops.device), norm=norm).cpu()
    assert got.dtype == (torch.float32 if count <= 64 else dtype)
    assert not got[:, 50:].any(), "rows that this rank does not have"
    error = float((got[:, :50].float() - wanted).norm() / wanted.norm())
    assert error < (1e-4 if count <= 64 else 0.005)


@pytest.mark.parametrize(
    ("name", "quantization", "rounds"),
    [("llama", "int4", True), ("llama", "int8", False), ("llama", "none", False), ("llama-biased-tied", "int4", False)],
)
def test_a_head_of_its_own_is_rounded_where_layers_are_in_4_bits(tiny_model, name, quantization, rounds):
    loaded = load(tiny_model(name, **WIDTH).path, quantization=quantization)
    assert (loaded.quantization, loaded.rounds_head) == (quantization, rounds)
    assert ("lm_head.weight" in loaded.model.weights()) == (not rounds and "tied" not in name)


def test_a_head_stays_where_no_layer_is_rounded(tiny_model):
    narrow = load(tiny_model("llama").path, quantization="int4")
    assert (narrow.quantization, narrow.rounds_head) == ("none", False), "groups of 128 do not divide 48"


def test_stages_round_the_head_alike_if_but_one_of_them_has_layers_that_are_rounded(tiny_model):
    path = tiny_model("deepseek-v3", intermediate_size=256, num_hidden_layers=3).path  # the dense layer's is the first
    found = run_grid(1, 2, lambda rank, parallel: load(path, parallel, "int4"))
    assert [each.quantization for each in found] == ["int4", "none"], "experts' widths are no groups of 128"
    assert [each.rounds_head for each in found] == [True, True]


@pytest.mark.parametrize("labels", [False, True])
def test_labels_are_no_tokens(labels: bool):
    linear = LinearMethods("int4", torch.float32, device_ops("cpu"))
    linear.method(LinearShape((Part("layer", whole(8)),), whole(128)))
    context = LayerContext(torch.float32, device_ops("cpu"), linear, Parallel(), "score")
    VocabParallelHead(3, 128, tied=None, softcap=None, context=context, labels=labels)
    assert linear.rounds_head == (not labels)


def test_the_worker_says_so(tiny_model, make_runner):
    path = tiny_model("llama", **WIDTH).path
    assert make_runner(path, quantization="int4").info.weights == "int4, output head int8"
    assert make_runner(path, quantization="int8").info.weights == "int8"


def test_ranks_round_their_rows_as_one_does(tiny_model):
    path = tiny_model("llama", head_dim=32, intermediate_size=256, **WIDTH).path  # 97 tokens
    alone = logits_of(load(path, quantization="int4"), TOKENS)

    def work(group):
        parallel = Parallel(tp=group)
        return logits_of(load(path, parallel, "int4"), TOKENS, parallel)

    for logits in run_ranks(2, work):
        assert logits.shape == alone.shape
        assert (logits - alone).abs().max() <= 1e-4 * alone.abs().max()
