import heapq
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from sapwood_common.models.gguf_file import GgufFile
from sapwood_tokenizer.vocab.gguf_vocab import build_tokenizer
from sapwood_tokenizer.vocab.loader import LoadedTokenizer
from sapwood_tokenizer.vocab.special_tokens import VocabularyError


@pytest.fixture(scope="session")
def vocabulary(demo_model):
    metadata = GgufFile(demo_model).metadata
    tokens, scores, types = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type"))
    pieces = {t: (i, s) for i, (t, s, k) in enumerate(zip(tokens, scores, types, strict=True)) if k in (1, 5)}
    special = {t for t, k in zip(tokens, types, strict=True) if k in (3, 4)}
    return pieces, special, {t: i for i, t in enumerate(tokens)}


def sentencepiece(text: str, pieces: dict[str, tuple[int, float]], ids: dict[str, int]) -> list[int]:
    """SentencePiece's BPE by its definition: join the neighbours with the best score until none can be joined."""
    symbols = list(text.replace(" ", "\u2581"))
    while True:
        joins = [(-pieces[a + b][1], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in pieces]
        if not joins:
            break
        _, i = heapq.nsmallest(1, joins)[0]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    out: list[int] = []
    for symbol in symbols:
        out += [ids[symbol]] if symbol in pieces else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return out


def test_the_demo_prompt_has_its_known_ids(demo: LoadedTokenizer) -> None:
    assert demo.tokenizer.encode("The capital of France is").ids == [2, 818, 5279, 529, 7001, 563]
    assert demo.bos_token_id == 2
    assert demo.eos_token_ids == (1, 106)
    assert demo.vocab_size == 262144


@settings(max_examples=80, deadline=None)
@given(text=st.text(alphabet=st.sampled_from("aeiotnsr Thé,.\n12東京👍"), max_size=30) | st.text(max_size=15))
def test_encoding_is_sentencepieces_own(demo: LoadedTokenizer, vocabulary, text: str) -> None:
    pieces, special, ids = vocabulary
    if any(token in text for token in special if token) or any(0xD800 <= ord(c) < 0xE000 for c in text):
        return
    assert demo.tokenizer.encode(text, add_special_tokens=False).ids == sentencepiece(text, pieces, ids)


def test_the_corpus_is_encoded_as_sentencepiece_would_and_comes_back(demo, vocabulary, corpus) -> None:
    pieces, special, ids = vocabulary
    for text in corpus:
        encoded = demo.tokenizer.encode(text, add_special_tokens=False).ids
        assert demo.tokenizer.decode(encoded, skip_special_tokens=False) == text
        if not any(token in text for token in special if token):
            assert encoded == sentencepiece(text, pieces, ids)


def test_special_tokens_in_a_text_are_one_token(demo: LoadedTokenizer) -> None:
    assert demo.tokenizer.encode("<start_of_turn>user", add_special_tokens=False).ids[0] == 105


def test_a_byte_level_vocabulary_is_the_tokenizer_it_was_taken_from(byte_level: Tokenizer, corpus: list[str]) -> None:
    vocab = byte_level.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    import json

    merges = [" ".join(pair) for pair in json.loads(byte_level.to_str())["model"]["merges"]]
    rebuilt = build_tokenizer(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
            "tokenizer.ggml.merges": merges,
        }
    )
    for text in [*corpus, "<|im_start|>user\nhi<|im_end|>"]:
        assert rebuilt.encode(text).ids == byte_level.encode(text).ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.tokens": None}, r"tokenizer\.ggml\.tokens is missing"),
        ({"tokenizer.ggml.scores": [1.0]}, "differ in length"),
        ({"tokenizer.ggml.token_type": [1]}, "differ in length"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "strange", "tokenizer.ggml.merges": ["a b"]},
            "'strange'",
        ),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["ab"]}, "no pair"),
    ],
)
def test_a_vocabulary_that_cannot_be_built_is_an_error_that_says_why(change: dict[str, object], message: str) -> None:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "a", "b", "ab"],
        "tokenizer.ggml.scores": [0.0, -1.0, -2.0, -3.0],
    }
    with pytest.raises(VocabularyError, match=message):
        build_tokenizer(metadata | change)
