"""What `sapwood up` finds before it starts a process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sapwood.cli.main import main


def folder(path: Path, **settings: object) -> str:
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **settings}))
    return str(path)


@pytest.mark.parametrize("inside", [False, True])
def test_heads_that_cannot_be_split_are_found_before_torch_is_loaded(
    inside: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = {"num_attention_heads": 9}
    model = folder(tmp_path, **({"text_config": heads} if inside else heads))
    assert main(["up", model, "--ports", "auto", "--tensor-parallel", "2"]) == 2
    assert "--tensor-parallel 2: the model has 9 attention heads" in capsys.readouterr().err


def test_cuda_without_a_driver_is_found_before_torch_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sapwood.cli.local.checks.find_library", lambda name: None)
    monkeypatch.setattr("sapwood.cli.local.checks._CUDA", ())
    assert main(["up", folder(tmp_path), "--ports", "auto", "--worker-device", "cuda"]) == 2
    assert "--worker-device cuda: no CUDA device is available here" in capsys.readouterr().err


def test_a_service_that_ends_at_the_start_says_why_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dummy_model: Path
) -> None:
    model = folder(tmp_path, num_attention_heads=8) and tmp_path
    (model / "tokenizer.json").write_bytes((dummy_model / "tokenizer.json").read_bytes())
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "hidden_size": 0}')
    assert main(["up", str(model), "--ports", "auto", "--workers", "2"]) == 1
    shown = capsys.readouterr()
    assert (shown.out + shown.err).count("hidden_size is 0") == 1  # the other worker has nothing to add
    assert "ended with exit code 1; the lines above say why" in shown.err
