"""Configuration and weights from Hugging Face directories and GGUF files, and what is said when they are wrong."""

from __future__ import annotations

import json
import shutil
import threading

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sapwood_common.errors import ConfigError
from sapwood_common.models.gguf_file import GgufFile
from sapwood_kernels import reference
from sapwood_kernels.ops.factory import device_ops
from sapwood_testing.models.gguf_files import write_gguf
from sapwood_testing.worker.thread_ranks import ThreadGroup
from sapwood_worker.model.checkpoint.generation_config import read_hf_eos
from sapwood_worker.model.checkpoint.gguf_source import dequantize_into, read_tensor
from sapwood_worker.model.checkpoint.hf_config import read_hf_config
from sapwood_worker.model.checkpoint.safetensors_source import SafetensorsSource
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.families.llama import LLAMA
from sapwood_worker.model.loader import load_model
from sapwood_worker.model.weight_slot import Span, StoredTensor, WeightSlot

CPU = device_ops("cpu")


def load(path, **changes):
    options = {"load_format": "auto", "dtype": torch.float32, "context_length": None, "threads": 2, "seed": 0}
    options |= changes
    return load_model(path, options.pop("load_format"), options.pop("dtype"), CPU, **options)


def weights_of(loaded):
    return {name: slot.target for name, slot in loaded.model.weights().items()}


@pytest.fixture
def llama(tiny_model, tmp_path):
    """A copy of the tiny Llama's directory, to be damaged."""
    return shutil.copytree(tiny_model("llama").path, tmp_path / "llama")


def edit_config(path, **changes):
    config = json.loads((path / "config.json").read_text())
    config |= changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def edit_weights(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def test_sharded_checkpoints_load_as_single_ones(tiny_model, llama):
    tensors = load_file(llama / "model.safetensors")
    (llama / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, llama / file)
    index = {"weight_map": {name: file for file, members in shards.items() for name in members}}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    ours, single = weights_of(load(llama)), weights_of(load(tiny_model("llama").path))
    assert ours.keys() == single.keys()
    assert all(torch.equal(ours[name], single[name]) for name in ours)


def test_bfloat16_checkpoints_are_widened_exactly(llama):
    edit_weights(llama, lambda tensors: tensors.update({name: t.bfloat16() for name, t in tensors.items()}))
    stored = load_file(llama / "model.safetensors")
    for name, weight in weights_of(load(llama)).items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, stored[name].float())


@pytest.mark.parametrize("kind", ["tensor", "row", "block"])
def test_float8_weights_stand_for_themselves_times_their_scales(llama, kind):
    name = "model.layers.1.mlp.down_proj.weight"
    rounded = {}

    def change(tensors):
        weight = tensors[name]
        if kind == "block":  # smaller than a block on both sides
            scales, suffix = weight.abs().max().view(1, 1) / 448, "_scale_inv"
        else:
            scales, suffix = weight.abs().amax(1, keepdim=True) / 448, "_scale"
            scales = scales.amax() if kind == "tensor" else scales
        tensors[name] = reference.quantise(weight, scales)
        tensors[name + suffix] = scales
        tensors[name.replace("weight", "input_scale")] = torch.tensor(1.0)
        rounded[name] = tensors[name].float() * scales

    edit_weights(llama, change)
    with torch.inference_mode():
        numbers = load(llama).model.layers[1].mlp.down(torch.eye(80)).t()
    torch.testing.assert_close(numbers, rounded[name])


@pytest.mark.parametrize(
    ("rows", "columns"), [(Span(0, 300, 300), Span(0, 130, 130)), (Span(100, 90, 300), Span(65, 65, 130))]
)
def test_float8_blocks_at_the_edges_may_be_smaller(tmp_path, rows, columns):
    weight, scales = torch.randn(300, 130).to(torch.float8_e4m3fn), torch.rand(3, 2)
    save_file({"a.weight": weight, "a.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    source, target = SafetensorsSource(tmp_path, LLAMA, tied=False), torch.empty(rows.size, columns.size)
    source.read_into("a.weight", WeightSlot(target, spans=(rows, columns)))
    expected = weight.float() * torch.kron(scales, torch.ones(128, 128))[:300, :130]
    assert source.tensors()["a.weight"] == StoredTensor((300, 130), "F8_E4M3")
    torch.testing.assert_close(target, expected[rows.slice, columns.slice])


def test_float8_scales_of_another_shape_are_refused(llama):
    name = "model.layers.1.mlp.down_proj.weight"
    edit_weights(llama, lambda tensors: tensors.update({name + "_scale": torch.ones(3)}))
    with pytest.raises(ConfigError, match=r"down_proj.weight cannot be read: its scales have shape \[3\]"):
        load(llama)


def test_missing_tensor_is_named_with_its_file(llama):
    edit_weights(llama, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ConfigError, match=r"llama.*tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load(llama)


def test_unexpected_tensor_is_named_with_its_file(llama):
    edit_weights(llama, lambda tensors: tensors.update({"model.layers.9.extra": torch.zeros(2)}))
    with pytest.raises(ConfigError, match=r"model\.safetensors: tensor model\.layers\.9\.extra is unexpected"):
        load(llama)


def test_tensor_of_another_shape_is_named_with_both_shapes(llama):
    edit_weights(llama, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(47)}))
    with pytest.raises(ConfigError, match=r"model\.safetensors: tensor model\.norm\.weight.*\[47\].*\[48\]"):
        load(llama)


def test_missing_and_damaged_files_are_named(llama):
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"model\.safetensors: cannot be read"):
        load(llama)
    path.unlink()
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        load(llama)


