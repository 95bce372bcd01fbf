"""Logits of families with experts equal transformers' to float32 rounding, in chunks, mixed steps and split over ranks."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from sapwood_common.errors import ConfigError
from sapwood_testing.models.same_logits import assert_mixed_steps_equal, assert_same_logits, tokens_of
from sapwood_testing.models.sparse_models import SPARSE
from sapwood_testing.worker.split_models import SHAPE, load, logits_of
from sapwood_testing.worker.thread_ranks import run_ranks
from sapwood_worker.model.checkpoint.hf_config import read_hf_config
from sapwood_worker.model.distributed.parallel import Parallel


@pytest.mark.parametrize("name", SPARSE)
def test_logits_of_chunks_and_decodes_together_equal_transformers(tiny_model, make_runner, make_driver, name):
    tiny = tiny_model(name)
    assert_mixed_steps_equal(make_driver(make_runner(tiny.path, page_size=8)), tiny)


@pytest.mark.parametrize("whole_experts", [False, True])
@pytest.mark.parametrize("name", [name for name in SPARSE if name != "dots1-no-windows"])
def test_logits_of_two_ranks_are_those_of_one(tiny_model, name, whole_experts):
    width = {"hidden_size": 128} if SPARSE[name][1].get("hidden_size") else {}
    path = tiny_model(name, **SHAPE, **width).path
    tokens = tokens_of(23)
    whole = logits_of(load(path), tokens)

    def work(group):
        parallel = Parallel(tp=group, ep=group) if whole_experts else Parallel(tp=group)
        return logits_of(load(path, parallel), tokens, parallel)

    parts = run_ranks(2, work)
    assert torch.equal(parts[0], parts[1])
    assert_same_logits(parts[0], whole)


def changed(path, folder, **settings):
    """A copy of a model whose settings are others."""
    path = shutil.copytree(path, folder / "changed")
    found = json.loads((path / "config.json").read_text()) | settings
    (path / "config.json").write_text(json.dumps(found))
    return path


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("ernie4-5-moe", {"use_bias": True}),
        ("minimax-m2", {"scoring_func": "softmax"}),
        ("minimax-m2", {"qk_norm_type": "per_head"}),
        ("llama4", {"num_experts_per_tok": 2}),
        ("llama4", {"no_rope_layers": [1, 0]}),
        ("llama4", {"layer_types": ["chunked_attention"] * 4 + ["sliding_attention"]}),
    ],
)
def test_what_is_not_done_is_refused_by_name(tiny_model, tmp_path, name, setting):
    path = changed(tiny_model(name).path, tmp_path, **setting)
    with pytest.raises(ConfigError, match=next(iter(setting))):
        read_hf_config(path)


def test_published_minimax_files_say_how_many_numbers_of_a_head_turn(tiny_model, tmp_path):
    path = changed(
        tiny_model("minimax-m2").path, tmp_path, rope_parameters=None, rope_theta=3000.0, rotary_dim=8, head_dim=16
    )
    _, config = read_hf_config(path)
    assert {rope.rotated for rope in config.ropes} == {8} and {rope.theta for rope in config.ropes} == {3000.0}


@pytest.mark.parametrize(
    "setting", [{"attention_chunk_size": 50}, {"attn_temperature_tuning": False}, {"floor_scale": 40}]
)
def test_llama4s_chunks_and_growing_queries_are_as_its_files_say(
    tiny_model, tmp_path, make_runner, make_driver, setting
):
    """Logits change with each setting, as transformers' do: neither is without effect at this length."""
    tokens = tokens_of(60)
    usual, tiny = tiny_model("llama4").logits(tokens), tiny_model("llama4", **setting)
    driver = make_driver(make_runner(tiny.path, page_size=8))
    driver.add(0, tokens)
    ours = driver.runner.logits(driver.output({0: 60}))
    assert_same_logits(ours, tiny.logits(tokens))
    assert (ours - usual).abs().max() > 0.01 * usual.abs().max()


def test_llama4_is_read_from_files_that_hold_more_than_its_text_model(tiny_model, tmp_path):
    source, path = tiny_model("llama4").path, tmp_path / "published"
    path.mkdir()
    tensors = {f"language_model.{name}": each for name, each in load_file(source / "model.safetensors").items()}
    save_file(tensors | {"vision_model.x": torch.ones(2)}, path / "model.safetensors")
    text = json.loads((source / "config.json").read_text())
    whole = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": text}
    (path / "config.json").write_text(json.dumps(whole))
    tokens = tokens_of(9)
    assert torch.equal(logits_of(load(path), tokens), logits_of(load(source), tokens))
