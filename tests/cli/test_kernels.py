"""`sapwood kernels build`: what it refuses where there is nothing to build on."""

from __future__ import annotations

from pathlib import Path

import pytest

from sapwood.cli.main import main


def test_flags_that_no_worker_takes_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "build", str(tmp_path / "k.tgz"), "--worker", "--page-size 0"]) == 2
    assert "--page-size" in capsys.readouterr().err


def test_a_model_that_is_split_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "build", str(tmp_path / "k.tgz"), "--worker", "--tensor-parallel 2"]) == 2
    assert "built on one GPU" in capsys.readouterr().err


def test_without_a_gpu_it_says_so_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["kernels", "build", str(tmp_path / "k.tgz"), "--worker", "--model demo"]) == 2
    assert "there is no CUDA GPU here" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
