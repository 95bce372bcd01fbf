"""Texts of all kinds on real vocabularies: the service's encoder and detokenizer compared with the `tokenizers` library."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from sapwood.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from sapwood_common.errors import InvalidArgumentError
from sapwood_common.status import from_rpc_error
from sapwood_text.detokenizer import Detokenizer
from sapwood_text.vocabulary import TokenTable
from sapwood_tokenizer.encode.encoder import EncodeOptions, Encoder, EncoderOptions
from sapwood_tokenizer.vocab.loader import LoadedTokenizer, token_table

NAMES = ("demo", "deepseek", "llama3", "qwen3", pytest.param("mistral", marks=pytest.mark.slow))
CODE = Path(argparse.__file__).read_text()
MIB = 1024 * 1024
BARE = EncodeOptions(add_special_tokens=False)

KINDS = {
    "code": [CODE[at : at + 4000] for at in range(0, 40_000, 4000)],
    "python": [
        "def f(x):\n\treturn {'a': [1, 2, 3]}  # comment\n\n\n",
        "if a:\r\n    b\r\n\r\n\t\t\n",
        "x\u00a0=\u00a01",
    ],
    "cjk": [
        "東京は日本の首都です。",
        "汉字和简体字，標點符號。「引用」",
        "한글과 조합형 ㄱㄴㄷ",
        "𠀀𠮷𩸽 outside the first plane",
    ],
    "emoji": ["👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag", "👍🏽🤷🏿‍♀️", "🇫🇷🇯🇵🇺🇳 flags", "0️⃣#️⃣ keys", "\u200d\ufe0f alone"],
    "rtl": ["مرحبا بالعالم، ١٢٣", "שלום עולם", "\u202bright\u202c \u2067to\u2069 left", "اَلْعَرَبِيَّةُ"],
    "scripts": ["नमस्ते दुनिया", "ภาษาไทยไม่เว้นวรรค", "Γειά σου Κόσμε", "Здравствуй, мир", "ქართული", "አማርኛ", "Tiếng Việt"],
    "spaces": [
        "  leading and trailing  ",
        "\u200b\u2003\u3000odd\u2028spaces\u2029",
        "\n" * 70,
        " " * 1000,
        "\t \t ",
        "a  b   c",
    ],
    "odd": [
        "",
        "\x00\x01\x7f\x80\x9f control",
        "e\u0301 ñ n\u0303 ﬁ ½ ① Å",
        "\ufffe\uffff\U0010ffff",
        "\ufeffmark",
        "a" * 5000,
    ],
}
SCRIPTS = "aé ß \n\t1٣'.,-_/東ひ한👩👍🏽🇫\u200d\ufe0f\u0301\u202bمשनภ\u00a0\u3000\x00"
TEXTS = st.text(max_size=50) | st.text(st.sampled_from(SCRIPTS), max_size=50)


@pytest.fixture(params=NAMES, scope="module")
def loaded(request: pytest.FixtureRequest) -> LoadedTokenizer:
    found: LoadedTokenizer = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def table(loaded: LoadedTokenizer) -> TokenTable:
    return token_table(loaded.tokenizer)


@pytest.fixture(
    params=[pytest.param(0, id="uncached", marks=pytest.mark.slow), pytest.param(4 * MIB, id="cached")], scope="module"
)
def encoder(loaded: LoadedTokenizer, request: pytest.FixtureRequest) -> Iterator[Encoder]:
    made = Encoder(
        loaded.tokenizer, EncoderOptions(4 * MIB, exact_cache_bytes=request.param, prefix_cache_bytes=request.param)
    )
    yield made
    made.close()


def streamed(table: TokenTable, ids: list[int], size: int) -> str:
    detokenizer = Detokenizer(table, [], frozenset())
    pieces = [detokenizer.push(ids[at : at + size]).text for at in range(0, len(ids), size)]
    return "".join(pieces) + detokenizer.finish().text


@pytest.mark.parametrize("kind", KINDS)
async def test_texts_of_all_kinds_become_the_librarys_tokens_and_come_back(
    encoder: Encoder, loaded: LoadedTokenizer, table: TokenTable, kind: str
) -> None:
    library = loaded.tokenizer
    texts = KINDS[kind]
    for options, special in ((EncodeOptions(), True), (BARE, False)):
        for _ in range(2):
            ids = [list(one.ids) for one in await encoder.encode(texts, options)]
            assert ids == [library.encode(text, add_special_tokens=special).ids for text in texts]
    for tokens in ids:
        decoded = library.decode(tokens, skip_special_tokens=False)
        assert streamed(table, tokens, 1) == streamed(table, tokens, 7) == decoded


@settings(max_examples=30, deadline=None)
@given(text=TEXTS, size=st.integers(1, 9))
def test_any_text_comes_back_as_the_library_decodes_it(
    loaded: LoadedTokenizer, table: TokenTable, text: str, size: int
) -> None:
    ids = loaded.tokenizer.encode(text, add_special_tokens=False).ids
    decoded = loaded.tokenizer.decode(ids, skip_special_tokens=False)
    if "\ufffd" not in decoded or "\ufffd" in text:
        assert streamed(table, ids, size) == decoded


async def test_a_megabyte_of_anything_is_encoded_as_the_library_does(
    loaded: LoadedTokenizer, request: pytest.FixtureRequest
) -> None:
    encoder = Encoder(loaded.tokenizer, EncoderOptions(4 * MIB, exact_cache_bytes=4 * MIB, prefix_cache_bytes=4 * MIB))
    every_kind = "\n".join(text for texts in KINDS.values() for text in texts)
    texts = [(every_kind * 60)[:MIB]]
    if request.node.callspec.params["loaded"] == "mistral":
        texts += ["x" * MIB, " " * MIB]
    assert len(texts[0]) == MIB
    for text, one in zip(texts, await encoder.encode(texts, BARE), strict=True):
        assert list(one.ids) == loaded.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    encoder.close()


def test_a_long_text_streams_back(loaded: LoadedTokenizer, table: TokenTable) -> None:
    text = ("".join(KINDS["code"]) + "".join(KINDS["cjk"])) * 30
    text = text[: MIB // 4]
    ids = loaded.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    assert streamed(table, ids, 16) == text


async def test_half_a_surrogate_pair_is_refused_by_name(byte_level: Tokenizer, common_service: Any) -> None:
    encoder = Encoder(byte_level, EncoderOptions(MIB))
    with pytest.raises(InvalidArgumentError, match="half a surrogate pair") as caught:
        await encoder.encode(["good", "bad \ud83d"])
    assert caught.value.field == "texts[1]"
    encoder.close()
    good = tokenizer_pb2.TokenizeRequest(texts=["abc"]).SerializeToString()
    async with grpc.aio.insecure_channel(common_service.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary("/sapwood.v1.Tokenizer/Tokenize")(good.replace(b"abc", b"\xed\xa0\xbd"))
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert from_rpc_error(refused.value).field == "texts"
        stub = tokenizer_pb2_grpc.TokenizerStub(channel)
        assert (await stub.Tokenize(tokenizer_pb2.TokenizeRequest(texts=["abc"]))).sequences
