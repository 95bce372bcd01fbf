"""Prompts that ask for what belongs between two texts, in the forms of real models' vocabularies."""

from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer

from sapwood_common.errors import InvalidArgumentError
from sapwood_tokenizer.encode.encoder import EncodeOptions, Encoder, EncoderOptions, find_form
from sapwood_tokenizer.vocab.loader import LoadedTokenizer

BEFORE, AFTER = "def f(x):\n    ", "return x)\n"
CACHED = EncoderOptions(2000, exact_cache_bytes=2**20, prefix_cache_bytes=2**20)


@pytest.fixture
def encoder_of() -> Iterator:
    made: list[Encoder] = []

    def make(tokenizer: Tokenizer) -> Encoder:
        made.append(Encoder(tokenizer, CACHED))
        return made[-1]

    yield make
    for encoder in made:
        encoder.close()


async def prompts(encoder: Encoder, *texts: str, **options: object) -> list[list[int]]:
    encoded = await encoder.encode(texts, EncodeOptions(suffix=AFTER, **options))  # type: ignore[arg-type]
    return [list(one.ids) for one in encoded]


@pytest.mark.parametrize(
    ("name", "form", "ends"),
    [
        ("qwen3", "<|fim_prefix|>{before}<|fim_suffix|>{after}<|fim_middle|>", {"<|file_sep|>", "<|repo_name|>"}),
        ("deepseek", "<｜fim▁begin｜>{before}<｜fim▁hole｜>{after}<｜fim▁end｜>", set()),
    ],
)
async def test_byte_level_models_get_what_they_were_trained_on(
    request: pytest.FixtureRequest, encoder_of, name: str, form: str, ends: set[str]
) -> None:
    loaded: LoadedTokenizer = request.getfixturevalue(name)
    encoder = encoder_of(loaded.tokenizer)
    written = [loaded.tokenizer.encode(form.format(before=text, after=AFTER)).ids for text in (BEFORE, "", "x")]
    for _ in range(2):  # the second time from the cache
        assert await prompts(encoder, BEFORE, "", "x") == written
    found = {loaded.tokenizer.id_to_token(token) for token in encoder.fill_in_middle.end_token_ids}
    assert found >= ends


async def test_mistrals_form_has_the_suffix_first_and_puts_no_space_before_it(
    mistral: LoadedTokenizer, encoder_of
) -> None:
    encoder = encoder_of(mistral.tokenizer)
    for after, last in (("return x", ["return", "▁x"]), (" x", ["▁x"])):
        (one,) = await encoder.encode(["def f("], EncodeOptions(suffix=after))
        tokens = [mistral.tokenizer.id_to_token(token) for token in one.ids]
        assert tokens == ["<s>", "[SUFFIX]", *last, "[PREFIX]", "▁def", "▁f", "("]


@pytest.mark.parametrize(
    ("tokens", "end", "written"),
    [
        (["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], "<file_sep>", "<fim_prefix>{}<fim_suffix>{}<fim_middle>"),
        (
            ["<[fim-suffix]>", "<[fim-prefix]>", "<[fim-middle]>"],
            None,
            "<[fim-suffix]>{1}<[fim-prefix]>{0}<[fim-middle]>",
        ),
        (["▁<PRE>", "▁<SUF>", "▁<MID>"], "▁<EOT>", "▁<PRE>{}▁<SUF>{}▁<MID>"),
    ],
)
async def test_other_families_are_known_by_their_tokens(
    byte_level: Tokenizer, encoder_of, tokens: list[str], end: str | None, written: str
) -> None:
    tokenizer = Tokenizer.from_str(byte_level.to_str())
    assert find_form(tokenizer) is None
    tokenizer.add_special_tokens(tokens[:-1])
    assert find_form(tokenizer) is None, "one is missing"
    tokenizer.add_special_tokens([*tokens, *([end] if end else [])])
    encoder = encoder_of(tokenizer)
    assert await prompts(encoder, BEFORE) == [tokenizer.encode(written.format(BEFORE, AFTER)).ids]
    (plain,) = await prompts(encoder, BEFORE + tokens[0], parse_special_tokens=False)
    assert [plain.count(tokenizer.token_to_id(token)) for token in tokens] == [1, 1, 1], "that of others is text"
    ends = [*tokens, *([end] if end else [])]
    assert encoder.fill_in_middle.end_token_ids == tuple(map(tokenizer.token_to_id, ends))


async def test_what_cannot_be_done_is_refused_by_name(
    byte_level: Tokenizer, qwen3: LoadedTokenizer, encoder_of
) -> None:
    able, unable = encoder_of(qwen3.tokenizer), encoder_of(byte_level)
    for encoder, options, field in (
        (unable, {"suffix": "x"}, "suffix"),
        (able, {"suffix": "x", "offsets": True}, "return_offsets"),
        (able, {"suffix": "x" * 2001}, "suffix"),
        (able, {"suffix": "\ud800"}, "suffix"),
        (able, {"suffix": "x y z", "max_tokens": 7}, "texts[1]"),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            await encoder.encode(["a", "a b"], EncodeOptions(**options))
        assert caught.value.field == field
    with pytest.raises(InvalidArgumentError, match="at most 16 texts"):
        await able.encode(["a"] * 17, EncodeOptions(suffix="x"))
    assert unable.fill_in_middle is None
