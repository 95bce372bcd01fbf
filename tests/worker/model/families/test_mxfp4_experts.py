"""gpt-oss with experts in MXFP4, as published: transformers' logits with the numbers that these stand for."""

from __future__ import annotations

import copy
import json
import math
import random
import shutil
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from sapwood_common.errors import ConfigError
from sapwood_kernels.experts.reference import ClampedGate
from sapwood_kernels.ops.cpu import CpuOps
from sapwood_kernels.ops.factory import device_ops
from sapwood_testing.worker.split_models import load, logits_of
from sapwood_testing.worker.thread_ranks import ThreadGroup, run_ranks
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.layers.layer import LayerContext
from sapwood_worker.model.layers.sparse.experts import JoinedExperts
from sapwood_worker.model.quantization.linear_method import Stored
from sapwood_worker.model.quantization.registry import LinearMethods
from sapwood_worker.model.weight_slot import StoredTensor
from sapwood_worker.records.expert_load import ExpertMove

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
TOKENS = random.Random(3).choices(range(3, 97), k=41)
SHAPE = {"hidden_size": 64, "intermediate_size": 128}


def in_mxfp4(shape, generator):
    """Random blocks and scales of a matrix [E, N, K] and, number by number, what they stand for."""
    experts, rows, columns = shape
    blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
    middle = 127 - round(math.log2(columns) / 2) - 1
    scales = torch.randint(middle - 1, middle + 2, blocks.shape[:3], dtype=torch.uint8, generator=generator)
    numbers = torch.empty(experts, rows, columns // 32, 32)
    signed = torch.tensor(VALUES + [-each for each in VALUES])
    for place in range(16):
        byte = blocks[..., place].long()
        numbers[..., 2 * place], numbers[..., 2 * place + 1] = signed[byte % 16], signed[byte // 16]
    return blocks, scales, (numbers * 2.0 ** (scales.double()[..., None] - 127)).float().view(shape)


@pytest.fixture(scope="module")
def published(tiny_model, tmp_path_factory):
    """A directory in the published layout, with shards and an index, and transformers' model with the same numbers."""
    tiny = tiny_model("gpt-oss", **SHAPE)
    path = shutil.copytree(tiny.path, tmp_path_factory.mktemp("published") / "model")
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    oracle = copy.deepcopy(tiny.oracle)
    generator = torch.Generator().manual_seed(8)
    for index, layer in enumerate(oracle.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            wide = getattr(layer.mlp.experts, name)
            blocks, scales, numbers = in_mxfp4(wide.transpose(1, 2).shape, generator)
            with torch.no_grad():
                wide.copy_(numbers.transpose(1, 2))
            stem = f"model.layers.{index}.mlp.experts.{name}"
            del tensors[stem]
            tensors |= {f"{stem}_blocks": blocks, f"{stem}_scales": scales}
    names = sorted(tensors)
    files = {name: f"model-{1 + at % 3:05}-of-00003.safetensors" for at, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name].contiguous() for name in names if files[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (path / "config.json").write_text(json.dumps(config))
    with torch.inference_mode():
        return path, oracle(torch.tensor([TOKENS])).logits[0]


def assert_near(ours, theirs):
    assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max()


def test_logits_equal_transformers(published, make_runner, make_driver):
    path, theirs = published
    driver = make_driver(make_runner(path))
    driver.add(0, TOKENS)
    assert_near(torch.cat([driver.runner.logits(driver.output({0: size})) for size in (30, 1, 10)]), theirs)


def test_experts_are_held_as_they_are_stored(published):
    loaded = load(published[0])
    assert loaded.quantization == "fp4 as stored"
    held = {name: slot.target for name, slot in loaded.model.weights().items() if ".experts." in name}
    bits = 8 * sum(each.nbytes for each in held.values() if each.dtype == torch.uint8)
    assert bits == 4.25 * sum(3 * 6 * 64 * 128 for _ in loaded.model.layers)


def test_ranks_have_part_of_each_expert(published):
    path, theirs = published

    def work(group):
        parallel = Parallel(tp=group)
        return logits_of(load(path, parallel), TOKENS, parallel)

    for part in run_ranks(2, work):
        assert_near(part, theirs)


def test_a_part_that_is_no_whole_blocks_is_refused_by_name():
    name = "model.layers.0.mlp.experts"
    stored = Stored({f"{name}.gate_up_proj_blocks": StoredTensor((2, 192, 2, 16), "U8")})
    ops = device_ops("cpu")
    rank = ThreadGroup(0, [torch.empty(0)] * 2, threading.Barrier(2))
    linear = LinearMethods("none", torch.float32, ops, stored)
    context = LayerContext(torch.float32, ops, linear, Parallel(tp=rank), name)
    with pytest.raises(ConfigError, match=rf"{name}.down_proj: columns 0 to 48 are no whole blocks of 32"):
        JoinedExperts(64, 96, 2, 1, activation=ClampedGate(), context=context)


def test_a_missing_tensor_of_blocks_is_named(published, tmp_path):
    path = shutil.copytree(published[0], tmp_path / "damaged")
    name = "model.layers.2.mlp.experts.down_proj_scales"
    for file in path.glob("*.safetensors"):
        save_file({key: each for key, each in load_file(file).items() if key != name}, file)
    with pytest.raises(ConfigError, match=f"damaged: tensor {name} is missing"):
        load(path)


def test_experts_multiplied_as_stored_move_between_ranks(published, monkeypatch):
    path, theirs = published
    moves = [ExpertMove(0, 0, 3), ExpertMove(0, 3, 0), ExpertMove(0, 7, 2), ExpertMove(1, 3, 5)]

    def work(group):
        parallel = Parallel(tp=group, ep=group, redundant_experts=2)
        loaded = load(path, parallel)
        loaded.model.move_experts(moves)
        return logits_of(loaded, TOKENS, parallel)

    with pytest.raises(ConfigError, match=r"--expert-parallel redundant: model.layers.0.mlp.experts: on this device"):
        run_ranks(2, work)
    monkeypatch.setattr(CpuOps, "groups_experts", True)  # as on a GPU, multiplied by the reference of its kernels
    for part in run_ranks(2, work):
        assert_near(part, theirs)
