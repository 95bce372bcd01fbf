"""What is no adapter for the model is refused by the name of the tensor, the module or the setting, before it is kept."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sapwood_common.errors import InvalidArgumentError, UnimplementedError
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.records.lora import Lora, LoraFacts

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model.model.layers"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def runner(tiny_model: Any, make_runner: Any) -> ModelRunner:
    found: ModelRunner = make_runner(tiny_model("qwen3").path, lora_slots=1, lora_rank=16)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An adapter of two projections of each layer of the model, 48 wide, with 6 query heads of 16 and 3 others."""
    draw = torch.Generator().manual_seed(0)
    sizes = {"self_attn.q_proj": (96, 48), "mlp.down_proj": (48, 80)}
    tensors = {}
    for layer in range(4):
        for name, (rows, columns) in sizes.items():
            tensors[f"{PREFIX}.{layer}.{name}.lora_A.weight"] = torch.randn(4, columns, generator=draw)
            tensors[f"{PREFIX}.{layer}.{name}.lora_B.weight"] = torch.randn(rows, 4, generator=draw)
    save_file(tensors, str(tmp_path / WEIGHTS))
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "bias": "none"}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    return tmp_path


def read(runner: ModelRunner, path: Path) -> LoraFacts:
    return runner.read_lora(Lora(7, "mine", str(path)))


def refuses(runner: ModelRunner, path: Path, *words: str) -> str:
    """The error's text, which has all of these words."""
    with pytest.raises(InvalidArgumentError) as refused:
        read(runner, path)
    for word in words:
        assert word in str(refused.value)
    assert refused.value.field == "lora_path"
    assert runner.loras is not None and not runner.loras._adapters, "nothing is kept"
    return str(refused.value)


def configure(folder: Path, **settings: Any) -> None:
    given = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(given | settings))


def rewrite(folder: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(str(folder / WEIGHTS))
    change(tensors)
    save_file(tensors, str(folder / WEIGHTS))


def test_facts_say_what_was_read_and_the_digest_is_of_its_bytes(runner: ModelRunner, folder: Path) -> None:
    assert runner.loras is not None
    facts = read(runner, folder)
    assert (facts.number, facts.rank, facts.modules) == (7, 4, ("mlp.down_proj", "self_attn.q_proj"))
    assert facts.bytes == 4 * 4 * sum(site.place.cells for site in runner.loras._sites)
    assert read(runner, folder).digest == facts.digest
    configure(folder, lora_alpha=9)
    other = read(runner, folder).digest
    rewrite(folder, lambda tensors: next(iter(tensors.values())).add_(1))
    assert len({facts.digest, other, read(runner, folder).digest}) == 3
    runner.drop_lora(7)
    assert not runner.loras._adapters


def test_a_worker_without_slots_says_how_to_get_some(tiny_model: Any, make_runner: Any, folder: Path) -> None:
    with pytest.raises(UnimplementedError, match="--lora-slots"):
        read(make_runner(tiny_model("qwen3").path), folder)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"peft_type": "IA3"}, ["peft_type is 'IA3'"]),
        ({"use_dora": True}, ["use_dora is True", "merge"]),
        ({"bias": "all"}, ["bias is 'all'"]),
        ({"lora_bias": True}, ["lora_bias"]),
        ({"modules_to_save": ["lm_head"]}, ["modules_to_save is ['lm_head']"]),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, ["target_parameters"]),
        ({"trainable_token_indices": [3]}, ["trainable_token_indices"]),
        ({"fan_in_fan_out": True}, ["fan_in_fan_out"]),
        ({"layer_replication": [[0, 4], [2, 5]]}, ["layer_replication"]),
        ({"init_lora_weights": "pissa"}, ["init_lora_weights is 'pissa'", "converted"]),
        ({"something_new": {"x": 1}}, ["something_new", "not known"]),
        ({"r": 0}, ["r is 0"]),
        ({"r": "4"}, ["r is '4'"]),
        ({"r": True}, ["r is True"]),
        ({"r": 8}, [f"{PREFIX}.0.mlp.down_proj.lora_A.weight", "rank 4", "says 8"]),
        ({"lora_alpha": None}, ["lora_alpha is None"]),
        ({"lora_alpha": float("nan")}, ["lora_alpha is nan"]),
        ({"use_rslora": 1}, ["use_rslora is 1"]),
        ({"target_modules": 3}, ["target_modules is 3"]),
        ({"target_modules": ["q_proj"]}, ["mlp.down_proj.lora_A.weight is unexpected", "target_modules"]),
        ({"target_modules": ["q_proj", "down_proj", "o_proj"]}, ["model.layers.0.self_attn.o_proj.lora_A.weight is missing"]),
        ({"rank_pattern": {"q_proj": 2}}, ["self_attn.q_proj", "rank 4", "says 2"]),
        ({"rank_pattern": ["q_proj"]}, ["rank_pattern is ['q_proj']"]),
        ({"alpha_pattern": {"(a+)+": 2}}, ["alpha_pattern", "too intricate"]),
        ({"alpha_pattern": {"(": 2}}, ["alpha_pattern has the pattern"]),
        ({"alpha_pattern": {".?" * 40 + "X": 2}}, ["alpha_pattern", "too intricate"]),
        ({"alpha_pattern": {"(.|.)" * 40 + "X": 2}}, ["alpha_pattern", "too intricate"]),
        ({"alpha_pattern": {"a{99999999999}": 2}}, ["alpha_pattern has the pattern"]),
        ({"layers_to_transform": "1"}, ["layers_to_transform is '1'"]),
        ({"r": 10**400}, ["r is 1000"]),
        ({"lora_alpha": -(10**400)}, ["lora_alpha is -1000"]),
        ({"rank_pattern": {"q_proj": 10**400}}, ["rank_pattern.q_proj is 1000"]),
        ({"lora_alpha": 1e308}, ["lora_B.weight times its scale, 2.5e+307", "torch.float32 does not hold"]),
        ({"\x1b" + "x" * 100_000: 1}, [" ... ", "not known"]),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_named(
    runner: ModelRunner, folder: Path, settings: dict[str, Any], words: list[str]
) -> None:
    configure(folder, **settings)
    assert len(refuses(runner, folder, *words)) < 2000


