"""Weights that are exchanged between steps: logits are those of a runner that was loaded with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sapwood_common.errors import InvalidArgumentError, UnimplementedError
from sapwood_testing.models.other_weights import other_checkpoint, other_weights
from sapwood_testing.models.same_logits import tokens_of
from sapwood_testing.worker.ranks.group_of_threads import run_group
from sapwood_testing.worker.split_models import SHAPE
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.records.weights import WeightBucket

OPTIONS: dict[str, Any] = {"page_size": 8, "num_pages": 256, "max_running": 16}
PROMPT = tokens_of(37)


def logits(make_driver: Any, runner: ModelRunner) -> Tensor:
    driver = make_driver(runner)
    driver.add(0, PROMPT)
    whole = driver.runner.logits(driver.output({0: len(PROMPT)}))
    driver.add(1, PROMPT[:9])
    driver.execute({1: 9})
    for _ in range(3):  # the third decode may come from a recording
        driver.execute({1: 1})
    return torch.cat((whole, driver.runner.logits(driver.output({1: 1}))))


def update(runner: Any, path: Path, number: int = 1, **more: Any) -> None:
    runner.stage_weights(WeightBucket(number, 10 * number, str(path), **more))
    runner.ready_weights(number, partial=False)
    runner.exchange_weights(number, keep=True)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama-biased-tied", {}),
        ("gemma3", {}),
        ("hunyuan", {}),
        ("qwen3", {"quantization": "int8"}),
        ("qwen3", {"quantization": "fp8"}),
        ("phi3", {"dtype": "bfloat16"}),
        ("deepseek-v3", {}),
        ("qwen2-moe", {}),
        ("gpt-oss", {}),
    ],
)
def test_updated_models_compute_as_loaded_ones_and_roll_back(
    tiny_model: Any, make_runner: Any, make_driver: Any, tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    tiny = tiny_model(name, **(SHAPE if options.get("quantization") else {}))
    other = other_checkpoint(tiny.path, tmp_path / "other", 1)
    runner, loaded = make_runner(tiny.path, **options), make_runner(other, **options)
    before, wanted = logits(make_driver, runner), logits(make_driver, loaded)
    assert not torch.equal(before, wanted)
    update(runner, other)
    assert torch.equal(logits(make_driver, runner), wanted)
    digest = runner.weights.digest
    assert len(digest) == 16
    runner.exchange_weights(0, keep=True)
    assert torch.equal(logits(make_driver, runner), before) and runner.weights.digest == b""
    runner.exchange_weights(0, keep=False)
    assert torch.equal(logits(make_driver, runner), wanted) and runner.weights.digest == digest
    assert not runner.weights.rolls_back


def test_buckets_of_an_update_are_exchanged_together_and_the_rest_stays(
    tiny_model: Any, make_runner: Any, make_driver: Any, tmp_path: Path
) -> None:
    tiny = tiny_model("llama")
    new = other_weights(tiny.path, 2)
    names = sorted(name for name in new if ".mlp." in name or "q_proj" in name)
    for at, part in enumerate((names[::2], names[1::2])):
        save_file({each: new[each] for each in part}, tmp_path / f"{at}.safetensors")
    runner = make_runner(tiny.path)
    before = logits(make_driver, runner)
    for at in range(2):
        runner.stage_weights(WeightBucket(1, at, str(tmp_path / f"{at}.safetensors")))
        assert torch.equal(logits(make_driver, runner), before), "what is staged does not count yet"
    assert runner.ready_weights(1, partial=True).tensors == len(names)
    runner.exchange_weights(1, keep=False)
    whole = other_checkpoint(tiny.path, tmp_path / "whole", 2)
    kept = {name: tensor for name, tensor in other_weights(tiny.path, 2).items() if name in names}
    save_file({**_stored(tiny.path), **kept}, whole / "model.safetensors", {"format": "pt"})
    assert torch.equal(logits(make_driver, runner), logits(make_driver, make_runner(whole)))


def _stored(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def _wrong(kind: str, new: dict[str, Tensor]) -> dict[str, Tensor]:
    name = "model.layers.1.mlp.up_proj.weight"
    match kind:
        case "unknown":
            new["model.layers.1.mlp.side_proj.weight"] = new[name].clone()
        case "shape":
            new[name] = new[name][:, :-1].contiguous()
        case "missing":
            del new[name]
        case "codes":
            new[name] = new[name].to(torch.int8)
    return new


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("unknown", "side_proj"),
        ("shape", "up_proj.weight has shape"),
        ("missing", "layers.1.mlp.up_proj.weight are missing"),
        ("codes", "weights of this kind cannot be read"),
        ("checksum", "has checksum"),
    ],
)
def test_wrong_tensors_are_named_and_change_nothing(
    tiny_model: Any, make_runner: Any, make_driver: Any, tmp_path: Path, kind: str, said: str
) -> None:
    tiny = tiny_model("llama")
    runner = make_runner(tiny.path)
    before = logits(make_driver, runner)
    save_file(_wrong(kind, other_weights(tiny.path, 3)), tmp_path / "new.safetensors")
    checksums = {"model.norm.weight": bytes(16)} if kind == "checksum" else {}
    with pytest.raises(InvalidArgumentError, match=said):
        update(runner, tmp_path / "new.safetensors", checksums=checksums)
    assert torch.equal(logits(make_driver, runner), before)
    update(runner, other_checkpoint(tiny.path, tmp_path / "other", 1), number=2)
    assert not torch.equal(logits(make_driver, runner), before)


@pytest.mark.parametrize(("size", "stages"), [(2, 1), (1, 2)])
def test_ranks_exchange_their_parts_or_none_does(
    tiny_model: Any, make_runner: Any, make_driver: Any, tmp_path: Path, size: int, stages: int
) -> None:
    """The last layer's tensor is wrong in the second folder, which with stages only the last rank can see."""
    tiny = tiny_model("llama", **SHAPE)
    good, bad = (other_checkpoint(tiny.path, tmp_path / name, 4) for name in ("good", "bad"))
    new = other_weights(tiny.path, 5)
    last = max(name for name in new if name.endswith("down_proj.weight"))
    save_file({**new, last: new[last][:-8].contiguous()}, bad / "model.safetensors", {"format": "pt"})

    def say(leader: Any) -> list[int]:
        return make_driver(leader).generate({0: PROMPT, 1: PROMPT[:11]}, 5)[0]

    def work(leader: Any) -> tuple[list[int], list[int], list[int]]:
        before = say(leader)
        with pytest.raises(InvalidArgumentError, match="down_proj"):
            update(leader, bad)
        kept = say(leader)
        update(leader, good, number=2)
        return before, kept, say(leader)

    before, kept, after = run_group(size, tiny.path, work, stages=stages, **OPTIONS)
    assert before == kept
    assert after == say(make_runner(good, **OPTIONS)) != before


def test_weights_that_are_mapped_from_a_file_are_refused_by_name(
    make_runner: Any, tmp_path: Path, tiny_model: Any
) -> None:
    runner = make_runner(tiny_model("llama").path)
    runner.weights._model.layers[0].mlp.down.method.renewal = "refuse"
    with pytest.raises(UnimplementedError, match=r"layers\.0\.mlp\.down_proj\.weight"):
        update(runner, tiny_model("llama").path)
