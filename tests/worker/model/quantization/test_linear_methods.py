"""Formats of weights: products against the numbers that are held, what is kept as stored, and a package's own format."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sapwood_common.errors import ConfigError
from sapwood_kernels import reference
from sapwood_kernels.ops.device import DeviceOps
from sapwood_kernels.ops.factory import device_ops
from sapwood_testing.worker.thread_ranks import ThreadGroup
from sapwood_worker.config import WorkerConfig
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.loader import load_model
from sapwood_worker.model.quantization.dense import ONE_ROW, DenseMethod
from sapwood_worker.model.quantization.float8 import QuantisedFloat8, Scaling
from sapwood_worker.model.quantization.linear_method import LinearMethod, LinearShape, Part
from sapwood_worker.model.quantization.registry import FORMATS, LinearMethods
from sapwood_worker.model.weight_slot import whole
from sapwood_worker.settings import QUANTIZATIONS

OPS = device_ops("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got.cpu().float() - wanted.cpu().float()).norm() / wanted.cpu().float().norm())


def shape(rows: int, columns: int, bias: bool = False) -> LinearShape:
    return LinearShape((Part("a", whole(rows)),), whole(columns), bias)


def filled(method: LinearMethod, **tensors: Tensor) -> LinearMethod:
    for name, slot in method.slots().items():
        slot.target.copy_(tensors[name.removeprefix("a.")])
    with torch.inference_mode():
        method.finish()
    return method


def float8(weight: Tensor, scaling: Scaling, bias: Tensor | None = None) -> QuantisedFloat8:
    made = QuantisedFloat8(shape(*weight.shape, bias is not None), scaling, DTYPE, OPS)
    filled(made, weight=weight, **({} if bias is None else {"bias": bias}))
    return made


QUANTISE = {
    "row": reference.quantise_rows,
    "block": lambda x: reference.quantise_rows(x, 128),
    "tensor": reference.quantise_tensor,
}


@pytest.mark.parametrize("scaling", ["row", "block", "tensor"])
@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("biased", [False, True])
def test_float8_is_near_the_whole_layer_and_nearer_to_its_rounded_numbers(rows: int, scaling: Scaling, biased: bool):
    torch.manual_seed(rows)
    weight, x = torch.randn(256, 384).to(DTYPE), torch.randn(rows, 384).to(DTYPE)
    bias = torch.randn(256).to(DTYPE) if biased else None
    method = float8(weight, scaling, bias)
    result = method.apply(x.to(OPS.device))
    plain = 0.0 if bias is None else bias.float()
    assert relative(result, x.float() @ weight.float().t() + plain) < 0.05
    # A GPU's product of one row takes the activations as they are.
    wide = x.float() if method.fuses(rows).residual else reference.dequantise_blocks(*QUANTISE[scaling](x))
    rounded = reference.dequantise_blocks(method.weight.cpu(), method.scales.cpu())
    assert relative(result, wide @ rounded.t() + plain) < 0.006


def gpu_ops() -> DeviceOps:
    """A GPU's operations, on the CPU in Triton's interpreter where there is no GPU."""
    pytest.importorskip("triton", reason="Triton is not installed")
    return pytest.importorskip("sapwood_kernels.ops.cuda").CudaOps(OPS.device)


@pytest.mark.parametrize(
    ("rows", "scaling", "ops"),
    [
        *((rows, scaling, lambda: OPS) for rows in (1, 5) for scaling in ("none", "row", "block", "tensor")),
        *((1, scaling, gpu_ops) for scaling in ("none", "row", "block")),
    ],
)
def test_what_a_method_fuses_is_what_comes_apart(rows: int, scaling: str, ops: Callable[[], DeviceOps]):
    torch.manual_seed(rows)
    on = {"device": OPS.device, "dtype": DTYPE}
    weight, x, wide, residual = (
        torch.randn(rows, columns).to(**on) for rows, columns in ((128, 128), (rows, 128), (rows, 256), (rows, 128))
    )
    method: LinearMethod
    if scaling == "none":
        method = DenseMethod(shape(*weight.shape), DTYPE, ops())
    else:
        method = QuantisedFloat8(shape(*weight.shape), scaling, DTYPE, ops())
    filled(method, weight=weight)
    fused = method.fuses(rows)
    limit = 1e-5 if torch.float32 == DTYPE and scaling == "none" else 0.03

    class Norm:
        weight, eps = torch.rand(128, device=OPS.device) + 0.5, 1e-5

        def __call__(self, x: Tensor) -> Tensor:
            return reference.rms_norm(x, self.weight, self.eps)

    if fused.norm:
        assert relative(method.apply(x, norm=Norm()), method.apply(Norm()(x))) < limit
    if fused.gate_before:
        assert relative(method.apply(wide, gate_before="silu"), method.apply(reference.silu_mul(wide))) < limit
    if fused.gate_after:
        assert relative(method.apply(x, gate_after="silu"), reference.silu_mul(method.apply(x))) < limit
    if fused.residual:
        expected = residual + method.apply(x)
        assert method.apply(x, residual=residual) is residual
        assert relative(residual, expected) < limit
    if ops is gpu_ops:
        assert fused == ONE_ROW


def test_blocks_have_a_scale_each_and_lose_less_where_sizes_differ():
    weight = torch.randn(256, 256)
    weight[:, :128] *= 1e5
    by_row, by_block = float8(weight, "row"), float8(weight, "block")
    assert by_row.scales.shape == (256, 1)
    assert by_block.scales.shape == (2, 2)
    errors = [
        relative(reference.dequantise_blocks(each.weight.cpu(), each.scales.cpu())[:, 128:], weight[:, 128:])
        for each in (by_row, by_block)
    ]
    assert errors[1] < errors[0] / 1.5


# As stored
# ---------------------------------------------------------------------------------------------------------------

DYNAMIC = {"quant_method": "fp8", "activation_scheme": "dynamic"}
GROUPS = {
    "group_0": {"weights": {"num_bits": 8, "type": "float"}, "input_activations": {"num_bits": 8, "type": "float"}}
}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": GROUPS}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture
def stored(tiny_model, tmp_path):
    """Makes a tiny Llama whose projections are stored in float8; returns its path and its dequantised weights."""

    def make(kind: str, quantization: dict | None, ignored: str = "nothing"):
        path = shutil.copytree(tiny_model("wide").path, tmp_path / "stored")
        tensors, wide = load_file(path / "model.safetensors"), {}
        for name in [each for each in tensors if each.split(".")[-2] in PROJECTIONS and ignored not in each]:
            weight = tensors[name]
            if kind == "block":
                (tensors[name], scales), suffix = reference.quantise_blocks(weight), "_scale_inv"
            elif kind == "row":
                (tensors[name], scales), suffix = reference.quantise_rows(weight), "_scale"
            else:
                (tensors[name], scales), suffix = reference.quantise_tensor(weight), "_scale"
                tensors[name.replace("weight", "input_scale")] = torch.tensor(1.0)
            wide[name] = reference.dequantise_blocks(tensors[name], scales)
            tensors[name + suffix] = scales.view(()) if kind == "tensor" else scales
        save_file(tensors, path / "model.safetensors")
        config = json.loads((path / "config.json").read_text()) | {"quantization_config": quantization}
        (path / "config.json").write_text(json.dumps(config))
        return path, load_file(path / "model.safetensors"), wide

    return make


def load(path, **options):
    return load_model(path, "auto", torch.float32, device_ops("cpu"), context_length=None, threads=1, seed=0, **options)


@pytest.mark.parametrize(("kind", "quantization"), [("block", DYNAMIC), ("row", COMPRESSED), ("tensor", DYNAMIC)])
def test_stored_float8_is_kept_byte_for_byte(stored, kind, quantization):
    path, tensors, wide = stored(kind, quantization)
    loaded = load(path)
    assert loaded.quantization == "fp8 as stored"
    slots = loaded.model.weights()
    kept = [name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn]
    assert len(kept) == 7 * loaded.config.num_layers
    for name in kept:
        assert torch.equal(slots[name].target.view(torch.uint8), tensors[name].view(torch.uint8)), name
    half = Parallel(tp=ThreadGroup(1, [torch.empty(0)] * 2, threading.Barrier(2)))
    for name, slot in load(path, parallel=half).model.weights().items():
        if slot.target.dtype == torch.float8_e4m3fn or "weight_scale" in name:
            part = tensors[name][slot.index]
            assert part.shape == slot.target.shape
            assert torch.equal(part.float(), slot.target.float()), name
    # The product is that of the stored numbers, and of activations rounded as the weights are.
    name = "model.layers.1.self_attn.o_proj.weight"
    x = torch.randn(5, wide[name].shape[1])
    rounded = reference.dequantise_blocks(*reference.quantise_rows(x, 128 if kind == "block" else None))
    torch.testing.assert_close(
        loaded.model.layers[1].attention.output(x), rounded @ wide[name].t(), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("weights_only", [None, COMPRESSED | {"config_groups": {"g": {"input_activations": None}}}])
def test_activations_stay_as_they_are_where_nobody_says_that_they_are_float8(stored, weights_only):
    path, _, wide = stored("row", weights_only)
    loaded = load(path)
    assert loaded.quantization == "fp8 as stored"
    weight = wide["model.layers.1.self_attn.o_proj.weight"]
    x = torch.randn(5, weight.shape[1])
    torch.testing.assert_close(loaded.model.layers[1].attention.output(x), x @ weight.t(), rtol=1e-5, atol=1e-5)


def test_projections_left_wide_in_a_checkpoint_stay_wide_beside_small_ones(stored):
    path, _, _ = stored("row", DYNAMIC, ignored="k_proj")
    loaded = load(path)
    assert loaded.quantization == "fp8 as stored"
    found = {name: slot.target.dtype for name, slot in loaded.model.weights().items()}
    assert found["model.layers.0.self_attn.o_proj.weight"] == torch.float8_e4m3fn
    assert found["model.layers.0.self_attn.q_proj.weight"] == torch.float8_e4m3fn
    assert found["model.layers.0.self_attn.k_proj.weight"] == torch.float32


@pytest.mark.parametrize(("name", "lost"), [("int8", (0.003, 0.02)), ("int4", (0.05, 0.15))])
def test_integers_are_near_the_whole_layer_when_it_is_loaded(name: str, lost: tuple[float, float], tiny_model):
    tiny = tiny_model("wide")
    loaded = load(tiny.path, quantization=name)
    assert loaded.quantization == name
    weight = tiny.oracle.state_dict()["model.layers.1.self_attn.o_proj.weight"]
    x = torch.randn(5, weight.shape[1])
    assert lost[0] < relative(loaded.model.layers[1].attention.output(x), x @ weight.t()) < lost[1]


# Names
# -------------------------------------------------------------------------------------------------------------------


def test_every_format_that_can_be_asked_for_is_a_flag_s_value():
    assert {name for name, each in FORMATS.items() if each.quantise is not None} | {"none"} == set(QUANTIZATIONS)
    with pytest.raises(ValueError, match="'int5' is none of fp8, fp8_block, fp8_tensor, int4, int8, none"):
        WorkerConfig(quantization="int5")


def test_a_package_can_bring_a_linear_method(plugin, tiny_model, make_runner, make_driver):
    tiny = tiny_model("llama")
    with pytest.raises(ConfigError, match="'int8_rows' is none of"):
        make_runner(tiny.path, quantization="int8_rows")
    plugin(
        "sapwood.linear_methods",
        "int8_rows",
        """
        from sapwood_worker.model.quantization.dense import DenseMethod
        from sapwood_worker.model.quantization.linear_method import Fuses, LinearFormat, LinearMethod

        class Int8Rows(LinearMethod):
            def __init__(self, shape, dtype, ops):
                self._loaded = DenseMethod(shape, dtype, ops)

            def slots(self):
                return self._loaded.slots()

            def finish(self):
                weight = self._loaded.weight
                self._scales = weight.abs().amax(1, keepdim=True) / 127
                self._weight = (weight / self._scales).round().char()

            def fuses(self, rows):
                return Fuses()

            def apply(self, x, **nothing):
                return x @ (self._weight * self._scales).t()

        FORMAT = LinearFormat(quantise=Int8Rows)
        """,
        "FORMAT",
    )
    assert WorkerConfig(quantization="int8_rows").quantization == "int8_rows"
    runner = make_runner(tiny.path, quantization="int8_rows")
    driver = make_driver(runner)
    tokens = list(range(3, 60))
    driver.add(0, tokens)
    ours, theirs = runner.logits(driver.output({0: len(tokens)})), tiny.logits(tokens)
    assert 1e-4 < relative(ours, theirs) < 0.1
    assert "-int8_rows|" in runner.cache_identity()


def test_a_format_that_is_only_read_cannot_be_asked_for(plugin):
    plugin(
        "sapwood.linear_methods",
        "read_only",
        """
        from sapwood_worker.model.quantization.linear_method import LinearFormat

        FORMAT = LinearFormat(keep=lambda shape, dtype, ops, stored: None)
        """,
        "FORMAT",
    )
    with pytest.raises(ConfigError, match="weights are read in 'read_only', not quantised to it"):
        LinearMethods("read_only", torch.float32, OPS)