@pytest.mark.parametrize(
    "pattern", ["q_proj", r"model\.layers\.(0|1)\.self_attn\.q_proj", r".*\.(?:q|k)_proj", "[a-z]+_proj?"]
)
def test_patterns_that_trainers_write_are_read(runner: ModelRunner, folder: Path, pattern: str) -> None:
    configure(folder, rank_pattern={pattern: 4})
    assert read(runner, folder).rank == 4
    runner.drop_lora(7)


def test_patterns_that_take_long_in_all_are_refused(
    runner: ModelRunner, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sapwood_worker.model.lora.peft._PATTERN_SECONDS", 0.0)
    configure(folder, rank_pattern={f"layer{number}": 4 for number in range(1000)})
    refuses(runner, folder, "its patterns take more than")


@pytest.mark.parametrize("depth", range(800, 1000, 3))
def test_a_setting_that_is_nested_too_deeply_is_named(runner: ModelRunner, folder: Path, depth: int) -> None:
    """What could just be read could not be shown in the error."""
    given = json.loads((folder / CONFIG).read_text())
    text = json.dumps(given | {"use_dora": "HERE"}).replace('"HERE"', "[" * depth + "]" * depth)
    (folder / CONFIG).write_text(text)
    refuses(runner, folder, CONFIG)


def renamed(old: str, new: str) -> Callable[[Tensors], None]:
    """Moves the tensor whose name ends so to another name of a module."""

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


Q0 = f"{PREFIX}.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(f"{Q0}.lora_B.weight"), ["0.self_attn.q_proj.lora_B.weight is missing"]),
        (lambda t: t.pop(f"{Q0}.lora_A.weight"), ["0.self_attn.q_proj.lora_A.weight is missing"]),
        (lambda t: [t.pop(n) for n in list(t) if Q0 in n], ["0.self_attn.q_proj.lora_A.weight is missing: target_modules"]),
        (lambda t: t.update({f"{Q0}.lora_A.weight": torch.zeros(4, 47)}), [f"{Q0}.lora_A.weight", "[4, 47]", "[rank, 48]"]),
        (lambda t: t.update({f"{Q0}.lora_B.weight": torch.zeros(95, 4)}), [f"{Q0}.lora_B.weight", "[95, 4]", "[96, rank]"]),
        (lambda t: t.update({f"{Q0}.lora_B.weight": torch.zeros(96, 3)}), [f"{Q0}.lora_B.weight", "rank 3", "rank 4"]),
        (lambda t: t.update({f"{Q0}.lora_A.weight": torch.zeros(4)}), [f"{Q0}.lora_A.weight has shape [4]"]),
        (lambda t: t.update({f"{Q0}.lora_A.weight": torch.zeros(0, 48)}), [f"{Q0}.lora_A.weight has shape [0, 48]"]),
        (lambda t: t.update({f"{Q0}.lora_A.weight": torch.zeros(17, 48)}), [f"{Q0}.lora_A.weight", "rank 17", "rank=17"]),
        (lambda t: t.update({f"{Q0}.lora_A.weight": torch.zeros(4, 48).int()}), [f"{Q0}.lora_A.weight", "type 'I32'"]),
        (lambda t: t[f"{Q0}.lora_A.weight"].fill_(float("inf")), [f"{Q0}.lora_A.weight", "not finite"]),
        (renamed("layers.3.", "layers.4."), ["no linear module model.layers.4.mlp.down_proj"]),
        (renamed("0.self_attn.q_proj", "0.self_attn.z_proj"), ["no linear module model.layers.0.self_attn.z_proj"]),
        (renamed("0.self_attn.q_proj", "0.input_layernorm"), ["input_layernorm", "a norm is no linear module"]),
        (renamed("model.layers.0.self_attn.q_proj", "lm_head"), ["lm_head", "output head are not"]),
        (
            lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 97)}),
            ["lora_embedding_A", "adapters of embeddings are not served"],
        ),
        (lambda t: t.update({"base_model.model.lm_head.weight": torch.zeros(97, 48)}), ["lm_head.weight", "modules_to_save"]),
        (lambda t: t.update({f"{Q0}.lora_magnitude_vector.weight": torch.zeros(96)}), ["lora_magnitude_vector", "DoRA"]),
        (lambda t: t.update({f"{Q0}.lora_B.bias": torch.zeros(96)}), [f"{Q0}.lora_B.bias", "lora_bias"]),
        (lambda t: t.update({f"{Q0}.base_layer.bias": torch.zeros(96)}), ["base_layer.bias", "bias none"]),
        (lambda t: t.update({f"{Q0}.lora_C.weight": torch.zeros(4, 48)}), [f"{Q0}.lora_C.weight", "no matrix of LoRA"]),
        (lambda t: t.clear(), ["holds no tensors"]),
    ],
)  # fmt: skip
def test_a_wrong_tensor_is_named_with_its_module(
    runner: ModelRunner, folder: Path, change: Callable[[Tensors], Any], words: list[str]
) -> None:
    rewrite(folder, change)
    refuses(runner, folder, *words)


