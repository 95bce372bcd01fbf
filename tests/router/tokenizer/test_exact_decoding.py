"""What the router decodes with a fetched vocabulary is what the ``tokenizers`` library decodes: real vocabularies."""

import random
from array import array

import pytest

from sapwood.v1 import tokenizer_pb2
from sapwood_common.packed_tokens import PackedTokens
from sapwood_text.incremental.events import TextDelta
from sapwood_text.parsed_stream import ParsedStream, StreamOptions, open_stream
from sapwood_text.vocabulary import TokenTable, Vocabulary
from sapwood_tokenizer.serve.convert import vocabulary_part
from sapwood_tokenizer.vocab.loader import LoadedTokenizer, vocabulary_of

TEXTS = [
    "Ünïcödé ñ ß 東京は日本の首都です。 👩‍👩‍👧‍👦 🏳️‍🌈  \n\n\tdef f(x): return {'a': 1}",
    " مرحبا  <b>STOP</b> e\u0301 ﬁ ½ 한글",
]


@pytest.fixture(scope="module", params=["qwen3", "llama3", "deepseek", "mistral", "demo"])
def loaded(request: pytest.FixtureRequest) -> LoadedTokenizer:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def vocabulary(loaded: LoadedTokenizer) -> Vocabulary:
    """As it arrives, in parts."""
    own = vocabulary_of(loaded)
    assert own is not None
    joined, lengths, special = b"", array("I"), {}
    while len(lengths) < own.size:
        sent = vocabulary_part(own, b"f", len(lengths)).SerializeToString()
        assert len(sent) < 2**21
        part = tokenizer_pb2.GetVocabularyResponse.FromString(sent)
        joined += part.tokens
        lengths.extend(part.lengths)
        special |= dict(zip(part.special, (name.decode() for name in part.special_names), strict=True))
    table = TokenTable.packed(PackedTokens(joined, lengths), strips_leading_space=part.strips_leading_space)
    made = Vocabulary(table, part.size, special)
    assert (made.size, made.special_ids) == (loaded.vocab_size, loaded.special_ids)
    return made


def some_ids(loaded: LoadedTokenizer, chance: random.Random) -> list[int]:
    """Tokens of texts cut anywhere, so that characters are broken, with any others and special ones between."""
    ids: list[int] = []
    for _ in range(chance.randint(0, 4)):
        of_text = loaded.tokenizer.encode(chance.choice(TEXTS), add_special_tokens=False).ids
        start = chance.randrange(len(of_text))
        ids += of_text[start : start + chance.randint(1, 12)]
        ids += [chance.randrange(loaded.vocab_size) for _ in range(chance.randint(0, 2))]
        ids += chance.sample(sorted(loaded.special_ids), k=min(len(loaded.special_ids), chance.randint(0, 1)))
    return ids


def streamed(stream: ParsedStream, ids: list[int], chance: random.Random) -> tuple[str, str | None]:
    text, at = "", 0
    while at < len(ids):
        size = chance.randint(1, 4)
        events, _, match = stream.push(ids[at : at + size])
        text += "".join(event.text for event in events if isinstance(event, TextDelta))
        if match is not None:
            return text, match
        at += size
    events, tokens, match = stream.finish()
    assert match is not None or tokens == len(ids)
    return text + "".join(event.text for event in events if isinstance(event, TextDelta)), match


@pytest.mark.parametrize("skip", [True, False])
def test_any_tokens_give_what_the_library_gives(loaded: LoadedTokenizer, vocabulary: Vocabulary, skip: bool) -> None:
    chance, compared = random.Random(f"{loaded.origin[-20:]} {skip}"), 0
    for _ in range(300):
        ids = some_ids(loaded, chance)
        expected = loaded.tokenizer.decode(ids, skip_special_tokens=skip)
        if "\ufffd" in expected and not loaded.tokenizer.decoder.__getstate__().startswith(b'{"type":"ByteLevel"'):
            continue  # of a run of single bytes the library marks whole characters, too, which only its end can tell
        stream = open_stream(vocabulary, StreamOptions(skip_special_tokens=skip))
        assert streamed(stream, ids, chance)[0] == expected, ids
        compared += 1
    assert compared > 100


def test_stop_strings_end_the_text_wherever_tokens_are_cut(loaded: LoadedTokenizer, vocabulary: Vocabulary) -> None:
    chance = random.Random(loaded.origin[-20:])
    for _ in range(200):
        ids = some_ids(loaded, chance)
        text = loaded.tokenizer.decode(ids, skip_special_tokens=True)
        if "\ufffd" in text or not text:
            continue
        starts = [chance.randrange(len(text)) for _ in range(3)]
        stops = ["never there", *(text[start : start + chance.randint(1, 9)] for start in starts)]
        ends = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
        end, length, match = min(ends)
        stream = open_stream(vocabulary, StreamOptions(stop=tuple(stops)))
        assert streamed(stream, ids, chance) == (text[: end + length], match), (ids, stops)
