"""GGUF files of dense families give transformers' logits."""

from __future__ import annotations

import copy

import gguf
import pytest
import torch

from sapwood_common.errors import ConfigError
from sapwood_testing.models.gguf_files import write_gguf


@pytest.mark.parametrize(
    ("name", "architecture", "changes"),
    [
        ("gemma", "gemma", {}),
        ("gemma2", "gemma2", {"query_pre_attn_scalar": 16}),  # the files do not say, and it is then a head's width
        ("granite", "granite", {}),
        ("olmo2", "olmo2", {}),
        ("phi3", "phi3", {}),
        ("phi3-longrope", "phi3", {}),
        ("phi3-partly-rotated", "phi3", {}),
        ("qwen2.5-yarn", "qwen2", {}),
        ("smollm3", "smollm3", {}),
    ],
)
def test_logits_of_a_gguf_file_equal_transformers(
    tiny_model, make_runner, make_driver, tmp_path, name, architecture, changes
):
    tiny = tiny_model(name, **changes)
    runner = make_runner(write_gguf(tmp_path / "model.gguf", tiny.oracle, architecture), dtype="float32")
    assert runner.info.architecture == architecture
    tokens = torch.randint(3, 97, (83,), generator=torch.Generator().manual_seed(0)).tolist()
    driver = make_driver(runner)
    driver.add(0, tokens)
    ours, theirs = runner.logits(driver.output({0: 83})), tiny.logits(tokens)
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


@pytest.mark.parametrize(("stored_weights", "limit"), [("keep", 0.02), ("widen", 1e-4)])
def test_rows_of_quantised_fused_projections_are_read_apart(
    tiny_model, make_runner, make_driver, tmp_path, stored_weights, limit
):
    tiny = tiny_model("phi3")
    kinds = {"attn_qkv": "Q8_0", "ffn_up": "Q8_0"}
    path = write_gguf(tmp_path / "model.gguf", tiny.oracle, "phi3", kinds=kinds)
    driver = make_driver(make_runner(path, stored_weights=stored_weights))
    tokens = list(range(3, 60))
    driver.add(0, tokens)
    ours = driver.runner.logits(driver.output({0: len(tokens)}))
    rounded = copy.deepcopy(tiny.oracle)
    for name, weight in rounded.named_parameters():
        if "qkv_proj" in name or "gate_up_proj" in name:
            kind = gguf.GGMLQuantizationType.Q8_0
            weight.data = torch.from_numpy(gguf.dequantize(gguf.quantize(weight.detach().numpy(), kind), kind))
    theirs = rounded(torch.tensor([tokens])).logits[0]
    assert (ours - theirs).norm() < limit * theirs.norm()


def test_a_fused_projection_of_another_size_is_named(tiny_model, make_runner, tmp_path):
    oracle = tiny_model("phi3").oracle
    path = write_gguf(tmp_path / "model.gguf", oracle, "phi3", names={"post_attention_layernorm": "ffn_norm"})
    raw = path.read_bytes()
    # The count of key heads, in little endian after its key and type.
    key = b"phi3.attention.head_count_kv"
    at = raw.index(key) + len(key) + 4
    path.write_bytes(raw[:at] + (2).to_bytes(4, "little") + raw[at + 4 :])
    with pytest.raises(ConfigError, match=r"tensor blk.0.attn_qkv.weight has shape \[192, 96\].* 160 rows"):
        make_runner(path)