def test_unsupported_architecture_is_named_with_its_file(llama):
    edit_config(llama, architectures=["BertModel"])
    with pytest.raises(ConfigError, match=r"config\.json: architecture BertModel is not supported"):
        load(llama)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": ...}, "'hidden_size' is missing"),
        ({"hidden_act": "relu"}, "hidden_act: activation 'relu' is not supported"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_scaling: rotary embedding type 'dynamic' is not supported",
        ),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor 0.2 of heads of 16 elements is not supported"),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "short_factor has 1 numbers for 8 pairs",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "'factor' is missing"),
    ],
)
def test_faults_of_a_configuration_are_named(llama, changes, message):
    edit_config(llama, **changes)
    with pytest.raises(ConfigError, match=message):
        load(llama)


def test_configuration_that_is_not_json_is_named(llama):
    (llama / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read as JSON"):
        load(llama)


@pytest.mark.parametrize("name", ["llama-llama3-rope", "llama-linear-rope", "gemma3"])
def test_old_and_new_spellings_of_rotary_settings_mean_the_same(tiny_model, tmp_path, name):
    _, new = read_hf_config(tiny_model(name).path)
    path = shutil.copytree(tiny_model(name).path, tmp_path / "old")
    given = json.loads((path / "config.json").read_text())["rope_parameters"]
    if name == "gemma3":
        full, local = given["full_attention"], given["sliding_attention"]
        old = {"rope_theta": full.pop("rope_theta"), "rope_local_base_freq": local["rope_theta"], "rope_scaling": full}
        old |= {"layer_types": ..., "sliding_window_pattern": 6}
    else:
        old = {"rope_theta": given.pop("rope_theta"), "rope_scaling": given}
        old["rope_scaling"]["type"] = old["rope_scaling"].pop("rope_type")
    edit_config(path, rope_parameters=..., **old)
    assert read_hf_config(path)[1] == new


def test_gemma_text_configuration_inside_a_multimodal_one(tiny_model, tmp_path):
    alone = tiny_model("gemma3").path
    text = json.loads((alone / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = load_file(alone / "model.safetensors")
    renamed = {name.replace("model.", "language_model.model.", 1): tensor for name, tensor in tensors.items()}
    renamed["vision_tower.some.weight"] = torch.zeros(3)
    save_file(renamed, tmp_path / "model.safetensors")
    assert read_hf_config(tmp_path) == read_hf_config(alone)
    ours, expected = weights_of(load(tmp_path)), weights_of(load(alone))
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_end_tokens_come_from_the_generation_configuration_first(llama):
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert read_hf_eos(llama, 97) == (5, 6)
    (llama / "generation_config.json").unlink()
    assert read_hf_eos(llama, 97) == (2,)


def test_context_length_option_lowers_the_models_own(tiny_model):
    assert load(tiny_model("llama").path, context_length=100).config.max_position == 100
    assert load(tiny_model("llama").path, context_length=10**6).config.max_position == 1024


def test_dummy_weights_have_the_true_shapes_and_depend_on_the_seed(tiny_model, llama):
    (llama / "model.safetensors").unlink()
    first, again = weights_of(load(llama, load_format="dummy")), weights_of(load(llama, load_format="dummy"))
    other, real = weights_of(load(llama, load_format="dummy", seed=9)), weights_of(load(tiny_model("llama").path))
    name = "model.layers.0.mlp.down_proj.weight"
    assert {n: t.shape for n, t in first.items()} == {n: t.shape for n, t in real.items()}
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])
    assert bool((first["model.norm.weight"] == 1).all())


# GGUF ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("llama", "llama"), ("llama-linear-rope", "llama"), ("qwen3", "qwen3"), ("qwen2", "qwen2")],
)
def test_gguf_models_give_transformers_logits(tiny_model, make_runner, make_driver, tmp_path, name, architecture):
    tiny = tiny_model(name)
    runner = make_runner(write_gguf(tmp_path / "model.gguf", tiny.oracle, architecture))
    tokens = list(range(3, 60))
    driver = make_driver(runner)
    driver.add(0, tokens)
    ours, theirs = runner.logits(driver.output({0: len(tokens)})), tiny.logits(tokens)
    assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max()
    # <|eot_id|> is there, but only as a normal token.
    assert runner.info.eos_token_ids == (2, 50)


