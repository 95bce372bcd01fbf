"""What files, servers and models say is shown on a terminal, and does nothing to it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from sapwood.cli.chat import show
from sapwood.cli.main import main
from sapwood.cli.terminal import harmless, one_line
from sapwood.cli.top import table
from sapwood.generation import Delta, ToolCallDelta

NASTY = "a\nFORGED: all is well\r\x1b[31m\x1b]0;title\x07\x9b\u202e"


def assert_harmless(text: str) -> None:
    assert not any(sign in text for sign in "\x1b\x07\x9b\u202e\r"), text
    assert not any(line.startswith("FORGED") for line in text.splitlines()), text


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": [NASTY]},
        {"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": NASTY}},
        {"architectures": ["LlamaForCausalLM"], "torch_dtype": NASTY},
    ],
    ids=["architecture", "quantisation", "dtype"],
)
def test_a_models_files_cannot_write_to_the_terminal(
    config: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    main(["show", str(tmp_path)])
    shown = capsys.readouterr()
    assert_harmless(shown.out + shown.err)
    assert shown.out or shown.err


def test_tables_and_values_have_one_line_each() -> None:
    lines = table([("NAME", "STATE"), (NASTY, "up")])
    assert len(lines) == 2
    assert_harmless("\n".join(lines))
    assert len(one_line("x" * 10_000)) <= 1024


def test_an_answer_is_escaped_on_a_terminal_and_unchanged_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "one\ttwo\nthree \x1b]0;title\x07 \x9b31m"
    delta = Delta(said, [], tool_calls=[ToolCallDelta(0, "id", "f\x1b", "{}")])
    show(delta)
    assert said in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show(delta)
    told = capsys.readouterr().out
    assert "one\ttwo\nthree " in told and "\x1b" not in told and "\x9b" not in told and "\x07" not in told
    assert harmless("a\r\nb\tc") == "a\r\nb\tc"
