"""`sapwood model quantize`: what it writes is read to the same numbers by us and by transformers."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sapwood.cli.main import main
from sapwood_kernels.ops.factory import device_ops
from sapwood_worker.model.loader import load_model
from sapwood_worker.model.quantizer.schemes import round_by_importance, round_groups

TOKENS = list(range(3, 40))


def logits(make_runner, make_driver, path: Path) -> torch.Tensor:
    driver = make_driver(make_runner(path))
    driver.add(0, TOKENS)
    return driver.runner.logits(driver.output({0: len(TOKENS)}))


@pytest.mark.parametrize(("scheme", "size"), [("int4", 0.35), ("int8", 0.45), ("float8", 0.45)])
def test_what_is_written_is_read_by_us_and_by_transformers(
    scheme: str, size: float, tiny, text, tmp_path, capsys, make_runner, make_driver
):
    out = tmp_path / "out"
    assert (
        main(["model", "quantize", str(tiny), str(out), "--scheme", scheme, "--text", str(text), "--device", "cpu"])
        == 0
    )
    said = capsys.readouterr()
    assert "perplexity of" in said.out
    assert "quantising: 100 %" in said.err
    assert not list(tmp_path.glob(".*unfinished"))
    assert (out / "tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()
    assert (out / "model.safetensors").stat().st_size < size * (tiny / "model.safetensors").stat().st_size
    ours, whole = logits(make_runner, make_driver, out), logits(make_runner, make_driver, tiny)
    assert 0.001 < (ours - whole).norm() / whole.norm() < 0.6
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        oracle = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
        theirs = oracle(torch.tensor([TOKENS])).logits[0]
    # Of 8 bits activations are rounded; transformers rounds them after another sum.
    assert (ours - theirs).norm() < (1e-4 if scheme == "int4" else 0.1) * theirs.norm()


def test_gptq_changes_outputs_less_than_rounding_to_the_nearest():
    torch.manual_seed(0)
    weight = torch.randn(64, 128)
    x = torch.randn(512, 16) @ torch.randn(16, 128) + 0.1 * torch.randn(512, 128)  # inputs that hang together
    errors = []
    for codes, scales in (
        round_groups(weight, torch.float32, 32),
        round_by_importance(weight, x.t() @ x, torch.float32, 32),
    ):
        assert codes.abs().max() <= 8
        numbers = (codes.view(64, -1, 32) * scales[..., None]).view(64, 128)
        errors.append(float((x @ (numbers - weight).t()).norm()))
    assert errors[1] < 0.6 * errors[0]


def test_layers_without_whole_groups_stay_wide_and_small_ones_span_files(tiny_model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sapwood_worker.model.quantizer.quantize._SHARD_BYTES", 20_000)
    source, out = tiny_model("llama", intermediate_size=96).path, tmp_path / "out"
    assert main(["model", "quantize", str(source), str(out), "--group-size", "32", "--device", "cpu"]) == 0
    assert "20 projections stay as they are" in capsys.readouterr().out  # those of 48 inputs
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2
    stored = {name: tensor for file in files for name, tensor in load_file(out / file).items()}
    assert stored.keys() == index["weight_map"].keys()
    loaded = load_model(out, "auto", torch.float32, device_ops("cpu"), context_length=None, threads=1, seed=0)
    assert loaded.quantization == "compressed-tensors as stored"
    wide = load_file(source / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(loaded.model.weights()[name].target, wide[name])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["IN", "IN"], "is there already"),
        (["OUT", "OUT2"], "config.json says that it is quantised"),
        (["x.gguf", "OUT3"], "only Hugging Face directories"),
        (["IN", "OUT4", "--text", "IN/nothing"], "nothing"),
        (["IN", "OUT4", "--text", "SHORT"], "tokens are too few"),
    ],
)
def test_what_cannot_be_quantised_is_refused_and_leaves_nothing(words: list[str], message: str, tiny, tmp_path, capsys):
    if "OUT" in words:
        assert main(["model", "quantize", str(tiny), str(tmp_path / "OUT"), "--scheme", "int8", "--device", "cpu"]) == 0
    (tmp_path / "SHORT").write_text("w3 w4 w5")
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    tiny.rename(tmp_path / "IN")
    before = sorted(tmp_path.iterdir())
    given = [word if word.startswith("--") else str(tmp_path / word) for word in words]
    assert main(["model", "quantize", *given, "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
