"""`sapwood model drafter`: a model's first layers, and noise as a dial."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from sapwood.cli.main import main

TOKENS = list(range(3, 40))


def logits(make_runner: Any, make_driver: Any, path: Path) -> torch.Tensor:
    driver = make_driver(make_runner(path))
    driver.add(0, TOKENS)
    result: torch.Tensor = driver.runner.logits(driver.output({0: len(TOKENS)}))
    return result


def test_the_first_layers_are_those_of_the_model(
    tiny_model: Any, make_runner: Any, make_driver: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny, out = tiny_model("gemma3"), tmp_path / "out"
    assert main(["model", "drafter", str(tiny.path), str(out), "--layers", "3"]) == 0
    assert f"draft:{out}" in capsys.readouterr().out
    config = json.loads((out / "config.json").read_text())
    assert config["num_hidden_layers"] == len(config["layer_types"]) == 3
    ours = logits(make_runner, make_driver, out)
    tiny.oracle.model.layers, whole = tiny.oracle.model.layers[:3], tiny.oracle.model.layers
    try:
        assert torch.allclose(ours, tiny.logits(TOKENS), atol=1e-3)
    finally:
        tiny.oracle.model.layers = whole


def test_noise_is_a_dial(tiny_model: Any, make_runner: Any, make_driver: Any, tmp_path: Path) -> None:
    path = tiny_model("llama").path
    whole = logits(make_runner, make_driver, path)
    errors = []
    for noise in ("0.01", "0.1", "1"):
        out = tmp_path / noise
        assert main(["model", "drafter", str(path), str(out), "--noise", noise]) == 0
        errors.append(float((logits(make_runner, make_driver, out) - whole).norm() / whole.norm()))
    assert errors == sorted(errors) and 0 < errors[0] < 0.1 < errors[-1]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--layers or --noise"),
        (["--layers", "5"], "--layers 5: .* has 4 layers"),
        (["--noise", "-1"], "must be 0 or more"),
    ],
)
def test_what_makes_no_draft_model_is_refused(
    tiny_model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    try:
        code = main(["model", "drafter", str(tiny_model("llama").path), str(tmp_path / "out"), *flags])
    except SystemExit as exit_:
        code = int(str(exit_.code))
    assert code == 2
    assert re.search(said, capsys.readouterr().err)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


def test_a_folder_that_is_there_and_a_file_that_is_no_folder_are_refused(
    tiny_model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["model", "drafter", str(tiny_model("llama").path), str(tmp_path), "--layers", "1"]) == 2
    assert "is there already" in capsys.readouterr().err
