"""The caches of encoded text, and that cutting texts changes no token."""

import asyncio
import json
import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from sapwood_tokenizer.encode.batch_encoder import BatchEncoder, Encoded, PartKey
from sapwood_tokenizer.encode.encode_cache import EncodeCache
from sapwood_tokenizer.encode.encoder import EncodeOptions, Encoder, EncoderOptions
from sapwood_tokenizer.encode.safe_boundary import SHORTEST_PART, SafeBoundaries, boundary_tokens
from sapwood_tokenizer.vocab.loader import LoadedTokenizer

BARE = EncodeOptions(add_special_tokens=False)


@pytest.fixture(scope="session")
def first_prefixed() -> Tokenizer:
    """A SentencePiece-like one that puts a space before the first part only, and one around special tokens."""
    letters = {character: index for index, character in enumerate("\u2581abcdef<>|/\n ", start=3)}
    vocab = {"<s>": 0, "</s>": 1, "<unk>": 2, **letters, "\u2581a": 50, "ab": 51, "\u2581ab": 52, "><": 53, "a<": 54}
    merges = [("\u2581", "a"), ("a", "b"), ("\u2581", "ab"), (">", "<"), ("a", "<")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    tokenizer.add_special_tokens([AddedToken("|a|", normalized=False, lstrip=True), AddedToken("|b|", rstrip=True)])
    tokenizer.add_tokens([AddedToken("/s><", normalized=False), AddedToken("\n\n"), AddedToken("b<", normalized=True)])
    tokenizer.add_tokens([AddedToken("word", single_word=True), AddedToken("[s]", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="$A $B", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return tokenizer


@pytest.fixture(scope="session")
def tokenizers(
    demo: LoadedTokenizer,
    byte_level: Tokenizer,
    deepseek: LoadedTokenizer,
    llama3: LoadedTokenizer,
    first_prefixed: Tokenizer,
) -> dict[str, Tokenizer]:
    return {
        "demo": demo.tokenizer,
        "trained": byte_level,
        "deepseek": deepseek.tokenizer,
        "llama3": llama3.tokenizer,
        "first": first_prefixed,
    }


@pytest.fixture(scope="session")
def encoders(tokenizers: dict[str, Tokenizer]) -> dict[str, BatchEncoder]:
    """With caches so small that entries go all the time."""
    return {name: BatchEncoder(tokenizer, EncodeCache(64 * 1024)) for name, tokenizer in tokenizers.items()}


NAMES = ("demo", "trained", "deepseek", "llama3", "first")
MARKS = {
    "demo": ["<start_of_turn>user\n", "<end_of_turn>\n", "<bos>", "<unused7>", "<start_of_turn", "\n\n\n", "  "],
    "trained": ["<|im_start|>", "<|im_end|>", "<|im_end", "|>"],
    "deepseek": ["<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<think>", "</think>", "\n"],
    "llama3": ["<|start_header_id|>", "<|eot_id|>", "<|begin_of_text|>", "<|eot", "_id|>", "\n\n"],
    "first": ["[s]", "[s]", "word", "<s>", "</s>", "/s><", "|a|", "|b|", "b<", "  ", "\n\n", "<", "s>"],
}


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_text_has_the_same_tokens_with_and_without_the_caches(
    tokenizers: dict[str, Tokenizer], encoders: dict[str, BatchEncoder], name: str, data: st.DataObject
) -> None:
    tokenizer, batches = tokenizers[name], encoders[name]
    piece = st.sampled_from(MARKS[name]) | st.text(max_size=12) | st.sampled_from(["a" * 150, " ab" * 60, "東京 " * 50])
    pieces = data.draw(st.lists(piece, max_size=16))
    texts = ["".join(pieces[:count]) for count in range(0, len(pieces) + 1, 3)] + ["".join(pieces)] * 2
    for text in texts:
        (encoded,) = batches.encode([text])
        assert list(encoded.ids) == tokenizer.encode(text, add_special_tokens=False).ids
        assert list(batches.with_tokens_around(encoded).ids) == tokenizer.encode(text).ids


@pytest.mark.parametrize("name", NAMES)
def test_a_growing_conversation_is_encoded_turn_by_turn_and_right(
    tokenizers: dict[str, Tokenizer], corpus: list[str], name: str
) -> None:
    tokenizer = tokenizers[name]
    parts: EncodeCache[PartKey] = EncodeCache(1 << 20)
    batches = BatchEncoder(tokenizer, parts)
    chance = random.Random(name)
    text, before = "", 0
    for _ in range(12):
        text += chance.choice(MARKS[name][:2]) + " ".join(chance.choices(corpus, k=3)) + MARKS[name][1]
        (encoded,) = batches.encode([text])
        assert list(encoded.ids) == tokenizer.encode(text, add_special_tokens=False).ids
        after = parts.stats().tokens_reused
        assert after >= before
        before = after
    assert before > 3 * len(encoded.ids), "the turns before are not encoded again"


def test_only_tokens_that_are_found_whatever_is_around_them_are_boundaries(tokenizers: dict[str, Tokenizer]) -> None:
    def boundaries(*tokens: str | AddedToken, normalizes: bool = False) -> list[str]:
        added = [token if isinstance(token, AddedToken) else AddedToken(token, special=True) for token in tokens]
        return boundary_tokens(added, normalizes=normalizes)

    assert boundaries("<s>", "</s>", "<|x|>") == ["</s>", "<s>", "<|x|>"]
    assert boundaries("<s>", "<s>!") == [], "one is the beginning of the other"
    assert boundaries("<ab>", "b>c|", "[d]") == ["[d]"], "they may overlap"
    assert boundaries("|a|", "<c>") == ["<c>"], "two of the same may overlap"
    assert boundaries("<s>", "x<s>y") == []
    assert boundaries(" <s>", "<t>\n") == [], "a neighbour that strips takes a part of it"
    assert boundaries("s>", "<t") == [], "a neighbour that is a single word only would not be found beside it"
    for attribute in ("lstrip", "rstrip", "single_word"):
        assert boundaries(AddedToken("<s>", special=True, **{attribute: True})) == []
    assert boundaries(AddedToken("<s>", special=False)) == ["<s>"]
    assert boundaries(AddedToken("<s>", special=True, normalized=True), normalizes=True) == []
    assert boundaries(AddedToken("<s>", special=True, normalized=False), normalizes=True) == ["<s>"]
    demo = SafeBoundaries(tokenizers["demo"])
    text = ("<start_of_turn>user\n" + "x" * SHORTEST_PART + "<end_of_turn>\n") * 3
    cut = demo.cut(text)
    assert "".join(cut) == text
    assert [part.endswith("<end_of_turn>") for part in cut] == [True, True, True, False]
    assert SafeBoundaries(tokenizers["first"]).lead == "[s]", "<s> begins with the end of '/s><'"


def test_a_normalized_token_is_none_where_a_normalizer_could_make_one(byte_level: Tokenizer) -> None:
    tokenizer = Tokenizer.from_str(byte_level.to_str())
    tokenizer.add_special_tokens([AddedToken("<|x|>", normalized=True)])
    assert SafeBoundaries(tokenizer).cut("x" * 200 + "<|x|>")[-1] == ""
    tokenizer.normalizer = normalizers.Lowercase()
    assert SafeBoundaries(tokenizer).cut("x" * 200 + "<|x|>") == ["x" * 200 + "<|x|>"]


def test_a_cache_keeps_to_its_budget_and_forgets_the_least_recently_used() -> None:
    cache: EncodeCache[str] = EncodeCache(16 * 1024)
    ids = array("I", range(100))
    for number in range(100):
        cache.put(f"text {number}", f"text {number}", ids)
        assert cache.get("text 0") is not None, "used all the time"
        assert cache.stats().bytes <= 16 * 1024
    stats = cache.stats()
    assert stats.entries + stats.evictions == 100
    assert stats.evictions > 0
    assert cache.get("text 1") is None
    assert (stats.hits, stats.tokens_reused) == (100, 10_000)
    cache.put("huge", "x" * 4096, ids)
    assert cache.get("huge") is None, "would push out everything else"
    off: EncodeCache[str] = EncodeCache(0)
    off.put("a", "a", ids)
    assert off.get("a") is None


def options() -> EncoderOptions:
    return EncoderOptions(1 << 22, exact_cache_bytes=1 << 20, prefix_cache_bytes=1 << 20)


async def test_a_text_that_was_encoded_before_is_not_encoded_again(byte_level: Tokenizer, corpus: list[str]) -> None:
    encoder = Encoder(byte_level, options())
    first = await encoder.encode(corpus)
    again = await encoder.encode([*corpus, "new"])
    assert [list(one.ids) for one in again] == [byte_level.encode(text).ids for text in [*corpus, "new"]]
    assert [list(one.ids) for one in first] == [list(one.ids) for one in again[:-1]]
    assert (encoder.exact_cache.hits, encoder.exact_cache.misses) == (len(corpus), len(corpus) + 1)


async def test_what_came_with_one_salt_is_not_found_under_another(demo: LoadedTokenizer) -> None:
    encoder = Encoder(demo.tokenizer, options())
    turn = "<start_of_turn>user\n" + "a turn of some length " * 20 + "<end_of_turn>\n"
    longer = turn + "<start_of_turn>model\n" + "an answer " * 20 + "<end_of_turn>\n"
    expected = demo.tokenizer.encode(longer).ids

    async def found(salt: str, *texts: str) -> tuple[int, int]:
        before = encoder.exact_cache.hits, encoder.prefix_cache.hits
        for encoded, sent in zip(await encoder.encode(texts, EncodeOptions(salt=salt)), texts, strict=True):
            assert list(encoded.ids) == demo.tokenizer.encode(sent).ids
        return encoder.exact_cache.hits - before[0], encoder.prefix_cache.hits - before[1]

    assert await found("alice", turn, "other") == (0, 0)
    assert await found("alice", turn, "other") == (2, 0)
    assert await found("alice", longer) == (0, 1), "its first turn is known"
    for salt in ("bob", ""):
        assert await found(salt, longer, turn, "other") == (0, 0)
        assert await found(salt, turn, longer) == (2, 0)
    # Those that come at once are one batch of the library's.
    salts = [f"tenant {number % 4}" for number in range(8)]
    answers = await asyncio.gather(*(encoder.encode([longer], EncodeOptions(salt=salt)) for salt in salts))
    assert all(list(encoded.ids) == expected for (encoded,) in answers)
    assert await found("tenant 3", longer) == (1, 0)
    assert await found("tenant 4", longer) == (0, 0)


async def test_special_tokens_are_read_or_taken_for_text_as_asked(demo: LoadedTokenizer, byte_level: Tokenizer) -> None:
    for tokenizer, token in ((demo.tokenizer, "<end_of_turn>"), (byte_level, "<|im_end|>")):
        encoder = Encoder(tokenizer, options())
        text = f"a {token} b"
        for _ in range(2):  # the second time from the cache
            (read,) = await encoder.encode([text], BARE)
            (plain,) = await encoder.encode([text], EncodeOptions(add_special_tokens=False, parse_special_tokens=False))
            assert tokenizer.token_to_id(token) in read.ids
            assert tokenizer.token_to_id(token) not in plain.ids
            assert tokenizer.decode(list(plain.ids), skip_special_tokens=False) == text


async def test_offsets_tell_where_each_token_is(demo: LoadedTokenizer, byte_level: Tokenizer) -> None:
    text = "Hi 👍🏽 <|im_end|>世界"
    for tokenizer in (demo.tokenizer, byte_level):
        encoder = Encoder(tokenizer, options())
        for bare in (True, False):
            (encoded,) = await encoder.encode([text], EncodeOptions(add_special_tokens=not bare, offsets=True))
            whole = tokenizer.encode(text, add_special_tokens=not bare)
            assert (list(encoded.ids), encoded.offsets) == (whole.ids, whole.offsets)
        covered = {place for start, end in encoded.offsets or () for place in range(start, end)}
        assert covered == set(range(len(text)))


def test_a_model_file_with_a_post_processor_that_wraps_twice_is_known(first_prefixed: Tokenizer) -> None:
    batches = BatchEncoder(first_prefixed, EncodeCache(0))
    assert list(batches.with_tokens_around(Encoded(array("I", [7]))).ids) == [0, 7, 1]
    assert json.loads(first_prefixed.to_str())["post_processor"]["type"] == "TemplateProcessing"