def header_of(content: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(header: Any, data: bytes) -> bytes:
    packed = json.dumps(header).encode()
    return len(packed).to_bytes(8, "little") + packed + data


def shifted(header: dict[str, Any], by: int) -> dict[str, Any]:
    name = next(name for name in header if "lora_A" in name)
    begin, end = header[name]["data_offsets"]
    return header | {name: header[name] | {"data_offsets": [begin + by, end + by]}}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda content: content[:5], ["no safetensors file"]),
        (lambda content: (1 << 60).to_bytes(8, "little") + content[8:], ["no safetensors file"]),
        (lambda content: content[:40], ["ends in its header"]),
        (lambda content: content[:-1], ["bytes; its tensors take"]),
        (lambda content: content + b"x", ["bytes; an adapter of this model has at most"]),
        (lambda content: with_header([1], b""), ["no safetensors file"]),
        (lambda content: pickle.dumps({"a": 1}) * 100, ["no safetensors file"]),
        (lambda content: content[:9] + b"\xff" + content[10:], ["cannot be read as JSON"]),
        (lambda content: with_header(shifted(header_of(content)[0], 4), header_of(content)[1]), ["overlap, or leave gaps"]),
        (lambda content: with_header({f"{Q0}.lora_A.weight": {"dtype": "F32"}}, b""), [f"{Q0}.lora_A.weight", "damaged"]),
        (
            lambda content: with_header(
                {f"{Q0}.lora_A.weight": {"dtype": "F32", "shape": [4, 48], "data_offsets": [0, 8]}}, b"12345678"
            ),
            [f"{Q0}.lora_A.weight takes 8 bytes"],
        ),
        (
            lambda content: with_header(
                {f"{Q0}.lora_A.weight": {"dtype": ["F32"], "shape": [4, 48], "data_offsets": [0, 768]}}, b""
            ),
            [f"{Q0}.lora_A.weight", "damaged"],
        ),
        (
            lambda content: with_header(
                {f"{Q0}.lora_A.weight": {"dtype": "F32", "shape": {}, "data_offsets": [0, 4]}}, b"1234"
            ),
            [f"{Q0}.lora_A.weight has shape []"],
        ),
        (
            lambda content: with_header(
                {f"{Q0}.{number}.lora_A.weight": {"dtype": "F32"} for number in range(10_000)}, b""
            ),
            ["its header has", "of an adapter of this model has at most"],
        ),
        (
            lambda content: with_header({f"{Q0}{'x' * 50_000}.lora_A.weight": {"dtype": "F32"}}, b""),
            ["tensor base_model", " ... "],
        ),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named(
    runner: ModelRunner, folder: Path, damage: Callable[[bytes], bytes], words: list[str]
) -> None:
    (folder / WEIGHTS).write_bytes(damage((folder / WEIGHTS).read_bytes()))
    assert len(refuses(runner, folder, str(folder / WEIGHTS), *words)) < 2000


