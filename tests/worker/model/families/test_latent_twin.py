"""Full-rank factors of a model's keys and values make a model with latent attention that says the same."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from sapwood_kernels.ops.factory import device_ops
from sapwood_testing.worker.latent_twin import write_demo_twin, write_twin
from sapwood_worker.model.loader import load_model

TWIN = "from sapwood_testing.worker.latent_twin import TWIN"
NAMES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "rms_norm_eps", "sliding_window", "query_pre_attn_scalar", "rope_parameters",
    "layer_types", "final_logit_softcapping",
)  # fmt: skip
TIE = 2e-5


def load(path: Path):
    return load_model(
        path, "auto", torch.float32, device_ops("cpu"), context_length=None, threads=1, seed=0, stored_weights="widen"
    )


def test_a_tiny_models_twin_gives_its_logits(plugin, tiny_model, make_runner, make_driver, tmp_path):
    plugin("sapwood.model_families", "gemma3_latent", TWIN, "TWIN")
    tiny, twin = tiny_model("gemma3-one-kv-head"), tmp_path / "twin"
    twin.mkdir()
    write_twin(load(tiny.path), twin, **{name: getattr(tiny.oracle.config, name) for name in NAMES})
    driver = make_driver(make_runner(twin, page_size=4))
    tokens = [3 + i * 7 % 90 for i in range(61)]
    driver.add(2, tokens)
    ours = torch.cat([driver.runner.logits(driver.output({2: size})) for size in (50, 8, 1, 1, 1)])
    theirs = tiny.logits(tokens)
    assert float((ours - theirs).abs().max()) <= 1e-4 * float(theirs.abs().max())


@pytest.mark.slow
@pytest.mark.model
def test_the_demo_models_twin_says_what_it_says(plugin, demo_runner, make_runner, make_driver):
    plugin("sapwood.model_families", "gemma3_latent", TWIN, "TWIN")
    with tempfile.TemporaryDirectory() as folder:
        write_demo_twin(Path(folder))
        twin = make_runner(Path(folder), num_pages=1024, max_running=4)
    # "The capital of France is", "Water is made of the atoms hydrogen and oxygen", and one longer than the window of 512.
    prompts = {0: [2, 818, 5279, 529, 7001, 563], 1: [2, 7925, 563, 1603, 529, 506], 2: [2, *range(1000, 1550)]}
    texts = make_driver(twin).generate(prompts, 24)
    assert texts[0][:8] == [506, 5279, 529, 506, 2891, 529, 7001, 236761]
    driver = make_driver(demo_runner)
    for slot, prompt in prompts.items():
        text = texts[slot]
        driver.add(slot, prompt + text[:-1])
        logits = driver.runner.logits(driver.output({slot: len(prompt) + len(text) - 1}))[len(prompt) - 1 :]
        gaps = logits.amax(-1) - logits[torch.arange(len(text)), torch.tensor(text)]
        assert float(gaps.max()) <= TIE * float(
            logits.abs().max()
        )  # its likeliest token, or as likely but for rounding
