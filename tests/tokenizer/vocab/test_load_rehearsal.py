"""A ``tokenizer.json`` whose normalizer never ends, or takes all memory, is refused by name before the service loads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sapwood_common.errors import ConfigError
from sapwood_tokenizer.vocab import load_rehearsal
from sapwood_tokenizer.vocab.vocabulary_files import load_vocabulary

BACKTRACKING = {"type": "Replace", "pattern": {"Regex": "(a|aa|a?)+$"}, "content": "x"}
DOUBLING = {
    "type": "Sequence",
    "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"} for _ in range(60)],
}
PLAIN = {"type": "Replace", "pattern": {"String": " "}, "content": "_"}


def written(
    folder: Path, normalizer: dict[str, Any], tokens: int, *, normalized: bool = True, hidden: bool = False
) -> Path:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": normalized, "special": False}
    added = [{"id": 1 + number, "content": "a" * 30 + f"!{number}", **flags} for number in range(tokens)]
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    text = json.dumps({"version": "1.0", "added_tokens": added, "normalizer": normalizer, "model": model})
    if hidden:
        text = text.replace('"Replace"', '"\\u0052eplace"').replace('"normalized"', '"\\u006eormalized"')
    path = folder / "tokenizer.json"
    path.write_text(text)
    return path


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("normalizer", [BACKTRACKING, DOUBLING], ids=["time", "memory"])
def test_a_normalizer_that_does_not_end_over_added_tokens_is_refused_by_name(
    tmp_path: Path, normalizer: dict[str, Any], hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_rehearsal.rehearse, "__defaults__", (2.0,))
    path = written(tmp_path, normalizer, 5000, hidden=hidden)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: its normalizer needs more than 2 s or"):
        load_vocabulary(path, {})


def test_a_normalizer_that_runs_over_no_added_token_is_not_tried(tmp_path: Path) -> None:
    vocabulary = load_vocabulary(written(tmp_path, BACKTRACKING, 5000, normalized=False), {})
    assert vocabulary.tokenizer.get_vocab_size() == 5001


def test_a_plain_normalizer_is_tried_and_loaded(tmp_path: Path) -> None:
    assert load_vocabulary(written(tmp_path, PLAIN, 10), {}).tokenizer.get_vocab_size() == 11


@pytest.mark.parametrize("text", ["{", "[1]", '{"normalizer": 3, "added_tokens": "x\\u0020"}', "[" * 100_000])
def test_a_file_that_is_no_tokenizer_is_refused_by_its_loading(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: "):
        load_vocabulary(path, {})
