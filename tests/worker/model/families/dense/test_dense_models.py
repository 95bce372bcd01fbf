"""Logits of the dense families equal transformers' to float32 rounding, in chunks, mixed steps and split over ranks."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from sapwood_common.errors import ConfigError
from sapwood_testing.models.dense_models import DENSE
from sapwood_testing.models.same_logits import assert_mixed_steps_equal, assert_same_logits, tokens_of
from sapwood_testing.worker.split_models import SHAPE, load, logits_of
from sapwood_testing.worker.thread_ranks import run_ranks
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.families import registry


@pytest.mark.parametrize("name", DENSE)
def test_logits_of_chunks_and_decodes_together_equal_transformers(tiny_model, make_runner, make_driver, name):
    tiny = tiny_model(name)
    assert_mixed_steps_equal(make_driver(make_runner(tiny.path, page_size=8)), tiny)


@pytest.mark.parametrize("name", DENSE)
def test_logits_of_two_ranks_are_those_of_one(tiny_model, name):
    width = {"hidden_size": 128} if DENSE[name][1].get("hidden_size") else {}
    path = tiny_model(name, **SHAPE, **width).path
    tokens = tokens_of(23)
    whole = logits_of(load(path), tokens)
    parts = run_ranks(2, lambda group: logits_of(load(path, Parallel(tp=group)), tokens, Parallel(tp=group)))
    assert torch.equal(parts[0], parts[1])
    assert_same_logits(parts[0], whole)


def test_short_contexts_are_divided_by_longropes_short_list(tiny_model, make_runner, make_driver):
    tiny = tiny_model("phi3-longrope")
    tokens = tokens_of(32)
    logits = {}
    for length in (32, 33):
        driver = make_driver(make_runner(tiny.path, context_length=length))
        driver.add(0, tokens)
        logits[length] = driver.runner.logits(driver.output({0: 32}))
    assert_same_logits(logits[32], tiny.logits(tokens))
    assert (logits[33] - logits[32]).abs().max() > 0.1


def test_keys_of_short_and_long_contexts_are_not_exchanged(tiny_model, make_runner):
    def identities(name):
        return [make_runner(tiny_model(name).path, context_length=length).cache_identity() for length in (32, 33, 64)]

    short, long, longer = identities("phi3-longrope")
    assert short != long == longer
    assert len(set(identities("phi3"))) == 1


def test_every_architecture_is_in_the_table_of_models():
    page = (Path(__file__).resolve().parents[5] / "docs" / "models.md").read_text("utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `") and re.search("For|LMHead", line)]
    named = {name for row in rows for name in re.findall(r"`(\w+(?:For|TextModel|LMHeadModel)\w*)`", row)}
    assert named == {name for family in registry.families() for name in family.architectures}
    stored = {name for row in rows for name in re.findall(r"`([\w-]+)`", row.split("|")[3])}
    assert stored == {family.gguf_name or family.name for family in registry.families() if family.from_gguf is not None}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("phi3", {"num_key_value_heads": 2}, r"self_attn.qkv_proj.weight has shape \[192, 96\], .* 160 rows"),
        ("phi3", {"intermediate_size": 64}, r"mlp.gate_up_proj.weight has shape \[160, 96\], .* 128 rows"),
        (
            "phi3-longrope",
            {"rope_parameters": {"rope_type": "yarns"}},
            "rotary embedding type 'yarns' is not supported",
        ),
        ("gemma", {"hidden_act": "relu"}, "hidden_act: activation 'relu' is not supported"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 4 layers"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries for 4 layers"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm is not supported"),
        ("nemotron", {"hidden_act": "silu"}, r"hidden_act: activation 'silu' is not supported \(relu2 is\)"),
        ("starcoder2", {"hidden_act": "gelu"}, "hidden_act: activation 'gelu' is not supported"),
        ("falcon-7b", {"alibi": True}, "alibi is not supported"),
        (
            "falcon-7b",
            {"num_kv_heads": -1, "multi_query": False},
            "num_kv_heads is -1; it can be a whole number from 1",
        ),
        ("gpt2", {"n_head": 0}, "n_head is 0; it can be a whole number from 1"),
        ("gpt2", {"n_inner": "wide"}, "n_inner is 'wide'; it can be a whole number from 1"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"n_embd": 48}, r"has shape \[288\], .* 144 rows"),
        (
            "gpt-neo",
            {"attention_layers": ["global"]},
            "attention_layers has to say global or local for each of 4 layers",
        ),
        ("gpt-neox", {"hidden_act": "mish"}, "hidden_act: activation 'mish' is not supported"),
        ("opt", {"word_embed_proj_dim": 48}, "word_embed_proj_dim other than hidden_size"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before"),
        ("apertus", {"hidden_act": "silu"}, "hidden_act: activation 'silu' is not supported"),
        ("granite", {"num_hidden_layers": 5}, r"tensors of layer 4 are missing, the last of num_hidden_layers"),
    ],
)
def test_what_does_not_fit_is_named(tiny_model, tmp_path, name, changes, message):
    path = shutil.copytree(tiny_model(name).path, tmp_path / "model")
    given = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(given | changes))
    with pytest.raises(ConfigError, match=message):
        load(path)
