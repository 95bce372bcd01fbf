"""GGUF files of checkpoints: what is written is read to the same numbers by us, by the library `gguf` and by transformers."""

from __future__ import annotations

import copy
import fcntl
import json
import math
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from sapwood.cli.derived.quantize import _GGUF
from sapwood_common.errors import ConfigError
from sapwood_common.models.progress import unreported
from sapwood_kernels.ops.factory import device_ops
from sapwood_testing.models.tiny_models import make_tiny
from sapwood_worker.model.loader import load_model
from sapwood_worker.model.quantizer.write_gguf import GGUF_TYPES, write_gguf

WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
"""Widths of whole blocks."""
TOKENS = list(range(3, 60))
HEAD = {False: "lm_head", True: "model.embed_tokens"}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-llama3-rope": {},
    "llama-linear-rope": {},
    "llama-yarn": {},
    "llama-biased-tied": {},
    "mistral-window": {"sliding_window": None},
    "qwen2": {},
    "qwen2.5-yarn": {},
    "qwen3": {},
    "gemma3": {"query_pre_attn_scalar": 16},
    "gemma3-one-kv-head": {"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention"] * 4},
}
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen2.5": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3",
}


def write(source: Path, target: Path, kind: str = "f32") -> Path:
    write_gguf(source, target, kind, "tiny", {"tokenizer.ggml.eos_token_id": 2}, unreported)
    return target


def logits(make_runner, make_driver, path: Path, **options: Any) -> torch.Tensor:
    driver = make_driver(make_runner(path, dtype="float32", **options))
    driver.add(0, TOKENS)
    return driver.runner.logits(driver.output({0: len(TOKENS)}))


