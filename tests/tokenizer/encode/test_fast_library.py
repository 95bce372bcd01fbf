"""fastokens compared with the `tokenizers` library: equal ids on real vocabularies, or it is not used."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from sapwood_common.errors import ConfigError
from sapwood_testing.vocabularies import trained
from sapwood_tokenizer.encode import fast_library
from sapwood_tokenizer.encode.batch_encoder import Encoded, LibraryHere
from sapwood_tokenizer.encode.fast_library import WORTH, FastLibrary, make_library, odd_texts

VOCABULARIES = ("qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama3", "deepseek")))
SCRIPTS = "aé ß \n\t1٣'.,-_/東ひ한👩👍🏽🇫\u200d\ufe0f\u0301\u202bمשनภ\u00a0\u3000\x00<|im_end|>"


def encode(library: Any, *texts: str, parse: bool = True, offsets: bool = False) -> list[Encoded]:
    encoded: list[Encoded] = library.encode(texts, "", parse_special_tokens=parse, offsets=offsets)
    return encoded


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return trained([SCRIPTS, "the cat sat on the mat " * 20], 400, "<|im_end|>")


@pytest.mark.parametrize("name", VOCABULARIES)
def test_real_vocabularies_are_encoded_by_fastokens_with_equal_ids(packaged: Any, name: str) -> None:
    tokenizer = Tokenizer.from_file(str(packaged(name) / "tokenizer.json"))
    fast, usual = FastLibrary(tokenizer, name, at_once=True), LibraryHere(tokenizer)
    rng = random.Random(name)
    texts = ["".join(rng.choices(SCRIPTS, k=rng.randrange(1, 400))) for _ in range(300)]
    before = fast.encoded["fastokens"]
    assert encode(fast, *texts) == encode(usual, *texts)
    assert fast.encoded["fastokens"] == before + 300


def test_fastokens_is_loaded_after_enough_text_and_answers_stay_equal(small: Tokenizer) -> None:
    library, usual = make_library("auto", small, "here"), LibraryHere(small)
    assert isinstance(library, FastLibrary)
    text = "the cat sat, 12 '東京' \n"
    assert encode(library, text) == encode(usual, text)
    assert not library.wait() and library.encoded == {"fastokens": 0, "tokenizers": 1}
    encode(library, "the mat " * (WORTH // 8))
    assert library.wait()
    assert encode(library, text, "") == encode(usual, text, "")
    assert library.encoded["fastokens"] == 2


def test_offsets_and_special_tokens_as_text_are_those_of_the_tokenizers_library(small: Tokenizer) -> None:
    library, usual = FastLibrary(small, "here", at_once=True), LibraryHere(small)
    text = "the<|im_end|> cat"
    for parse, offsets in ((False, False), (True, True), (False, True)):
        assert encode(library, text, parse=parse, offsets=offsets) == encode(usual, text, parse=parse, offsets=offsets)
    assert library.encoded["fastokens"] == 0


class Wrong:
    """fastokens' tokenizer with one token too many for some texts."""

    def __init__(self, tokenizer: Any, wrong: str) -> None:
        self._tokenizer = tokenizer
        self._wrong = wrong

    def encode_batch_flat(self, texts: list[str]) -> tuple[bytes, bytes]:
        found: tuple[bytes, bytes] = self._tokenizer.encode_batch_flat(
            [text + "a" if self._wrong in text else text for text in texts]
        )
        return found


def test_a_difference_that_shows_at_the_start_keeps_fastokens_out(
    small: Tokenizer, monkeypatch: Any, caplog: Any
) -> None:
    from fastokens import Tokenizer as Real

    class Lying:
        @staticmethod
        def from_json_str(text: str) -> Any:
            return Wrong(Real.from_json_str(text), "\u0663")

    monkeypatch.setattr("fastokens.Tokenizer", Lying)
    with pytest.raises(ConfigError, match="--encoder fastokens: fastokens gives other ids for"):
        make_library("fastokens", small, "here")
    library = FastLibrary(small, "here")
    with caplog.at_level("INFO"):
        encode(library, "the mat " * (WORTH // 8))
        assert not library.wait()
    assert "texts are encoded by the tokenizers library alone" in caplog.text


def test_a_difference_that_shows_later_ends_the_use_of_fastokens(
    small: Tokenizer, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(fast_library, "_CHECKED", 2)
    library = FastLibrary(small, "here", at_once=True)
    library._fast = Wrong(library._fast, "mat")
    encode(library, "the cat")
    assert encode(library, "the mat") == encode(LibraryHere(small), "the mat")
    assert "fastokens gives other ids for a text" in caplog.text
    assert encode(library, "the mat") == encode(LibraryHere(small), "the mat")


def test_an_unknown_kind_of_tokenizer_is_refused_only_where_fastokens_is_set() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.normalizer = normalizers.Lowercase()
    assert encode(make_library("auto", words, "here"), "A b")[0].ids.tolist() == [0, 1]
    try:
        library = make_library("fastokens", words, "here")
    except ConfigError as error:
        assert "--encoder fastokens" in str(error)
    else:
        assert encode(library, "A b")[0].ids.tolist() == [0, 1]


def test_odd_texts_hold_every_added_token_and_characters_of_all_scripts(small: Tokenizer) -> None:
    texts = list(odd_texts(small))
    together = "".join(texts)
    assert any("<|im_end|><|im_end|>" in text for text in texts)
    assert len(set(together)) > 20_000
    assert texts == list(odd_texts(small))
