import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from sapwood_common.errors import ConfigError
from sapwood_text.detokenizer import Detokenizer
from sapwood_tokenizer.vocab.loader import LoadedTokenizer, token_table

NONE: frozenset[int] = frozenset()


def streamed(detokenizer: Detokenizer, ids: list[int], sizes: list[int]) -> str:
    pieces, at = [], 0
    for size in [*sizes, len(ids)]:
        piece = detokenizer.push(ids[at : at + size])
        assert "\ufffd" not in piece.text
        pieces.append(piece.text)
        assert piece.tokens <= min(at + size, len(ids))
        at += size
    last = detokenizer.finish()
    assert last.tokens == len(ids)
    return "".join(pieces) + last.text


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40).filter(lambda t: "\ufffd" not in t), sizes=st.lists(st.integers(0, 5), max_size=12))
def test_any_text_comes_back_however_its_tokens_are_cut(
    demo: LoadedTokenizer, byte_level: Tokenizer, text: str, sizes: list[int]
) -> None:
    for tokenizer in (demo.tokenizer, byte_level):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        table = token_table(tokenizer)
        out = streamed(Detokenizer(table, [], NONE), ids, sizes)
        assert out == tokenizer.decode(ids, skip_special_tokens=False) == text


@settings(max_examples=100, deadline=None)
@given(
    ids=st.lists(st.integers(0, 399), max_size=60), sizes=st.lists(st.integers(0, 5), max_size=12), skip=st.booleans()
)
def test_any_tokens_at_all_of_a_byte_level_vocabulary_give_what_decode_gives(
    byte_level: Tokenizer, ids: list[int], sizes: list[int], skip: bool
) -> None:
    detokenizer = Detokenizer(token_table(byte_level), [], frozenset({0, 1}) if skip else NONE)
    pieces, at = [], 0
    for size in [*sizes, len(ids)]:
        pieces.append(detokenizer.push(ids[at : at + size]).text)
        at += size
    last = detokenizer.finish()
    assert "".join(pieces) + last.text == byte_level.decode(ids, skip_special_tokens=skip)
    assert last.tokens == len(ids)


@settings(max_examples=100, deadline=None)
@given(
    ids=st.lists(st.one_of(st.integers(0, 262_143), st.integers(236, 500), st.integers(107, 140)), max_size=40),
    sizes=st.lists(st.integers(0, 5), max_size=12),
    skip=st.booleans(),
)
def test_any_tokens_of_the_demo_model_that_are_text_give_what_decode_gives(
    demo: LoadedTokenizer, ids: list[int], sizes: list[int], skip: bool
) -> None:
    expected = demo.tokenizer.decode(ids, skip_special_tokens=skip)
    # For bytes that are no UTF-8 the library gives a U+FFFD for each byte of the run, whole characters in it included,
    # which only the end of the run can tell; a stream has given those characters before.
    assume("\ufffd" not in expected)
    assert (
        streamed(Detokenizer(token_table(demo.tokenizer), [], demo.special_ids if skip else NONE), ids, sizes)
        == expected
    )


def test_tokens_that_leave_no_text_are_accounted_for_once_nothing_is_held_back(byte_level: Tokenizer) -> None:
    s, t = (byte_level.encode(c).ids[0] for c in "st")
    detokenizer = Detokenizer(token_table(byte_level), ["stop"], frozenset({0}))
    assert detokenizer.push([0, 0]).tokens == 2
    assert detokenizer.push([s] + [0] * 5000).tokens == 2, "all wait for the character that is held back"
    assert detokenizer.push([t]).tokens == 2
    piece = detokenizer.push([s])
    assert (piece.text, piece.tokens) == ("st", 2 + 5001 + 1)
    last = detokenizer.finish()
    assert (last.text, last.tokens) == ("s", 2 + 5001 + 2)


def test_the_corpus_comes_back_one_token_at_a_time(
    demo: LoadedTokenizer, byte_level: Tokenizer, corpus: list[str]
) -> None:
    for tokenizer in (demo.tokenizer, byte_level):
        for text in corpus:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            assert streamed(Detokenizer(token_table(tokenizer), [], NONE), ids, [1] * len(ids)) == text


def test_a_character_is_never_split_and_half_of_one_at_the_end_is_marked(demo: LoadedTokenizer) -> None:
    ids = [demo.tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "🦜".encode()]
    detokenizer = Detokenizer(token_table(demo.tokenizer), [], NONE)
    assert [detokenizer.push([token]).text for token in ids] == ["", "", "", "🦜"]
    detokenizer.push(ids[:2])
    assert detokenizer.finish().text == "\ufffd"