def in_dtype(source: Path, target: Path, dtype: torch.dtype) -> Path:
    """A copy of a checkpoint whose numbers are of another type."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    save_file({name: each.to(dtype) for name, each in tensors.items()}, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.parametrize("name", MODELS)
def test_a_file_gives_the_logits_of_its_checkpoint(name, tiny_model, make_runner, make_driver, tmp_path):
    tiny = tiny_model(name, **MODELS[name])
    path = write(tiny.path, tmp_path / "model.gguf")
    ours, whole = (logits(make_runner, make_driver, each) for each in (path, tiny.path))
    # Files state llama3's frequencies as quotients.
    assert torch.equal(ours, whole) if "llama3" not in name else (ours - whole).abs().max() <= 1e-4 * whole.abs().max()
    theirs = tiny.logits(TOKENS)
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


@pytest.mark.parametrize("name", ["llama", "llama-llama3-rope", "mistral-window", "qwen2", "qwen3", "gemma3"])
def test_transformers_reads_a_file_to_the_same_model(name, tiny_model, tmp_path):
    transformers = pytest.importorskip("transformers")
    # Its reader does not read how wide a head of these families is.
    width = {"qwen2": {"head_dim": 8}, "qwen3": {"head_dim": 128}}.get(name, {})
    tiny = tiny_model(name, **MODELS[name], **width)
    write(tiny.path, tmp_path / "model.gguf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    found, expected = theirs.state_dict(), tiny.oracle.state_dict()
    assert found.keys() == expected.keys()
    for each, tensor in expected.items():
        torch.testing.assert_close(found[each], tensor, rtol=0, atol=1e-6, msg=each)
    for setting in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rms_norm_eps"):
        assert getattr(theirs.config, setting) == pytest.approx(getattr(tiny.oracle.config, setting)), setting


@pytest.mark.parametrize("name", MODELS)
def test_tensors_have_the_names_that_the_library_knows(name, tiny_model, tmp_path):
    tiny = tiny_model(name, **MODELS[name])
    reader = gguf.GGUFReader(write(tiny.path, tmp_path / "model.gguf"))
    architecture = ARCHITECTURES[name.partition("-")[0]]
    assert reader.fields["general.architecture"].contents() == architecture
    [known] = [each for each, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture]
    names = gguf.get_tensor_name_map(known, tiny.oracle.config.num_hidden_layers)
    expected = {
        names.get_name(each, try_suffixes=(".weight", ".bias"))
        for each in load_file(tiny.path / "model.safetensors")
        if not (each == "lm_head.weight" and tiny.oracle.config.tie_word_embeddings)
    }
    own = {"rope_freqs.weight"} if "llama3" in name else set()
    assert {tensor.name for tensor in reader.tensors} == expected | own


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_checkpoint_of_the_same_type_is_written_to_the_bit(
    name, kind, dtype, tiny_model, make_runner, make_driver, tmp_path
):
    source = in_dtype(tiny_model(name, **MODELS[name]).path, tmp_path / "source", dtype)
    path = write(source, tmp_path / "model.gguf", kind)
    assert torch.equal(*(logits(make_runner, make_driver, each) for each in (path, source)))


@pytest.mark.parametrize("kind", [kind for kind in GGUF_TYPES if kind.startswith("q")])
@pytest.mark.parametrize("tied", [False, True])
def test_blocks_are_those_of_the_library(kind, tied, tiny_model, make_runner, make_driver, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "sapwood_worker.model.quantizer.write_gguf._PART", 640
    )  # the last part of a matrix is a smaller one
    tiny = tiny_model("qwen2", **WIDE, tie_word_embeddings=tied)
    path = write(tiny.path, tmp_path / "model.gguf", kind)
    reader = gguf.GGUFReader(path)
    assert reader.fields["general.file_type"].contents() == GGUF_TYPES[kind]
    stored = {tensor.name: tensor for tensor in reader.tensors}
    asked, eight = gguf.GGMLQuantizationType[kind.upper()], gguf.GGMLQuantizationType.Q8_0
    head = "token_embd.weight" if tied else "output.weight"
    assert ("output.weight" in stored) != tied
    for ours, theirs in (
        ("model.layers.1.mlp.down_proj", "blk.1.ffn_down"),
        ("model.layers.2.self_attn.k_proj", "blk.2.attn_k"),
        ("model.embed_tokens", "token_embd"),
        ("lm_head", head.removesuffix(".weight")),
    ):
        tensor = stored[f"{theirs}.weight"]
        type_ = eight if f"{theirs}.weight" == head else asked
        assert tensor.tensor_type == type_
        weight = tiny.oracle.get_parameter(f"{ours}.weight").detach().numpy()
        np.testing.assert_array_equal(tensor.data, gguf.quantize(weight, type_))
    assert stored["blk.0.attn_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    rounded = copy.deepcopy(tiny.oracle)
    for name, weight in rounded.named_parameters():
        if weight.dim() > 1:
            type_ = eight if name.startswith(HEAD[tied]) else asked
            weight.data = torch.from_numpy(gguf.dequantize(gguf.quantize(weight.detach().numpy(), type_), type_))
    with torch.inference_mode():
        theirs = rounded(torch.tensor([TOKENS])).logits[0]
    kept, widened = (logits(make_runner, make_driver, path, stored_weights=each) for each in ("keep", "widen"))
    assert (widened - theirs).abs().max() <= 1e-4 * theirs.abs().max()
    assert (kept - theirs).norm() < 0.02 * theirs.norm()


def test_of_a_model_that_reads_pictures_the_language_part_is_written(tiny_model, make_runner, make_driver, tmp_path):
    tiny = tiny_model("gemma3", query_pre_attn_scalar=16)
    source = shutil.copytree(tiny.path, tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    wrapped = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    wrapped["vision_tower.patches.weight"] = torch.ones(3, 3)
    save_file(wrapped, source / "model.safetensors", {"format": "pt"})
    inner = json.loads((source / "config.json").read_text())
    outer = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": inner,
        "vision_config": {"hidden_size": 3},
    }
    (source / "config.json").write_text(json.dumps(outer))
    ours = logits(make_runner, make_driver, write(source, tmp_path / "model.gguf"))
    theirs = tiny.logits(TOKENS)
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def test_rows_without_whole_blocks_are_float16_and_named(tiny_model, tmp_path):
    source = tiny_model("llama", hidden_size=64, intermediate_size=80, num_attention_heads=4).path
    wide = write_gguf(source, tmp_path / "model.gguf", "q4_0", "tiny", {}, unreported)
    assert wide == [f"blk.{layer}.ffn_down.weight" for layer in (0, 1, 2, 3)]
    types = {each.name: each.tensor_type for each in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert types["blk.3.ffn_down.weight"] == gguf.GGMLQuantizationType.F16
    assert types["blk.3.ffn_up.weight"] == gguf.GGMLQuantizationType.Q4_0


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A family and settings of a model of it."""
    name = draw(st.sampled_from(["llama", "mistral-window", "qwen2", "qwen3", "gemma3"]))
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    layers = draw(st.integers(1, 3))
    width = 8 * draw(st.integers(1, 4))
    changes: dict[str, Any] = {
        "hidden_size": heads * 2 * draw(st.integers(2, 9)), "intermediate_size": 8 * draw(st.integers(1, 12)), "head_dim": width,
        "num_hidden_layers": layers, "num_key_value_heads": kv_heads, "num_attention_heads": heads,
        "tie_word_embeddings": draw(st.booleans()), "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5, 3e-5])),
        "vocab_size": draw(st.integers(64, 130)), "max_position_embeddings": draw(st.sampled_from([128, 1000, 4096])),
    }  # fmt: skip
    theta = draw(st.sampled_from([500.0, 1e4, 1e6]))
    scaling = draw(
        st.sampled_from(
            [
                {"rope_type": "default"},
                {"rope_type": "linear", "factor": 3.0},
                {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
                {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.3},
            ]
        )
    )
    changes["rope_parameters"] = {**scaling, "rope_theta": theta}
    if name == "llama":
        changes |= {"attention_bias": draw(st.booleans()), "mlp_bias": draw(st.booleans())}
    elif name == "mistral-window":
        changes["sliding_window"] = None
    elif name == "gemma3":
        pattern = draw(st.integers(1, 3))
        kinds = ["full_attention" if (layer + 1) % pattern == 0 else "sliding_attention" for layer in range(layers)]
        local = {"rope_type": "default", "rope_theta": draw(st.sampled_from([300.0, 1e4]))}
        full = {"rope_theta": theta} | ({"rope_type": "linear", "factor": 3.0} if len(scaling) > 1 else scaling)
        changes |= {"layer_types": kinds, "query_pre_attn_scalar": width, "sliding_window": draw(st.integers(3, 40))}
        changes["final_logit_softcapping"] = draw(st.sampled_from([None, 8.0]))
        changes["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
    return name, changes


@settings(max_examples=25)
@given(drawn=checkpoints())
def test_any_checkpoint_is_read_back(drawn, make_runner, make_driver, tmp_path_factory):
    name, changes = drawn
    folder = tmp_path_factory.mktemp("drawn")
    tiny = make_tiny(name, folder / "model", **changes)
    path = write(tiny.path, folder / "model.gguf")
    ours, theirs = logits(make_runner, make_driver, path), tiny.logits(TOKENS)
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()
    shutil.rmtree(folder)


def changed(source: Path, target: Path, changes: dict[str, Any]) -> Path:
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "gpt2",
            {},
            r"config\.json: gpt2: no GGUF file of it can be written \(of these one can: gemma3, llama, mistral, ",
        ),
        ("mistral-window", {}, r"config\.json: sliding_window or layer_types: a GGUF file of llama cannot say"),
        ("qwen3-window", {}, r"config\.json: sliding_window or layer_types: a GGUF file of qwen3 cannot say"),
        ("gemma3", {}, r"config\.json: query_pre_attn_scalar: a GGUF file of gemma3 cannot say"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "llama with a head that classifies"),
        (
            "llama",
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}},
            "config.json says that it is quantised",
        ),
    ],
)
def test_what_a_file_cannot_say_is_refused_by_name_and_leaves_nothing(name, changes, message, tiny_model, tmp_path):
    source = changed(tiny_model(name).path, tmp_path / "model", changes)
    with pytest.raises(ConfigError, match=message):
        write(source, tmp_path / "model.gguf")
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def test_a_model_that_classifies_is_refused(tmp_path, tiny_model):
    source = changed(
        tiny_model("qwen2").path,
        tmp_path / "model",
        {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 2},
    )
    with pytest.raises(ConfigError, match="qwen2 with a head that classifies: no GGUF file of it can be written"):
        write(source, tmp_path / "model.gguf")


