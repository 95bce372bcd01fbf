"""The bytes of tokens are read alike from every kind of file, and as the tokenizer service reads them."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer

from sapwood_common.errors import ConfigError
from sapwood_common.grammar.vocabulary import (
    TokenVocabulary,
    load_vocabulary,
    vocabulary_of_gguf,
    vocabulary_of_json,
)
from sapwood_common.packed_tokens import PackedTokens
from sapwood_testing.vocabularies import trained
from sapwood_tokenizer.vocab.loader import load_tokenizer, token_table
from sapwood_worker.model.grammar.backend import Spellings, forced_by

TEXTS = ["The capital of France", "naïve café ☕ 東京 👩‍💻", "def f(x):\n\treturn {'a': [1]}\r\n", "\x00\x7f  \u00a0"]


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    tokenizer = trained(TEXTS * 4, 350, "<|end|>")
    tokenizer.add_tokens(["<tool>", "ünï"])
    return tokenizer


def test_byte_level_tokens_give_the_text_back(byte_level):
    vocabulary = vocabulary_of_json(json.loads(byte_level.to_str()))
    for text in [*TEXTS, "a <tool> ünï"]:
        ids = byte_level.encode(text).ids
        assert b"".join(vocabulary.tokens[index] for index in ids).decode() == text
    assert vocabulary.special_ids == {0}
    assert vocabulary.special_names == ("<|end|>",)
    assert len(vocabulary.tokens) == byte_level.get_vocab_size()


def test_sentencepiece_tokens_give_the_text_back_bytes_and_spaces_too():
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "<0xE2>", "<0x98>", "<0x95>", "\u2581hi", "\u2581\u2581", "<0xZZ>"],
        "tokenizer.ggml.token_type": [2, 3, 6, 6, 6, 1, 1, 1],
    }
    vocabulary = vocabulary_of_gguf(metadata)
    assert b"".join(vocabulary.tokens[2:]) == "☕ hi  <0xZZ>".encode()
    assert vocabulary.special_names == ("<unk>", "<s>")


def test_a_gguf_file_with_byte_level_tokens_equals_its_tokenizer_json(byte_level):
    content = json.loads(byte_level.to_str())
    size = byte_level.get_vocab_size()
    added = {item["id"]: item for item in content["added_tokens"]}
    kinds = [1 if index not in added else 3 if added[index]["special"] else 4 for index in range(size)]
    tokens = [byte_level.id_to_token(index) for index in range(size)]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
    }
    assert vocabulary_of_gguf(metadata) == vocabulary_of_json(content)


def test_the_demo_models_tokens_are_those_the_tokenizer_service_decodes(demo_vocabulary, demo_model):
    table = token_table(load_tokenizer(demo_model).tokenizer)
    size = len(demo_vocabulary.tokens)
    assert size == 262_144
    differing = [i for i in range(size) if demo_vocabulary.tokens[i] != table.of(i)]
    assert not differing


def test_packed_tokens_are_those_that_were_packed():
    tokens = [b"a", b"", b"\xe2\x96\x81bc", b"", b"a"]
    packed = PackedTokens.of(tokens)
    assert list(packed) == [packed[i] for i in range(5)] == packed[:9] == tokens
    assert packed[-1] == b"a" and packed[1:4:2] == [b"", b""] and len(packed) == 5
    assert list(PackedTokens.of(())) == []
    for outside in (5, -6):
        with pytest.raises(IndexError):
            packed[outside]


def test_spellings_are_found_up_to_the_length_that_is_looked_for():
    tokens = [b"ab", b"abc", b"", b"ab", b"x" * 32, b"y" * 33]
    spellings = Spellings(tokens)
    assert [spellings.find(token) for token in tokens] == [3, 1, None, 3, 4, None]  # of equal tokens the last
    assert not any(spellings.find(text) for text in (b"a", b"abcd", b"x" * 31))
    assert forced_by(b"abx", spellings) and not forced_by(b"abc", spellings) and not forced_by(b"", spellings)


def test_a_fingerprint_tells_vocabularies_apart():
    base = TokenVocabulary((b"a", b"bc"), frozenset())
    assert base.fingerprint == TokenVocabulary((b"a", b"bc"), frozenset()).fingerprint
    others = [
        TokenVocabulary((b"ab", b"c"), frozenset()),
        TokenVocabulary((b"bc", b"a"), frozenset()),
        TokenVocabulary((b"a", b"bc"), frozenset({1})),
        TokenVocabulary((b"a", b"bc", b""), frozenset()),
    ]
    assert len({vocabulary.fingerprint for vocabulary in (base, *others)}) == 5


def test_a_directory_without_a_vocabulary_has_none_and_a_broken_one_says_so(tmp_path):
    assert load_vocabulary(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_vocabulary(tmp_path)