@pytest.mark.parametrize("stop", [[], ["never"]])
def test_bytes_that_begin_no_character_count_with_their_mark(demo: LoadedTokenizer, stop: list[str]) -> None:
    first, second = (demo.tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in (0xC3, 0xE2))
    detokenizer = Detokenizer(token_table(demo.tokenizer), stop, frozenset({0}))
    pieces = [detokenizer.push([token]) for token in (first, 0, second, second)]
    assert [(piece.text, piece.tokens) for piece in pieces] == [("", 0), ("", 0), ("\ufffd", 2), ("\ufffd", 3)]


def test_special_tokens_are_skipped_or_shown(demo: LoadedTokenizer) -> None:
    ids = [*demo.tokenizer.encode("Hello").ids, demo.eos_token_ids[0]]
    table = token_table(demo.tokenizer)
    assert streamed(Detokenizer(table, [], demo.special_ids), ids, []) == "Hello"
    assert streamed(Detokenizer(table, [], NONE), ids, []) == "<bos>Hello<eos>"


@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_string_across_tokens_ends_the_text_and_tells_how_many_tokens_it_took(
    byte_level: Tokenizer, include_stop: bool
) -> None:
    ids = [byte_level.encode(c).ids[0] for c in "say STOP now"]
    detokenizer = Detokenizer(token_table(byte_level), ["STOP"], NONE, include_stop=include_stop)
    text, consumed = "", []
    for token in ids:
        piece = detokenizer.push([token])
        text += piece.text
        consumed.append(piece.tokens)
        if piece.stop_match:
            break
    assert (text, piece.stop_match, piece.tokens) == ("say STOP" if include_stop else "say ", "STOP", 8)
    assert consumed == [1, 2, 3, 4, 4, 4, 4, 8], "tokens of held-back text do not count yet"


def test_the_space_that_sentencepiece_puts_before_a_text_is_taken_off_once() -> None:
    vocab = {"\u2581a": 0, "\u2581b": 1, "<0x20>": 2, "<unk>": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    for sizes in ([], [1], [1, 1]):
        out = streamed(Detokenizer(token_table(tokenizer), [], NONE), [0, 1, 0], sizes)
        assert out == tokenizer.decode([0, 1, 0]) == "a b a"


def test_an_added_token_is_decoded_as_the_library_decodes_it() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "<unk>": 1}, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_tokens(["\u2581\u2581"])
    ids = [0, tokenizer.token_to_id("\u2581\u2581"), 0]
    assert streamed(Detokenizer(token_table(tokenizer), [], NONE), ids, [1]) == tokenizer.decode(ids) == "a  a"


def test_a_decoder_that_is_not_understood_is_refused_when_it_is_loaded() -> None:
    tokenizer = Tokenizer(models.WordPiece(vocab={"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match=r"tokenizer\.json: its decoder \(WordPiece\)"):
        token_table(tokenizer, "tokenizer.json")
    for decoder in (decoders.Replace("_", " "), decoders.Strip("x", 1, 0), decoders.Metaspace(replacement="_"), None):
        tokenizer.decoder = decoder
        with pytest.raises(ConfigError, match="is not supported"):
            token_table(tokenizer)


@pytest.mark.parametrize(
    ("min_tokens", "shown", "match"),
    [(0, "a", "STOP"), (4, "a", "STOP"), (5, "aSTOPb", "STOP"), (9, "aSTOPb", "STOP"), (10, "aSTOPbSTOPc", None)],
)
def test_a_stop_string_within_the_first_tokens_is_text(
    byte_level: Tokenizer, min_tokens: int, shown: str, match: str | None
) -> None:
    detokenizer = Detokenizer(token_table(byte_level), ["STOP"], NONE, min_tokens=min_tokens)
    text, found = "", None
    for token in [byte_level.encode(c).ids[0] for c in "aSTOPbSTOPc"]:
        piece = detokenizer.push([token])
        text, found = text + piece.text, piece.stop_match
        if found is not None:
            break
    else:
        piece = detokenizer.finish()
        text, found = text + piece.text, piece.stop_match
    assert (text, found) == (shown, match)


def test_a_stop_string_that_begins_within_the_first_tokens_may_end_the_text(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(token_table(byte_level), ["abab"], NONE, min_tokens=4)
    pieces = [detokenizer.push([byte_level.encode(c).ids[0]]) for c in "ababab"]
    assert "".join(piece.text for piece in pieces) == "ab", "the second one, which begins within the first"
    assert pieces[-1].stop_match == "abab"
