"""DeepSeek's own checkpoints: float8 by blocks whose sides do not divide all matrices, and a draft layer after the model's."""

from __future__ import annotations

import inspect
import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sapwood_common.errors import ConfigError
from sapwood_testing.models import quantised_layers as layouts

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "moe_intermediate_size": 128,
}
FLOAT8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
KV_B = "model.layers.1.self_attn.kv_b_proj"


@pytest.fixture(scope="module")
def paths(tiny_model, tmp_path_factory) -> tuple[Path, Path]:
    """A model in float8 blocks with a layer for drafts, and one of the numbers that it stands for."""
    source, folder = tiny_model("deepseek-v3", **SIZES).path, tmp_path_factory.mktemp("float8")
    stored, wide = (shutil.copytree(source, folder / name) for name in ("stored", "wide"))
    tensors = load_file(source / "model.safetensors")
    made: dict[str, Tensor] = {"model.layers.3.eh_proj.weight": torch.ones(2, 4)}
    for name, weight in tensors.items():
        if not name.endswith("_proj.weight") and "kv_a_proj" not in name:
            made[name] = weight
            continue
        parts, tensors[name] = layouts.float8(weight, block=(128, 128), name="weight_scale_inv")
        made |= {f"{name.removesuffix('.weight')}.{kind}": each.contiguous() for kind, each in parts.items()}
    save_file(made, stored / "model.safetensors")
    save_file(tensors, wide / "model.safetensors")
    config = json.loads((stored / "config.json").read_text())
    config |= {"quantization_config": FLOAT8, "num_nextn_predict_layers": 1}
    (stored / "config.json").write_text(json.dumps(config))
    return stored, wide


def logits(make_runner, make_driver, path: Path, **options) -> Tensor:
    driver = make_driver(make_runner(path, **options))
    driver.add(0, [3 + i * 7 % 90 for i in range(40)])
    parts = [driver.runner.logits(driver.output({0: size})) for size in (30, 9, 1)]
    return torch.cat(parts)


def test_widened_it_gives_the_logits_of_the_numbers_that_it_stands_for(paths, make_runner, make_driver):
    stored, wide = (partial(logits, make_runner, make_driver, path) for path in paths)
    expected = wide()
    assert float((stored(stored_weights="widen") - expected).abs().max()) <= 2e-5 * float(expected.abs().max())


def test_kept_only_its_activations_are_rounded_and_what_is_absorbed_is_wide(paths, make_runner, make_driver):
    runners = [make_runner(path) for path in paths]
    assert "fp8 as stored" in runners[0].info.weights
    kept, whole = (runner._model.weights()[f"{KV_B}.weight"].target for runner in runners)
    assert kept.dtype == torch.float32
    assert torch.equal(kept, whole)
    kept, expected = (logits(make_runner, make_driver, path) for path in paths)
    assert 0 < float((kept - expected).norm() / expected.norm()) < 0.3


def test_made_up_weights_are_held_as_stored_ones_are_and_give_finite_logits(paths, make_runner, make_driver):
    made_up, stored = (make_runner(paths[0], load_format=each) for each in ("dummy", "auto"))
    held, wanted = (
        {name: (slot.target.dtype, slot.shape) for name, slot in each._model.weights().items()}
        for each in (made_up, stored)
    )
    assert held == wanted
    assert made_up.info.weights == stored.info.weights
    summed = inspect.getclosurevars(made_up._model.layers[1].mlp.experts._sum._sum).nonlocals
    numbers = summed["gate_up"].product(2, torch.eye(made_up._model.config.hidden_size))
    assert 0.018 < float(numbers.std()) < 0.022
    assert bool(logits(make_runner, make_driver, paths[0], load_format="dummy").isfinite().all())


@pytest.mark.parametrize(
    ("name", "becomes", "message"),
    [
        (f"{KV_B}.weight", None, rf"tensor {KV_B}\.weight is missing"),
        (f"{KV_B}.weight_scale_inv", None, rf"{KV_B}\.weight \(F8_E4M3 \[512, 128\], fp8\): its scales are missing"),
        (f"{KV_B}.weight_scale_inv", torch.ones(3, 1), rf"{KV_B}\.weight cannot be read: its scales have shape \[3, 1\]"),
        (f"{KV_B}.weight", torch.ones(512, 64), rf"{KV_B}\.weight has shape \[512, 64\], the configuration asks for"),
        ("model.layers.4.eh_proj.weight", torch.ones(2), r"model\.layers\.4\.eh_proj\.weight is unexpected"),
    ],
)  # fmt: skip
def test_what_is_missing_or_odd_is_named(paths, make_runner, tmp_path, name, becomes, message):
    path = shutil.copytree(paths[0], tmp_path / "broken")
    tensors = load_file(path / "model.safetensors")
    tensors.pop(name, None)
    if becomes is not None:
        tensors[name] = becomes
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        make_runner(path)
