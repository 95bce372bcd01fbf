"""Checkpoints in the forms in which models are published: heads, prefixes, drafts, shards, old names."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sapwood_common.errors import ConfigError
from sapwood_kernels.ops.factory import device_ops
from sapwood_worker.model.checkpoint.encoder_weights import load_encoder
from sapwood_worker.model.checkpoint.safetensors_source import checkpoint_files
from sapwood_worker.model.families.encoders.bert import BERT
from sapwood_worker.model.loader import LoadedModel, load_model


def load(path: Path) -> LoadedModel:
    return load_model(path, "auto", torch.float32, device_ops("cpu"), context_length=None, threads=1, seed=0)


def changed(source: Path, folder: Path, tensors: Any = None, **config: Any) -> Path:
    """A copy of a model with other settings and tensors."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    (folder / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | config))
    if tensors is not None:
        save_file(tensors(load_file(source / "model.safetensors")), folder / "model.safetensors")
    return folder


def logits_of(path: Path, make_runner: Any, make_driver: Any) -> torch.Tensor:
    driver = make_driver(make_runner(path))
    driver.add(0, list(range(3, 40)))
    return driver.runner.logits(driver.output({0: 37}))


def test_a_head_of_its_own_is_used_although_the_configuration_says_tied(
    tiny_model, make_runner, make_driver, tmp_path, caplog
) -> None:
    own = tiny_model("llama")
    path = changed(own.path, tmp_path / "model", tie_word_embeddings=True)
    with caplog.at_level(logging.WARNING):
        assert load(path).config.tie_word_embeddings is False
    assert "lm_head.weight is another: it is used" in caplog.text
    ours = logits_of(path, make_runner, make_driver)
    assert (ours - own.logits(list(range(3, 40)))).norm() < 1e-4 * ours.norm()


def test_a_head_that_is_a_copy_of_the_embedding_stays_tied(tiny_model, tmp_path) -> None:
    def copied(tensors: dict[str, Any]) -> dict[str, Any]:
        return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}

    path = changed(tiny_model("llama-biased-tied").path, tmp_path / "model", copied)
    assert load(path).config.tie_word_embeddings is True


def test_an_embedding_model_has_names_without_model_and_no_head(tiny_model, make_runner, make_driver, tmp_path) -> None:
    def bare(tensors: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("model."): each for name, each in tensors.items() if not name.startswith("lm_head")}

    whole = tiny_model("qwen3")
    path = changed(whole.path, tmp_path / "model", bare, tie_word_embeddings=False)
    loaded = load(path)
    assert loaded.headless
    runner = make_runner(path)
    assert (runner.info.generates, runner.info.embedding_size) == (False, 48)
    named = changed(path, tmp_path / "named", architectures=["Qwen3Model"])
    assert load(named).headless
    assert not load(whole.path).headless


WRAPPED = [
    ("llama", "LlavaForConditionalGeneration", "language_model.model.", "language_model.lm_head."),
    ("llama", "LlavaForConditionalGeneration", "model.language_model.", "lm_head."),
    ("mistral-window", "Mistral3ForConditionalGeneration", "language_model.model.", "language_model.lm_head."),
    ("qwen2", "Qwen2_5_VLForConditionalGeneration", "model.", "lm_head."),
    ("qwen3", "Qwen3VLForConditionalGeneration", "model.language_model.", "lm_head."),
    ("deepseek-v3", "KimiK25ForConditionalGeneration", "language_model.model.", "language_model.lm_head."),
]


@pytest.mark.parametrize(("name", "architecture", "model", "head"), WRAPPED)
def test_a_wrapped_model_computes_what_its_language_part_does(
    name, architecture, model, head, tiny_model, make_runner, make_driver, tmp_path
) -> None:
    alone = tiny_model(name)
    text = json.loads((alone.path / "config.json").read_text())
    shutil.copytree(alone.path, tmp_path / "model")
    outer = {"architectures": [architecture], "text_config": text, "vision_config": {"depth": 2}, "image_token_id": 5}
    (tmp_path / "model" / "config.json").write_text(json.dumps(outer))
    tensors = {
        each.replace("lm_head.", head) if each.startswith("lm_head.") else each.replace("model.", model, 1): tensor
        for each, tensor in load_file(alone.path / "model.safetensors").items()
    }
    others = (
        "vision_tower.patch.weight",
        "multi_modal_projector.linear.weight",
        "model.visual.merger.weight",
        "visual.x",
    )
    save_file(tensors | {each: torch.zeros(3) for each in others}, tmp_path / "model" / "model.safetensors")
    ours = logits_of(tmp_path / "model", make_runner, make_driver)
    assert (ours - alone.logits(list(range(3, 40)))).norm() < 1e-4 * ours.norm()
    missing = next(
        each for each in tensors if each.endswith("layers.1.mlp.down_proj.weight") or "layers.1.mlp.experts" in each
    )
    save_file({k: v for k, v in tensors.items() if k != missing}, tmp_path / "model" / "model.safetensors")
    with pytest.raises(ConfigError, match="tensors? " + re.escape(missing[:30])):
        load(tmp_path / "model")


