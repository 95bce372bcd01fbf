"""GGUF files written here with the gguf package, as converters write them, read through the loader."""

from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer

from sapwood_common.errors import ConfigError
from sapwood_tokenizer.vocab.loader import load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def write(path: Path, kind: str, tokens: list[str], types: list[int], **extra: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for key, value in extra.items():
        name = f"tokenizer.ggml.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_uint32(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def sentencepiece(path: Path, **extra: Any) -> Path:
    pieces = ["\u2581", "a", "b", "\u2581a", "ab", "\u2581ab", "ba"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<tag>", "<|eot_id|>"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces), USER_DEFINED, CONTROL]
    scores = [0.0] * 259 + [float(-10 - n) for n in range(len(pieces))] + [0.0, 0.0]
    given = {"scores": scores, "bos_token_id": 1, "eos_token_id": 2} | extra
    return write(path, "llama", tokens, types, **given)


def test_a_sentencepiece_vocabulary_with_a_space_before_the_text(tmp_path: Path) -> None:
    loaded = load_tokenizer(sentencepiece(tmp_path / "s.gguf"))
    encoding = loaded.tokenizer.encode("ab<tag>é")
    assert encoding.tokens == ["<s>", "\u2581ab", "<tag>", "\u2581", "<0xC3>", "<0xA9>"]
    assert loaded.eos_token_ids == (2, 267)
    assert loaded.bos_token_id == 1
    assert loaded.special_ids == {1, 2, 267}, "what is user-defined is text"
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("ab ab").ids) == "ab ab"


def test_a_sentencepiece_vocabulary_without_a_space_before_the_text(tmp_path: Path) -> None:
    loaded = load_tokenizer(
        sentencepiece(tmp_path / "s.gguf", add_space_prefix=False, add_bos_token=False, add_eos_token=True)
    )
    assert loaded.tokenizer.encode("ab ab").tokens == ["ab", "\u2581ab", "</s>"]


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "it's 12345 x\n\n y", ["it", "'s", " 12345", " x", "\n\n", " y"]),
        ("olmo", "it's 12345 x\n\n y", ["it", "'s", " 12345", " x", "\n\n", " y"]),
        ("refact", "it's 12345 x\n\n y", ["it", "'s", " ", "1", "2", "3", "4", "5", " x", "\n\n", " y"]),
        ("llama-bpe", "it's 12345 x\n\n y", ["it", "'s", " ", "123", "45", " x", "\n\n", " y"]),
        ("dbrx", "IT'S 12345 x\n\n y", ["IT", "'S", " ", "123", "45", " x", "\n\n", " y"]),
        ("falcon3", "it's 12345 x\n\n y", ["it", "'s", " ", "123", "45", " x", "\n\n", " y"]),
        (
            "deepseek-llm",
            "it's 123 x,\n y 你好a",
            ["it", "'", "s", " ", "123", " x", ",", "\n", " y", " ", "你好", "a"],
        ),
        ("deepseek-coder", "it's 123 x,\n y", ["it", "'", "s", " ", "1", "2", "3", " x", ",", "\n", " y"]),
        ("seed-coder", "it's 12 x !?\n\n y", ["it", "'s", " ", "1", "2", " x", " !?", "\n\n", " y"]),
        ("qwen2", "it's 12345 x\n\n y", ["it", "'s", " ", "1", "2", "3", "4", "5", " x", "\n\n", " y"]),
    ],
)
def test_byte_level_vocabularies_cut_words_as_their_family_does(
    tmp_path: Path, byte_level: Tokenizer, pre: str, text: str, words: list[str]
) -> None:
    tokens = [byte_level.id_to_token(index) or "" for index in range(400)]
    merges = [" ".join(pair) for pair in byte_level_merges(byte_level)]
    path = write(
        tmp_path / "b.gguf",
        "gpt2",
        tokens,
        [CONTROL, CONTROL] + [NORMAL] * 398,
        merges=merges,
        pre=pre,
        eos_token_id=1,
        bos_token_id=0,
        add_bos_token=False,
    )
    loaded = load_tokenizer(path)
    cut = loaded.tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in cut] == words
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(text).ids) == text
    assert loaded.eos_token_ids == (1,)


def byte_level_merges(tokenizer: Tokenizer) -> list[list[str]]:
    import json

    merges: list[list[str]] = json.loads(tokenizer.to_str())["model"]["merges"]
    return merges


@pytest.mark.parametrize(
    ("extra", "bos", "eos"),
    [({"bos_token_id": 9999}, None, (2, 267)), ({"eos_token_id": 9999}, 1, (267,))],
)
def test_ids_that_no_token_has_are_as_if_they_were_not_given(
    tmp_path: Path, extra: dict[str, int], bos: int | None, eos: tuple[int, ...], caplog
) -> None:
    loaded = load_tokenizer(sentencepiece(tmp_path / "s.gguf", **extra))
    assert (loaded.bos_token_id, loaded.eos_token_ids) == (bos, eos)
    assert ("s.gguf: tokenizer.ggml.eos_token_id: 9999" in caplog.text) == ("eos_token_id" in extra)


@pytest.mark.parametrize(
    "extra",
    [{"scores": [1.0, 2.0]}, {"scores": ["x"] * 268}, {"unknown_token_id": 9999}, {"unknown_token_id": "x"}],
)
def test_values_that_make_no_vocabulary_are_told_with_the_file(tmp_path: Path, extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"s\.gguf: its vocabulary cannot be used"):
        load_tokenizer(sentencepiece(tmp_path / "s.gguf", **extra))