def test_a_family_of_a_package_is_read_from_gguf_files_by_its_own_names(
    plugin, tiny_model, make_runner, make_driver, tmp_path
):
    tiny = tiny_model("llama")
    path = write_gguf(tmp_path / "model.gguf", tiny.oracle, "alpaca", names={"post_attention_layernorm": "second_norm"})
    with pytest.raises(ConfigError, match="architecture alpaca is not supported"):
        make_runner(path)
    plugin(
        "sapwood.model_families",
        "alpaca",
        """
        from sapwood_worker.model.families.family import ModelFamily
        from sapwood_worker.model.families.llama import LlamaDecoderLayer

        NAMES = {"second_norm": "post_attention_layernorm"}
        FAMILY = ModelFamily("alpaca", (), LlamaDecoderLayer, defaults={}, gguf_names=NAMES)
        """,
        "FAMILY",
    )
    driver = make_driver(make_runner(path))
    tokens = list(range(3, 60))
    driver.add(0, tokens)
    ours, theirs = driver.runner.logits(driver.output({0: len(tokens)})), tiny.logits(tokens)
    assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max()


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_rank_reads_its_part_of_a_gguf_file(tiny_model, tmp_path, architecture):
    tiny = tiny_model(architecture, num_attention_heads=8, intermediate_size=96)
    path = write_gguf(tmp_path / "model.gguf", tiny.oracle, architecture)
    whole = weights_of(load(path))
    for rank in range(4):
        parallel = Parallel(tp=ThreadGroup(rank, [torch.empty(0)] * 4, threading.Barrier(4)))
        for name, slot in load(path, parallel=parallel).model.weights().items():
            assert torch.equal(slot.target, whole[name][slot.index]), name


def test_gguf_rope_divisors_are_llama3_scaling(tiny_model, make_runner, make_driver, tmp_path):
    tiny = tiny_model("llama-llama3-rope")
    plain = 1.0 / (5000.0 ** (np.arange(0, 16, 2) / 16))
    divisors = plain / tiny.oracle.model.rotary_emb.inv_freq.double().numpy()
    runner = make_runner(write_gguf(tmp_path / "model.gguf", tiny.oracle, "llama", rope_divisors=divisors))
    tokens = list(range(3, 90))
    driver = make_driver(runner)
    driver.add(0, tokens)
    ours, theirs = runner.logits(driver.output({0: len(tokens)})), tiny.logits(tokens)
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def test_gguf_gemma_norms_and_windows(tiny_model, tmp_path):
    tiny = tiny_model("gemma3")
    from_gguf = load(write_gguf(tmp_path / "model.gguf", tiny.oracle, "gemma3"))
    from_hf = load(tiny.path)
    assert from_gguf.config.windows == from_hf.config.windows
    full = from_hf.config.windows.index(None)
    assert from_gguf.config.ropes[full] == from_hf.config.ropes[full]
    expected = weights_of(from_hf)
    for name, weight in weights_of(from_gguf).items():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_0", "BF16", "F16", "F32"])
def test_gguf_tensors_are_dequantised_as_the_gguf_package_does(tmp_path, kind):
    kind = gguf.GGMLQuantizationType[kind]
    values = np.random.default_rng(0).standard_normal((300, 1024), np.float32)
    packed = gguf.quantize(values, kind)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("t", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "t.gguf")
    expected = gguf.dequantize(packed, kind)
    assert np.array_equal(read_tensor(file, file.tensors["t"]), expected)
    for rows, columns in (
        (slice(7, 250), slice(0, 1024)),
        (slice(0, 300), slice(300, 700)),
        (slice(5, 6), slice(63, 64)),
    ):
        part = np.empty((rows.stop - rows.start, columns.stop - columns.start), np.float32)
        dequantize_into(file, file.tensors["t"], part, (rows, columns))
        assert np.array_equal(part, expected[rows, columns])


def test_gguf_of_an_unknown_architecture_or_truncated_is_refused(tiny_model, tmp_path):
    other = write_gguf(tmp_path / "other.gguf", tiny_model("llama").oracle, "mamba")
    with pytest.raises(ConfigError, match=r"other\.gguf: architecture mamba is not supported"):
        load(other)
    whole = write_gguf(tmp_path / "cut.gguf", tiny_model("llama").oracle, "llama")
    whole.write_bytes(whole.read_bytes()[:-5000])
    with pytest.raises(ConfigError, match=r"cut\.gguf.*truncated"):
        load(whole)


def test_gguf_missing_and_unexpected_tensors_are_named(tiny_model, tmp_path):
    # A Qwen3 file that says it is a Llama has norms that a Llama has not.
    path = write_gguf(tmp_path / "model.gguf", tiny_model("qwen3").oracle, "llama")
    with pytest.raises(ConfigError, match=r"model\.gguf: blk\.0\.attn_k_norm\.weight.*unexpected"):
        load(path)
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama").oracle, "qwen3")
    with pytest.raises(ConfigError, match=r"model\.gguf: tensors blk\.0\.attn_k_norm\.weight.* missing"):
        load(path)
