"""Dense modules behind a model: vectors equal those of the same products in plain torch, in any chunks."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sapwood_common.errors import ConfigError
from sapwood_testing.worker.model_scheduler import scheduler_for
from sapwood_worker.core.scheduler.request import Request, SamplingParams
from sapwood_worker.model.checkpoint.sentence_config import read_sentence_config


def write_dense(folder: Path, sizes: list[int], activation: str, bias: bool, **changes: Any) -> list[Any]:
    """Adds ``modules.json`` with a mean and dense modules to a model; returns the same modules of torch."""
    layers, modules = [], [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    modules.append({"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"})
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    torch.manual_seed(3)
    for number, (inputs, outputs) in enumerate(pairwise(sizes), 2):
        path = folder / f"{number}_Dense"
        path.mkdir()
        layer = torch.nn.Linear(inputs, outputs, bias=bias)
        save_file(
            {f"linear.{name}": each.detach() for name, each in layer.named_parameters()}, path / "model.safetensors"
        )
        settings = {
            "in_features": inputs, "out_features": outputs, "bias": bias,
            "activation_function": f"torch.nn.modules.{activation}",
        }  # fmt: skip
        (path / "config.json").write_text(json.dumps({**settings, **changes}))
        modules.append({"type": "sentence_transformers.models.Dense", "path": path.name})
        layers.append(torch.nn.Sequential(layer, torch.nn.Tanh() if "Tanh" in activation else torch.nn.Identity()))
    modules.append({"type": "sentence_transformers.models.Normalize", "path": "9_Normalize"})
    (folder / "modules.json").write_text(json.dumps(modules))
    return layers


def vectors(runner: Any, prompts: list[list[int]], step_tokens: int) -> list[np.ndarray[Any, Any]]:
    scheduler, found = scheduler_for(runner.info, max_running=4, max_step_tokens=step_tokens), {}
    for serial, prompt in enumerate(prompts):
        scheduler.add(Request(serial, f"e{serial}", prompt, SamplingParams(max_tokens=1), pooling="mean"))
    while scheduler.has_work:
        for output in scheduler.update(runner.execute(scheduler.schedule())):
            found[output.serial] = np.frombuffer(output.embedding, np.float32)
    return [found[serial] for serial in range(len(prompts))]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("step_tokens", [7, 512])
def test_dense_modules_behind_a_decoder_are_computed_in_any_chunks(
    tiny_model: Any, make_runner: Any, tmp_path: Path, bias: bool, step_tokens: int
) -> None:
    tiny = tiny_model("llama")
    path = tmp_path / "model"
    path.mkdir()
    for file in tiny.path.iterdir():
        (path / file.name).symlink_to(file)
    width = tiny.oracle.config.hidden_size
    layers = write_dense(path, [width, 40, 24], "linear.Identity", bias)
    runner = make_runner(path)
    assert runner.info.embedding_size == 24
    assert runner.info.normalizes
    chance = random.Random(4)
    prompts = [[chance.randrange(3, 90) for _ in range(length)] for length in (1, 40, 13)]
    for prompt, vector in zip(prompts, vectors(runner, prompts, step_tokens), strict=True):
        with torch.inference_mode():
            expected = tiny.oracle.model(torch.tensor([prompt])).last_hidden_state[0].mean(0)
            for layer in layers:
                expected = layer(expected)
        np.testing.assert_allclose(vector, expected.numpy(), rtol=1e-4, atol=1e-4)


def test_a_dense_module_with_tanh_behind_an_encoder_is_computed(tmp_path: Path) -> None:
    import transformers

    from sapwood_worker.model.runner.encoder_runner import EncoderRunner
    from sapwood_worker.model.runner.options import RunnerOptions

    config = transformers.BertConfig(
        vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, attn_implementation="eager",
    )  # fmt: skip
    oracle = transformers.BertModel(config).eval()
    oracle.save_pretrained(tmp_path)
    [layer] = write_dense(tmp_path, [32, 20], "activation.Tanh", True)
    runner = EncoderRunner(RunnerOptions(model_path=tmp_path, max_running=4, threads=1))
    chance = random.Random(4)
    prompts = [[chance.randrange(3, 90) for _ in range(length)] for length in (1, 40, 13)]
    for prompt, vector in zip(prompts, vectors(runner, prompts, 512), strict=True):
        with torch.inference_mode():
            expected = layer(oracle(torch.tensor([prompt])).last_hidden_state[0].mean(0))
        np.testing.assert_allclose(vector, expected.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"in_features": "wide"}, "in_features is 'wide'; it can be a number from 1"),
        ({"in_features": 31}, "in_features is 31; the model gives"),
        ({"activation_function": "torch.nn.GELU"}, "activation_function GELU is not supported"),
        ({"activation_function": "torch.nn.Tanh"}, "Tanh is not supported after a decoder"),
        ({"out_features": 25}, r"linear.weight is \[24, .*\], not \[25, "),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_dense_module_that_does_not_fit_is_named(
    tiny_model: Any, make_runner: Any, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    tiny = tiny_model("llama")
    path = tmp_path / "model"
    path.mkdir()
    for file in tiny.path.iterdir():
        (path / file.name).symlink_to(file)
    write_dense(path, [tiny.oracle.config.hidden_size, 24], "linear.Identity", True, **changes)
    with pytest.raises(ConfigError, match=message):
        make_runner(path)


def test_a_dense_module_takes_what_the_module_before_it_gives(tmp_path: Path) -> None:
    write_dense(tmp_path, [8, 4, 2], "linear.Identity", True, in_features=8)
    with pytest.raises(ConfigError, match="in_features is 8; the module before it gives 4 numbers"):
        read_sentence_config(tmp_path, "mean", 64)
