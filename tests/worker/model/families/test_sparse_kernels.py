"""Mixtures of experts by the GPU's kernels: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

if not torch.cuda.is_available():
    # Read when a kernel's module is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from sapwood_kernels.experts.reference import expert_sum
from sapwood_kernels.experts.stack import DenseStack
from sapwood_kernels.ops.device import DeviceOps
from sapwood_kernels.ops.factory import device_ops
from sapwood_kernels.reference import silu_mul
from sapwood_testing.models import quantised_layers as layouts
from sapwood_testing.worker.split_models import logits_of
from sapwood_testing.worker.thread_ranks import make_groups
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.layers.layer import LayerContext
from sapwood_worker.model.layers.sparse.places import ExpertPlaces, PlacedSum
from sapwood_worker.model.layers.sparse.sparse_mlp import SparseMLP
from sapwood_worker.model.loader import load_model
from sapwood_worker.model.quantization.registry import LinearMethods
from sapwood_worker.records.expert_load import ExpertMove

pytest.importorskip("triton", reason="Triton is not installed")
cuda = pytest.importorskip("sapwood_kernels.ops.cuda")

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SPARSE = ["deepseek-v2", "deepseek-v3", "glm4-moe", "mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss"]
TOKENS = [3 + i * 7 % 90 for i in range(5)]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs whole steps of these models")
@pytest.mark.parametrize("name", ["deepseek-v3", "qwen2-moe", "gpt-oss"])
def test_layers_of_experts_by_kernels_equal_transformers(tiny_model, name):
    tiny = tiny_model(name)
    ops = cuda.CudaOps(torch.device("cpu"))
    loaded = load_model(tiny.path, "auto", torch.float32, ops, context_length=None, threads=1, seed=0)
    ours, theirs = logits_of(loaded, TOKENS), tiny.logits(TOKENS)
    assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max()
    layers = loaded.model.expert_tokens().tolist()
    chosen = loaded.config.sparse.routing.chosen
    assert [sum(each) for each in layers] == [len(TOKENS) * chosen] * len(layers)
    mixtures = [each for each in loaded.model.modules() if isinstance(each, SparseMLP)]
    # Qwen's shared expert is gated; V3's is computed among the others.
    assert mixtures and all((each.shared is not None) == (name == "qwen2-moe") for each in mixtures)


class Ops(cuda.CudaOps):
    """Without a GPU there is no memory to pin."""

    fill = DeviceOps.fill


@pytest.mark.skipif(torch.cuda.is_available(), reason="its matrices are a CPU's, which the interpreter takes")
def test_experts_that_move_between_ranks_give_the_same_by_kernels():
    """Both ranks in one thread: the interpreter knows no others."""
    generator = torch.Generator().manual_seed(4)
    gate_up, down, x, weights = (
        torch.randn(shape, generator=generator) for shape in [(4, 32, 16), (4, 16, 16), (6, 16), (6, 2)]
    )
    ids = torch.rand(6, 4, generator=generator).topk(2).indices
    whole = expert_sum(x, ids, weights, DenseStack(gate_up), DenseStack(down), silu_mul)
    ops, ranks = Ops(torch.device("cpu")), []
    for group in make_groups(2):
        context = LayerContext(
            torch.float32, ops, LinearMethods("none", torch.float32, ops), Parallel(ep=group, redundant_experts=2)
        )
        places = ExpertPlaces(4, context.parallel, context.ops)
        stacks = []
        for each in (gate_up, down):
            held = torch.full((3, *each.shape[1:]), float("nan"))
            held[:2] = each[2 * group.rank : 2 * group.rank + 2]
            stacks.append(DenseStack(held))
        ranks.append(PlacedSum(places, *stacks, "silu", 2, context))
    for moves in ([], [ExpertMove(0, 5, 1)], [ExpertMove(0, 2, 1), ExpertMove(0, 1, -1)]):
        for rank in ranks:
            rank.move(moves)
        parts = [rank(x, ids, weights) for rank in ranks]
        assert all(part.any() for part in parts)
        torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-5)


def in_float8(tiny, folder):
    """A copy of a tiny model whose experts are in float8 by blocks."""
    path = shutil.copytree(tiny.path, folder / "float8")
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        parts, _ = layouts.float8(tensors[name], block=(128, 128), name="weight_scale_inv")
        tensors |= {f"{name.removesuffix('.weight')}.{kind}": each.contiguous() for kind, each in parts.items()}
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs whole steps of this model")
def test_kernels_compute_with_experts_in_float8_as_a_cpu_does(tiny_model, tmp_path):
    """Their width is no whole number of blocks."""
    path = in_float8(tiny_model("qwen3-moe", moe_intermediate_size=256, hidden_size=160), tmp_path)
    got, wanted = (
        logits_of(load_model(path, "auto", torch.float32, ops, context_length=None, threads=1, seed=0), TOKENS)
        for ops in (cuda.CudaOps(torch.device("cpu")), device_ops(torch.device("cpu")))
    )
    assert (got - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def steps(make_runner, make_driver, path, **options):
    """Logits of a prompt, of a chunk of it with another prompt, and of ten decodes; and what the decodes chose."""
    driver = make_driver(make_runner(path, **options))
    tokens = [3 + i * 11 % 90 for i in range(50)]
    driver.add(2, tokens)
    driver.add(3, tokens[:21])
    parts = [driver.runner.logits(driver.output(each)) for each in ({2: 30}, {2: 19, 3: 20})]
    chosen = [driver.execute({2: 1, 3: 1})]
    chosen += [driver.execute({2: 1, 3: 1}) for _ in range(10)]
    return torch.cat(parts).cpu(), chosen, driver.runner


@on_gpu
@pytest.mark.parametrize("name", SPARSE)
def test_a_gpu_computes_what_a_cpu_does(tiny_model, make_runner, make_driver, name):
    path = tiny_model(name).path
    wanted, chosen, _ = steps(make_runner, make_driver, path)
    got, tokens, _ = steps(make_runner, make_driver, path, device="cuda", dtype="float32", attention_backend="triton")
    assert float((got - wanted).abs().max()) <= 1e-3 * float(wanted.abs().max())
    assert tokens == chosen


@on_gpu
def test_a_gpu_computes_with_experts_in_float8_as_a_cpu_does(tiny_model, make_runner, make_driver, tmp_path):
    path = in_float8(tiny_model("qwen3-moe", moe_intermediate_size=256, hidden_size=160), tmp_path)
    wanted, chosen, _ = steps(make_runner, make_driver, path)
    got, tokens, _ = steps(make_runner, make_driver, path, device="cuda", dtype="float32", attention_backend="triton")
    assert float((got - wanted).abs().max()) <= 1e-3 * float(wanted.abs().max())
    assert tokens == chosen


@on_gpu
@pytest.mark.parametrize("name", SPARSE)
def test_captured_steps_choose_what_single_launches_do(tiny_model, make_runner, make_driver, name):
    path = tiny_model(name).path
    options = {"device": "cuda", "dtype": "bfloat16", "attention_backend": "triton", "max_step_tokens": 128}
    wanted, chosen, plain = steps(make_runner, make_driver, path, **options, cuda_graphs=False)
    got, tokens, captured = steps(make_runner, make_driver, path, **options)
    assert plain._graphs is None and captured._graphs is not None and captured._pieces is not None
    # Products of padded sizes round otherwise, and a router may then choose another expert.
    assert float((got - wanted).norm() / wanted.norm()) < 0.1
    assert sum(one == other for one, other in zip(chosen, tokens, strict=True)) >= 6
    counted = [sum(each) for each in captured.experts()()]
    assert counted == [sum(each) for each in plain.experts()()], "rows that pad a captured step are not counted"