def test_files_that_are_missing_or_no_files_are_named(runner: ModelRunner, folder: Path) -> None:
    refuses(runner, folder / "nothing", "is no folder with an adapter")
    refuses(runner, folder / WEIGHTS, "is no folder with an adapter")
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    refuses(runner, folder, "adapter_model.bin, which may run code")
    (folder / "adapter_model.bin").unlink()
    refuses(runner, folder, WEIGHTS, "cannot be read")
    os.mkfifo(folder / WEIGHTS)
    refuses(runner, folder, WEIGHTS, "is no file")
    (folder / CONFIG).write_text("[" * 100_000)
    refuses(runner, folder, CONFIG, "cannot be read as JSON")
    (folder / CONFIG).write_bytes(b" " * ((1 << 20) + 1))
    refuses(runner, folder, CONFIG, "at most 1048576")
    (folder / CONFIG).unlink()
    os.mkfifo(folder / CONFIG)
    refuses(runner, folder, CONFIG, "is no file")


@pytest.mark.parametrize(
    ("model", "module", "shape", "words"),
    [
        ("deepseek-v3", "model.layers.0.self_attn.kv_b_proj", (108, 24), ["kv_b_proj", "folded into the attention"]),
        (
            "qwen3-moe",
            "model.layers.1.mlp.experts.3.gate_proj",
            (24, 48),
            ["mlp.experts.3.gate_proj", "without experts"],
        ),
        ("qwen3-moe", "model.layers.1.mlp.gate", (12, 48), ["model.layers.1.mlp.gate", "chooses experts"]),
    ],
)
def test_modules_that_take_no_adapters_are_named_with_the_reason(
    tiny_model: Any, make_runner: Any, tmp_path: Path, model: str, module: str, shape: tuple[int, int], words: list[str]
) -> None:
    tensors = {
        f"base_model.model.{module}.lora_A.weight": torch.ones(4, shape[1]),
        f"base_model.model.{module}.lora_B.weight": torch.ones(shape[0], 4),
    }
    save_file(tensors, str(tmp_path / WEIGHTS))
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["all"]}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    refuses(make_runner(tiny_model(model).path, lora_slots=1, lora_rank=16), tmp_path, *words)


def gguf_adapter(path: Path, tensors: dict[str, np.ndarray], **metadata: Any) -> Path:
    """A file of llama.cpp's; settings of ``None`` are left out."""
    import gguf

    settings: dict[str, Any] = {"architecture": "llama", "type": "adapter", "lora": "lora", "alpha": 8.0} | metadata
    writer = gguf.GGUFWriter(path, settings["architecture"])
    if settings["type"] is not None:
        writer.add_string("general.type", settings["type"])
    if settings["lora"] is not None:
        writer.add_string("adapter.type", settings["lora"])
    if settings["alpha"] is not None:
        writer.add_float32("adapter.lora.alpha", settings["alpha"])
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


A, B = "blk.0.attn_q.weight.lora_a", "blk.0.attn_q.weight.lora_b"


@pytest.mark.parametrize(
    ("changes", "metadata", "words"),
    [
        ({}, {"type": "model"}, ["general.type is 'model'"]),
        ({}, {"lora": None}, ["adapter.type None"]),
        ({}, {"architecture": "qwen3"}, ["general.architecture is 'qwen3'", "'llama'"]),
        ({}, {"alpha": None}, ["adapter.lora.alpha is None"]),
        ({B: None}, {}, [f"tensor {B} is missing"]),
        ({A: np.zeros((4, 47), np.float32)}, {}, [A, "[4, 47]", "[rank, 48]"]),
        ({B: np.zeros((96, 3), np.float32)}, {}, [B, "rank 3", "rank 4"]),
        ({"blk.0.attn_q.weight": np.zeros((4, 48), np.float32)}, {}, ["blk.0.attn_q.weight of", "no matrix of LoRA"]),
        ({"token_embd.weight.lora_a": np.zeros((4, 48), np.float32)}, {}, ["token_embd.weight.lora_a", "embeddings are not"]),
        ({A: np.full((4, 48), np.nan, np.float32)}, {}, [A, "not finite"]),
    ],
)  # fmt: skip
def test_a_wrong_gguf_adapter_is_refused_by_name(
    tiny_model: Any,
    make_runner: Any,
    tmp_path: Path,
    changes: dict[str, Any],
    metadata: dict[str, Any],
    words: list[str],
) -> None:
    tensors = {A: np.ones((4, 48), np.float32), B: np.ones((96, 4), np.float32)} | changes
    there = {name: values for name, values in tensors.items() if values is not None}
    path = gguf_adapter(tmp_path / "adapter.gguf", there, **metadata)
    refuses(make_runner(tiny_model("llama").path, lora_slots=1, lora_rank=16), path, str(path), *words)
