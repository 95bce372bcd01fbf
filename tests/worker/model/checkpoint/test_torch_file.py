"""Weights in torch's own format give what safetensors give; a pickle that asks for more than tensors runs nothing."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sapwood_common.errors import ConfigError
from sapwood_testing.models.same_logits import assert_same_logits, tokens_of
from sapwood_testing.worker.split_models import load, logits_of
from sapwood_worker.model.checkpoint.torch_file import TorchFile


def saved(path: Path, source: Path, kind: str) -> Path:
    """The model of ``source`` with its weights in torch's format: ``single``, ``shards`` or ``legacy``."""
    shutil.copytree(source, path, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {name: each for file in source.glob("*.safetensors") for name, each in load_file(file).items()}
    if kind != "shards":
        torch.save(tensors, path / "pytorch_model.bin", _use_new_zipfile_serialization=kind == "single")
        return path
    shards = {name: f"pytorch_model-{number % 2 + 1:05}-of-00002.bin" for number, name in enumerate(sorted(tensors))}
    for file in set(shards.values()):
        torch.save({name: tensors[name] for name, place in shards.items() if place == file}, path / file)
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": shards}))
    return path


@pytest.mark.parametrize("kind", ["single", "shards", "legacy"])
@pytest.mark.parametrize("name", ["qwen3", "phi3", "gemma3"])
def test_a_model_in_torchs_format_has_the_logits_of_its_safetensors(
    tiny_model: Any, tmp_path: Path, name: str, kind: str
) -> None:
    tiny, tokens = tiny_model(name), tokens_of(23)
    found = logits_of(load(saved(tmp_path / "model", tiny.path, kind)), tokens)
    assert torch.equal(found, logits_of(load(tiny.path), tokens))
    assert_same_logits(found, tiny.logits(tokens))


def test_safetensors_come_before_torchs_format(tiny_model: Any, tmp_path: Path) -> None:
    tiny = tiny_model("qwen3")
    shutil.copytree(tiny.path, tmp_path / "model")
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"no weights at all")
    load(tmp_path / "model")


class Runs:
    """A pickle of it calls a function of its reader's."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self._trace,)


@pytest.mark.parametrize("kind", ["pickle", "torch", "garbage", "cut", "list", "nested"])
def test_what_is_no_file_of_tensors_is_refused_by_name_and_runs_nothing(
    tiny_model: Any, tmp_path: Path, kind: str
) -> None:
    path = saved(tmp_path / "model", tiny_model("qwen3").path, "single")
    file, trace = path / "pytorch_model.bin", tmp_path / "trace"
    match kind:
        case "pickle":
            file.write_bytes(pickle.dumps({"a": Runs(trace)}))
        case "torch":
            torch.save({"a": Runs(trace)}, file)
        case "garbage":
            file.write_bytes(b"\x00" * 1000)
        case "cut":
            file.write_bytes(file.read_bytes()[:-2000])
        case "list":
            torch.save([torch.zeros(3)], file)
        case "nested":
            torch.save({"state_dict": {"a": torch.zeros(3)}}, file)
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin: (cannot be read|holds other things than tensors)"):
        load(path)
    assert not trace.exists()


@pytest.mark.parametrize("kind", ["sparse", "meta", "complex", "quantized", "nested", "expanded"])
def test_tensors_that_are_no_dense_numbers_are_refused_by_name(tiny_model: Any, tmp_path: Path, kind: str) -> None:
    path = saved(tmp_path / "model", tiny_model("qwen3").path, "single")
    file, name = path / "pytorch_model.bin", "model.layers.0.mlp.down_proj.weight"
    tensors = torch.load(file, weights_only=True)
    given = tensors[name]
    match kind:
        case "sparse":
            tensors[name] = given.to_sparse()
        case "meta":
            tensors[name] = given.to("meta")
        case "complex":
            tensors[name] = given.to(torch.complex64)
        case "quantized":
            tensors[name] = torch._empty_affine_quantized(given.shape, scale=1.0, zero_point=0, dtype=torch.qint8)
        case "nested":
            tensors[name] = torch.nested.nested_tensor([given])
        case "expanded":
            tensors[name] = given[:1, :1].clone().expand(given.shape)
    torch.save(tensors, file)
    with pytest.raises(ConfigError, match=rf"pytorch_model\.bin: tensor {name} "):
        load(path)


def test_parameters_are_read_as_tensors_without_gradients(tiny_model: Any, tmp_path: Path) -> None:
    source = tiny_model("qwen3").path
    path = saved(tmp_path / "model", source, "single")
    tensors = torch.load(path / "pytorch_model.bin", weights_only=True)
    torch.save({name: torch.nn.Parameter(each) for name, each in tensors.items()}, path / "pytorch_model.bin")
    with TorchFile(path / "pytorch_model.bin") as file:
        assert not any(file.get_tensor(name).requires_grad for name in file)
    assert torch.equal(logits_of(load(path), tokens_of(23)), logits_of(load(source), tokens_of(23)))