def test_numbers_that_the_type_cannot_hold_are_refused(tiny_model, tmp_path):
    source = shutil.copytree(tiny_model("llama").path, tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = 1e6
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds 1000000\.0, which F16 cannot"):
        write(source, tmp_path / "model.gguf", "f16")
    assert not list(tmp_path.glob("*.gguf*")) + list(tmp_path.glob(".*"))
    assert write(source, tmp_path / "model.gguf", "bf16").is_file()
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = math.nan
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="holds nan, which BF16 cannot"):
        write(source, tmp_path / "other.gguf", "bf16")


def test_a_target_that_exists_or_is_being_written_is_refused_and_kept(tiny_model, tmp_path):
    source, target = tiny_model("llama").path, tmp_path / "model.gguf"
    with (tmp_path / ".model.gguf.unfinished").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"model\.gguf: another process is writing it"):
            write(source, target)
        assert [each.name for each in tmp_path.iterdir()] == [".model.gguf.unfinished"]
    write(source, target)  # what a killed process left is overwritten
    before = target.read_bytes()
    with pytest.raises(ConfigError, match=r"model\.gguf is there already"):
        write(source, target)
    assert target.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["model.gguf"]


WRITER = """
    import os, resource, signal, sys
    from pathlib import Path
    from sapwood_worker.model.quantizer.write_gguf import write_gguf

    def progress(what, done, total):
        if sys.argv[3] == "kill" and done > total / 2:
            os.kill(os.getpid(), signal.SIGKILL)

    if sys.argv[3].isdigit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
    write_gguf(Path(sys.argv[1]), Path(sys.argv[2]), "f32", "tiny", {}, progress)
"""


