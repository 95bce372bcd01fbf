"""Words that people bring from other programs: verbs, misspellings, and what a model is, before anything runs."""

from __future__ import annotations

import json
import struct
import subprocess
from pathlib import Path

import pytest

from sapwood.cli.main import main
from sapwood_common.models.packaged import PACKAGED_MODELS


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--verison"], "there is no flag --verison; did you mean --version?"),
        (["--foo"], "there is no flag --foo; a verb comes first"),
        (["stpo"], "did you mean stop?"),
        (["run-batch", "-i", "x"], "sapwood batch run"),
        (["download", "x"], "`sapwood pull NAME` fetches a model"),
        (["up", "--max-model-len", "3"], "did you mean --worker-context-length?"),
        (["quantize", "x"], "the following arguments are required: OUT"),
        (["completion", "fish"], "invalid choice: 'fish'"),
    ],
)
def test_a_word_that_is_none_here_names_the_one_that_is(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_folders_facts_are_shown_without_loading_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "max_position_embeddings": 128,
        "vocab_size": 9,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    header = json.dumps({"a": {"dtype": "BF16", "shape": [1000, 2000], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert main(["show", str(tmp_path)]) == 0
    shown = dict(
        line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if not line.startswith("chat ")
    )
    assert shown["parameters"] == "2.0 million"
    assert (shown["architecture"], shown["format"], shown["context"]) == (
        "LlamaForCausalLM",
        "safetensors, BF16",
        "128 tokens",
    )


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, struct.pack("<Q", 3) + b"[1]", struct.pack("<Q", 9) + b'{"a": {}}']
)
def test_a_damaged_header_has_no_parameters(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    assert main(["model", "show", str(tmp_path)]) == 0
    assert "parameters" not in capsys.readouterr().out


def test_a_model_that_was_fetched_is_removed_and_others_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SAPWOOD_HOME", str(tmp_path))
    places = {name: tmp_path / "models" / model.file for name, model in PACKAGED_MODELS.items()}
    for path in places.values():
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x" * 1_000_000)
    assert main(["rm", "demo-base"]) == 0
    assert capsys.readouterr().out == "removed demo-base: 1.0 MB\n"
    assert (places["demo"].is_file(), places["demo-base"].parent.exists()) == (True, False)
    assert main(["rm", str(places["demo"])]) == 2
    assert "no such model was fetched" in capsys.readouterr().err and places["demo"].is_file()


def test_bash_completes_verbs_and_flags_of_services(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    shown = capsys.readouterr().out
    asked = "COMP_WORDS=(sapwood up --worker-max-run); COMP_CWORD=2; _shtab_sapwood; echo ${COMPREPLY[@]}"
    done = subprocess.run(["bash", "-c", f"{shown}\n{asked}"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["--worker-max-running"]
