"""GGUF files of dense families give transformers' logits."""

from __future__ import annotations

import pytest
import torch

from sapwood_testing.models.gguf_files import write_gguf


@pytest.mark.parametrize(
    ("name", "architecture", "changes"),
    [
        ("gemma", "gemma", {}),
        ("gemma2", "gemma2", {"query_pre_attn_scalar": 16}),  # the files do not say, and it is then a head's width
        ("granite", "granite", {}),
        ("olmo2", "olmo2", {}),
        ("qwen2.5-yarn", "qwen2", {}),
        ("smollm3", "smollm3", {}),
    ],
)
def test_logits_of_a_gguf_file_equal_transformers(
    tiny_model, make_runner, make_driver, tmp_path, name, architecture, changes
):
    tiny = tiny_model(name, **changes)
    runner = make_runner(write_gguf(tmp_path / "model.gguf", tiny.oracle, architecture), dtype="float32")
    assert runner.info.architecture == architecture
    tokens = torch.randint(3, 97, (83,), generator=torch.Generator().manual_seed(0)).tolist()
    driver = make_driver(runner)
    driver.add(0, tokens)
    ours, theirs = runner.logits(driver.output({0: 83})), tiny.logits(tokens)
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()