def run_writer(source: Path, target: Path, how: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(source), str(target), how]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_process_that_is_killed_leaves_no_file_of_that_name(tiny_model, tmp_path):
    source, target = tiny_model("llama").path, tmp_path / "model.gguf"
    assert run_writer(source, target, "kill").returncode == -signal.SIGKILL
    assert not target.exists()
    assert (tmp_path / ".model.gguf.unfinished").stat().st_size > 0
    assert run_writer(source, target, "").returncode == 0
    assert [each.name for each in tmp_path.iterdir()] == ["model.gguf"]
    assert load_model(target, "auto", torch.float32, device_ops("cpu"), context_length=None, threads=1, seed=0).config


@pytest.mark.parametrize("limit", [100, 100_000])
def test_a_write_that_fails_names_the_file_and_leaves_nothing(limit, tiny_model, tmp_path):
    done = run_writer(tiny_model("llama").path, tmp_path / "model.gguf", str(limit))
    assert done.returncode == 1
    assert f"File too large: '{tmp_path / 'model.gguf'}'" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_disk_without_room_is_noticed_before_numbers_are_written(tiny_model, small_disk):
    with pytest.raises(ConfigError, match=r"model\.gguf: it takes 1\.\d MB, and 0\.\d MB of its disk are free"):
        write(tiny_model("wide").path, small_disk / "model.gguf")
    assert not list(small_disk.iterdir())


def test_the_command_offers_the_types_that_are_written():
    assert set(_GGUF) == GGUF_TYPES.keys()