def test_layers_that_draft_without_their_setting_are_left_out(tiny_model, tmp_path) -> None:
    names = ("eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight")

    def drafting(tensors: dict[str, Any]) -> dict[str, Any]:
        inside = {f"model.layers.4.{each}": torch.zeros(48) for each in names}
        return tensors | inside | {"mtp.0.weight": torch.zeros(3), "model.mtp_block.weight": torch.zeros(3)}

    assert load(changed(tiny_model("deepseek-v3").path, tmp_path / "a", drafting)).config.draft_layers == 1
    path = changed(
        tiny_model("llama").path, tmp_path / "b", lambda tensors: tensors | {"model.layers.4.extra": torch.zeros(3)}
    )
    with pytest.raises(ConfigError, match=r"layers\.4\.extra is unexpected: num_hidden_layers of config.json is 4"):
        load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 4096}, "vocab_size and hidden_size"),
        ({"num_hidden_layers": 4000}, "tensors of layer 3999 are missing, the last of num_hidden_layers"),
        ({"intermediate_size": 2**30}, "intermediate_size 1073741824"),
        ({"num_attention_heads": 2**30}, "configuration asks for"),
        ({"vocab_size": 2**30}, "vocab_size and hidden_size"),
    ],
)
def test_sizes_of_another_model_are_refused_before_memory_is_taken(changes, message, tiny_model, tmp_path) -> None:
    with pytest.raises(ConfigError, match=message):
        load(changed(tiny_model("llama").path, tmp_path / "model", **changes))


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "../other/model.safetensors"}}, r"weight_map\.a is '\.\./other"),
        ({"weight_map": {"a": "/etc/x.safetensors"}}, r"weight_map\.a is '/etc"),
        ({"weight_map": {"a": "x/../../y.safetensors"}}, r"weight_map\.a"),
        ({"weight_map": {"a": "model.onnx"}}, r"weight_map\.a is 'model\.onnx'"),
        ({"weight_map": {"a": ["x"]}}, r"weight_map\.a is \['x'\]"),
        ({"weight_map": {"a": None}}, r"weight_map\.a is None"),
        ({"weight_map": []}, "no weight_map"),
        ({"weight_map": {}}, "no weight_map"),
        ([], "no JSON object"),
    ],
)
def test_an_index_that_names_other_than_files_beside_it_is_refused(index, message, tmp_path) -> None:
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=rf"{INDEX}: .*{message}"):
        checkpoint_files(tmp_path)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", INDEX, "generation_config.json", "tokenizer_config.json"]
)
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_file_is_refused_and_keeps_nobody_waiting(name, kind, tiny_model, tmp_path) -> None:
    path = changed(tiny_model("llama").path, tmp_path / "model")
    (path / name).unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path / name)
        case "folder":
            (path / name).mkdir()
        case _:
            (path / name).symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=name):
        load(path)


def test_damaged_files_end_in_the_one_error_that_names_the_file(tiny_model, tmp_path) -> None:
    path = changed(tiny_model("llama").path, tmp_path / "model")
    rng, refused = random.Random(5), 0
    whole = {name: (path / name).read_bytes() for name in ("config.json", "model.safetensors")}
    header = 8 + int.from_bytes(whole["model.safetensors"][:8], "little")
    for number in range(160):
        name = ("config.json", "model.safetensors")[number % 2]
        content = bytearray(whole[name])
        for _ in range(rng.choice((1, 3))):
            at = rng.randrange(min(len(content), header))
            match rng.randrange(3):
                case 0:
                    content[at] ^= 1 << rng.randrange(8)
                case 1:
                    del content[at : at + rng.randrange(1, 9)]
                case _:
                    content[at:at] = rng.choice((b"9", b"-", b"[", b"{", b'"', b"e9", b"null,", b"\xff"))
        (path / name).write_bytes(content)
        try:
            load(path)
        except ConfigError as error:
            refused += 1
            assert str(path) in str(error)
        (path / name).write_bytes(whole[name])
    assert refused > 80


def test_a_bert_of_2019_in_shards_gives_what_it_gave(tmp_path) -> None:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    shape = {
        "vocab_size": 60,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    oracle = BertModel(BertConfig(**shape)).eval()
    oracle.save_pretrained(tmp_path)
    tensors = {
        "bert."
        + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    } | {"cls.predictions.bias": torch.zeros(60)}
    (tmp_path / "model.safetensors").unlink()
    shards = [dict(list(tensors.items())[start::2]) for start in (0, 1)]
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, tmp_path / name)
    places = {each: name for name, shard in zip(names, shards, strict=True) for each in shard}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    model, _ = load_encoder(tmp_path, BERT, torch.float32, torch.device("cpu"), dummy=False)
    tokens = torch.tensor([[1, 7, 9, 30, 2]])
    with torch.inference_mode():
        ours, theirs = model(tokens, torch.ones_like(tokens).bool()), oracle(tokens).last_hidden_state
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
