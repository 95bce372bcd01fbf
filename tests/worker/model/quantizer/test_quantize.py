"""`sapwood model quantize`: what it writes is read to the same numbers by us and by transformers."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sapwood.cli.main import main
from sapwood_kernels.ops.factory import device_ops
from sapwood_testing.vocabularies import CORPUS, trained
from sapwood_tokenizer.vocab.loader import load_tokenizer
from sapwood_worker.model.checkpoint.generation_config import read_sampling_defaults
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


TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture
def chatting(tiny_model, tmp_path) -> Path:
    """A tiny Llama with a byte-level tokenizer, a chat template, defaults of sampling, and rows that no token has."""
    path = shutil.copytree(tiny_model("wide", vocab_size=410).path, tmp_path / "chatting")
    trained(CORPUS * 5, 400, "<|im_start|>", "<|im_end|>").save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "top_k": 20, "eos_token_id": [1, 5]}))
    return path


def test_a_gguf_file_has_the_tokenizer_and_what_else_a_checkpoint_says(
    chatting, tmp_path, capsys, make_runner, make_driver
):
    (tmp_path / "text.txt").write_text(" ".join(CORPUS) * 3)
    out = tmp_path / "out.gguf"
    words = ["model", "quantize", str(chatting), str(out), "--text", str(tmp_path / "text.txt"), "--device", "cpu"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert f"{out}: " in said.out
    assert "perplexity of" in said.out
    assert "writing: 100 %" in said.err
    assert sorted(each.name for each in tmp_path.iterdir()) == ["chatting", "out.gguf", "text.txt"]
    ours, whole = load_tokenizer(out), load_tokenizer(chatting)
    for text in (*CORPUS, "<|im_start|>user\nhi<|im_end|>"):
        assert ours.tokenizer.encode(text).ids == whole.tokenizer.encode(text).ids
    assert (ours.bos_token_id, ours.chat_template) == (whole.bos_token_id, TEMPLATE)
    assert set(ours.eos_token_ids) == set(whole.eos_token_ids) == {1, 5}
    assert ours.vocab_size == whole.vocab_size == 410
    assert read_sampling_defaults(out) == read_sampling_defaults(chatting) == {"temperature": 0.7, "top_k": 20}
    loaded, wide = (
        load_model(path, "auto", torch.float32, device_ops("cpu"), context_length=None, threads=1, seed=0)
        for path in (out, chatting)
    )
    assert loaded.quantization == "gguf as stored"
    assert set(loaded.eos_token_ids) == set(wide.eos_token_ids) == {1, 5}
    ours, whole = logits(make_runner, make_driver, out), logits(make_runner, make_driver, chatting)
    assert (ours - whole).norm() < 0.1 * whole.norm()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["OUT.gguf", "--scheme", "int8"], "OUT: int8 writes a folder; a .gguf file is written with --scheme q8_0, "),
        (["OUT", "--scheme", "Q4_0"], "OUT: q4_0 writes a GGUF file: "),
        (["OUT.gguf", "--group-size", "32"], "--group-size: q8_0 has no groups of a size to choose; int4 has"),
        (["OUT", "--scheme", "int8", "--group-size", "32"], "--group-size: int8 has no groups of a size to choose"),
        (["chatting/config.json/x.gguf"], "Not a directory"),
        (["none/x.gguf"], "No such file or directory"),
        (["text.gguf"], "text.gguf is there already"),
    ],
)
def test_an_output_that_cannot_be_is_named(words: list[str], message: str, chatting, tmp_path, capsys):
    (tmp_path / "text.gguf").write_text("mine")
    before = sorted(tmp_path.iterdir())
    out, *flags = words
    assert main(["model", "quantize", str(chatting), str(tmp_path / out), *flags, "--device", "cpu"]) in (1, 2)
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "text.gguf").read_text() == "mine"


def test_a_tokenizer_that_no_gguf_file_can_hold_is_named(tiny, tmp_path, capsys):
    assert main(["model", "quantize", str(tiny), str(tmp_path / "out.gguf")]) == 2
    assert "tokenizer.json: its model is WordLevel; GGUF files that can be written have BPE" in capsys.readouterr().err
    (tiny / "tokenizer.json").unlink()
    assert main(["model", "quantize", str(tiny), str(tmp_path / "out.gguf")]) == 2
    assert "holds no tokenizer.json" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["quantize", "drafter"])
def test_a_folder_that_another_process_writes_is_left_to_it_and_a_dead_ones_is_not(verb, tiny, tmp_path, capsys):
    unfinished = tmp_path / ".out.unfinished"
    unfinished.mkdir()
    (unfinished / "1.part").write_text("half")
    words = ["model", verb, str(tiny), str(tmp_path / "out"), *(["--layers", "1"] if verb == "drafter" else [])]
    lock = os.open(unfinished, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert main(words) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"sapwood: {tmp_path / 'out'}: another process is writing it"
    assert (unfinished / "1.part").read_text() == "half"
    os.close(lock)
    assert main(words) == 0
    assert not unfinished.exists()
    assert not (tmp_path / "out" / "1.part").exists()


@pytest.mark.parametrize("name", ["out", "out.gguf"])
def test_a_full_disk_is_one_line_and_leaves_nothing(name: str, chatting, small_disk, capsys):
    scheme = ["--scheme", "f32"] if name.endswith(".gguf") else ["--scheme", "int8"]
    assert main(["model", "quantize", str(chatting), str(small_disk / name), *scheme, "--device", "cpu"]) in (1, 2)
    said = capsys.readouterr().err.splitlines()
    assert name in said[-1]
    assert "No space left on device" in said[-1] or "are free" in said[-1]
    assert not list(small_disk.iterdir())


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
