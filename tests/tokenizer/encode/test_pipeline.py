"""What a tokenizer's steps say of its time and of the number of tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from sapwood_common.errors import ConfigError, InvalidArgumentError, PromptTooLongError
from sapwood_tokenizer.encode.encode_process import LibraryInProcesses, start_library
from sapwood_tokenizer.encode.encoder import EncodeOptions, Encoder, EncoderOptions
from sapwood_tokenizer.encode.pipeline import is_bounded, token_lengths
from sapwood_tokenizer.vocab.loader import LoadedTokenizer
from sapwood_tokenizer.vocab.split_patterns import PATTERNS, split_at

DOUBLING = normalizers.Sequence([normalizers.Replace("x", "xx")] * 40)
EXPLODING = r"(y+y+)+z"


def changed(tokenizer: Tokenizer, normalizer: object = None, split: str = "") -> Tokenizer:
    made = Tokenizer.from_str(tokenizer.to_str())
    if normalizer is not None:
        made.normalizer = normalizer
    if split:
        words = pre_tokenizers.Split(Regex(split), behavior="isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return made


def test_published_ways_of_cutting_are_known_to_be_bounded(byte_level: Tokenizer, demo: LoadedTokenizer) -> None:
    assert is_bounded(demo.tokenizer)
    assert is_bounded(byte_level)
    for patterns in PATTERNS.values():
        made = Tokenizer.from_str(byte_level.to_str())
        made.pre_tokenizer = split_at(patterns)
        assert is_bounded(made), patterns
    assert is_bounded(changed(byte_level, normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "▁")])))
    assert is_bounded(changed(byte_level, normalizers.Replace(Regex(" {2,}"), " ")))


@pytest.mark.parametrize(
    ("normalizer", "split"),
    [
        (DOUBLING, ""),
        (normalizers.Replace("x", "x" * 1000), ""),
        (normalizers.Replace(Regex(EXPLODING), "-"), ""),
        (None, EXPLODING),
        (None, r"(a|aa)+$"),
        (None, r"(a*){9}b"),
        (None, r"(a)\1*b"),
    ],
)
def test_steps_that_may_explode_are_not(byte_level: Tokenizer, normalizer: object, split: str) -> None:
    assert not is_bounded(changed(byte_level, normalizer, split))


def test_words_of_any_length_are_not_bounded() -> None:
    assert not is_bounded(Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]", max_input_chars_per_word=10**9)))


TEXTS = [
    "hello world " * 3000,
    " " * 40_000,
    "é" * 5000,
    "e\u0301" * 5000,
    "a" * 30_000,
    "-" * 8 + "x" * 200 + " " * 20_000,
    "=-" * 9000,
    ("word" + " " * 15) * 2000,
    "😀 " * 3000,
    "\n" * 70_000 + "end",
]


@pytest.mark.parametrize("package", ["demo", "llama3", "qwen3"])
def test_a_text_said_to_have_too_many_tokens_has(
    package: str, demo: LoadedTokenizer, packaged: Callable, corpus: list[str]
) -> None:
    tokenizer = demo.tokenizer if package == "demo" else Tokenizer.from_file(str(packaged(package) / "tokenizer.json"))
    lengths = token_lengths(tokenizer)
    assert lengths is not None
    for text in (*TEXTS, *corpus):
        count = len(tokenizer.encode(text, add_special_tokens=False).ids)
        for most in (count, count + 1, 2 * count):
            assert not lengths.exceeds(text, most), text[:20]
        for most in range(0, count, max(1, count // 20)):
            assert not lengths.exceeds(text, most) or most < lengths.least(text, most) <= count, text[:20]
    assert lengths.exceeds("a b " * 100_000, 100)
    assert lengths.exceeds("é" * 100_000, 100)


def test_where_a_token_may_stand_for_any_text_nothing_is_said(byte_level: Tokenizer) -> None:
    assert token_lengths(byte_level) is not None
    for made in (
        changed(byte_level, normalizers.Strip()),
        changed(byte_level, normalizers.Replace("aa", "a")),
        changed(byte_level, normalizers.Replace(Regex(" +"), " ")),
        Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
        Tokenizer(models.BPE({"a": 0}, [])),
        Tokenizer(models.Unigram([("a", 0.0)], 0, False)),
    ):
        assert token_lengths(made) is None
    greedy = Tokenizer.from_str(byte_level.to_str())
    greedy.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    assert token_lengths(greedy) is None


async def test_a_text_too_long_by_its_characters_is_refused_before_it_is_encoded(byte_level: Tokenizer) -> None:
    encoder = Encoder(byte_level, EncoderOptions(max_text_bytes=1 << 24))
    encoder.close()  # nothing can be encoded any more
    with pytest.raises(PromptTooLongError, match=r"prompt is too long: [0-9]+ tokens > 50 maximum") as caught:
        await encoder.encode(["ab " * 100_000], EncodeOptions(max_tokens=50))
    assert caught.value.field == "texts[0]"
    with pytest.raises(RuntimeError):
        await encoder.encode(["ab " * 10], EncodeOptions(max_tokens=50))


Start = Callable[[Tokenizer], Awaitable[tuple[Encoder, LibraryInProcesses]]]


@pytest.fixture
async def start(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    monkeypatch.setattr("sapwood_tokenizer.encode.encode_process._SECONDS", 2.0)
    monkeypatch.setattr("sapwood_tokenizer.encode.encode_process._MEMORY_BYTES", 128 << 20)
    made: list[tuple[Encoder, LibraryInProcesses]] = []

    async def start_(tokenizer: Tokenizer) -> tuple[Encoder, LibraryInProcesses]:
        library = await start_library(tokenizer, "tokenizer.json")
        options = EncoderOptions(max_text_bytes=1 << 24, prefix_cache_bytes=1 << 20, exact_cache_bytes=1 << 20)
        made.append((Encoder(tokenizer, options, library), library))
        return made[-1]

    yield start_
    for encoder, library in made:
        encoder.close()
        await library.close()


async def test_texts_are_encoded_elsewhere_as_here(start: Start, byte_level: Tokenizer, corpus: list[str]) -> None:
    there, library = await start(changed(byte_level, split=r"(y+y+)+z|[^y]+|y"))
    here = Encoder(changed(byte_level, split=r"(y+y+)+z|[^y]+|y"), EncoderOptions(max_text_bytes=1 << 24))
    chat = "<|im_start|>user\n" + "Hello there. " * 20 + "<|im_end|>\n"
    for options in (EncodeOptions(), EncodeOptions(parse_special_tokens=False), EncodeOptions(offsets=True)):
        for texts in (corpus, [chat, chat * 3]):
            ours, theirs = await there.encode(texts, options), await here.encode(texts, options)
            assert [one.ids for one in ours] == [one.ids for one in theirs]
            assert [[*map(tuple, one.offsets or ())] for one in ours] == [[*(one.offsets or ())] for one in theirs]
    assert library.pair is not None
    here.close()


@pytest.mark.parametrize("normalizer", [DOUBLING, normalizers.Replace(Regex(EXPLODING), "-")])
async def test_a_normalizer_that_never_ends_is_ended_while_others_are_encoded(
    start: Start, byte_level: Tokenizer, normalizer: object
) -> None:
    encoder, _ = await start(changed(byte_level, normalizer))
    text = "xxxx" if normalizer is DOUBLING else "y" * 60
    flood = [asyncio.create_task(encoder.encode([text], EncodeOptions(salt="alice"))) for _ in range(5)]
    for number in range(3):
        (encoded,) = await encoder.encode([f"other {number}"], EncodeOptions(salt="bob"))
        assert encoded.ids
    for ended in await asyncio.gather(*flood, return_exceptions=True):
        assert isinstance(ended, InvalidArgumentError)
        assert ended.field == "texts[0]"
        assert "cannot encode the text" in ended.message


async def test_a_tokenizer_that_cannot_encode_one_letter_is_named_at_the_start(
    start: Start, byte_level: Tokenizer
) -> None:
    growing = normalizers.Sequence([normalizers.Replace("a", "aa")] * 40)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        await start(changed(byte_level, growing))
