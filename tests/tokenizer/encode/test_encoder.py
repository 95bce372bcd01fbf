import asyncio
import random
from array import array

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from sapwood_common.errors import InvalidArgumentError
from sapwood_tokenizer.encode.encoder import EncodeOptions, Encoder, EncoderOptions
from sapwood_tokenizer.vocab.loader import LoadedTokenizer

MIB = 1024 * 1024
BARE = EncodeOptions(add_special_tokens=False)


@pytest.fixture(params=["cached", "uncached"])
def encoder(demo: LoadedTokenizer, request: pytest.FixtureRequest):
    budget = MIB if request.param == "cached" else 0
    made = Encoder(demo.tokenizer, EncoderOptions(MIB, exact_cache_bytes=budget, prefix_cache_bytes=budget))
    yield made
    made.close()


async def test_concurrent_requests_of_all_sizes_get_their_own_tokens(
    encoder: Encoder, demo: LoadedTokenizer, corpus: list[str]
) -> None:
    chance = random.Random(1)

    async def ask(number: int) -> None:
        texts = [f"{number} {chance.choice(corpus)}" * chance.choice((0, 1, 1, 40)) for _ in range(number % 7)]
        if number == 5:
            texts[1:1] = ["long one " * 10_000]
        special, offsets = number % 3 > 0, number % 4 == 0
        got = await encoder.encode(texts, EncodeOptions(add_special_tokens=special, offsets=offsets))
        expected = [demo.tokenizer.encode(text, add_special_tokens=special) for text in texts]
        assert [list(one.ids) for one in got] == [encoding.ids for encoding in expected]
        if offsets:
            assert [one.offsets for one in got] == [encoding.offsets for encoding in expected]

    await asyncio.gather(*(ask(number) for number in range(60)))


async def test_many_texts_in_one_request_come_back_in_order(encoder: Encoder, demo: LoadedTokenizer) -> None:
    texts = [f"number {number} " + "of many " * (number % 50) for number in range(3000)]
    encoded = await encoder.encode(texts)
    assert [list(one.ids) for one in encoded] == [e.ids for e in demo.tokenizer.encode_batch(texts)]


async def test_a_short_text_does_not_wait_for_a_long_one(encoder: Encoder) -> None:
    for attempt in range(5):  # this thread may get nothing of a core for as long as the long one takes
        long = asyncio.create_task(encoder.encode([f"{attempt} " + "x y z! " * 140_000]))
        await asyncio.sleep(0)
        for number in range(3):
            await encoder.encode([f"short {attempt} {number}"])
        overtaken = not long.done()
        assert len((await long)[0].ids) > 140_000
        if overtaken:
            break
    assert overtaken


async def test_a_text_over_the_limit_is_refused_by_its_index_and_bytes_count(demo: LoadedTokenizer) -> None:
    encoder = Encoder(demo.tokenizer, EncoderOptions(10))
    assert len(await encoder.encode(["0123456789", "ééééé"], BARE)) == 2
    with pytest.raises(InvalidArgumentError, match="12 bytes") as caught:
        await encoder.encode(["ok", "éééééé"], BARE)
    assert caught.value.field == "texts[1]"
    encoder.close()


async def test_a_caller_that_gives_up_takes_nobody_with_it(encoder: Encoder, demo: LoadedTokenizer) -> None:
    tasks = [asyncio.create_task(encoder.encode([f"text {n}"])) for n in range(20)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for n, result in enumerate(results):
        if n % 2 == 0:
            assert isinstance(result, asyncio.CancelledError)
        else:
            assert result[0].ids == array("I", demo.tokenizer.encode(f"text {n}").ids)


async def test_a_text_that_the_library_gives_up_on_fails_alone_and_by_name(byte_level: Tokenizer) -> None:
    library = Tokenizer.from_str(byte_level.to_str())
    # Takes time exponential in the number of letters where no "b" follows; the library gives up after ten million steps.
    words = pre_tokenizers.Split(Regex(r"(a+)+b|[\s\S]"), behavior="isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    encoder = Encoder(library, EncoderOptions(MIB, threads=1))
    first = asyncio.create_task(encoder.encode(["goes at once, so that the others are one batch"]))
    await asyncio.sleep(0)
    others = [asyncio.create_task(encoder.encode([f"other {number}"])) for number in range(5)]
    others.insert(3, asyncio.create_task(encoder.encode(["fine", "a" * 60])))
    results = await asyncio.gather(*others, return_exceptions=True)
    error = results.pop(3)
    assert isinstance(error, InvalidArgumentError)
    assert (error.field, "cannot encode" in error.message, "retry-limit" in error.message) == ("texts[1]", True, True)
    assert [list(one.ids) for (one,) in results] == [library.encode(f"other {number}").ids for number in range(5)]
    await first
    encoder.close()


@pytest.mark.parametrize("cached", [True, False])
async def test_more_tokens_than_the_limit_are_refused_by_index_and_count(byte_level: Tokenizer, cached: bool) -> None:
    encoder = Encoder(byte_level, EncoderOptions(MIB, max_text_tokens=5, exact_cache_bytes=MIB if cached else 0))
    for _ in range(2):  # encoded, and from the cache
        for options, count in (
            (EncodeOptions(), 6),
            (EncodeOptions(max_tokens=3), 4),
            (EncodeOptions(max_tokens=9), 6),
        ):
            with pytest.raises(InvalidArgumentError, match=f"{count} tokens") as caught:
                await encoder.encode(["\x00\x01", "\x00" * count], options)
            assert caught.value.field == "texts[1]"
        assert len((await encoder.encode(["\x00" * 5]))[0].ids) == 5
        with pytest.raises(InvalidArgumentError, match="6 tokens") as caught:
            await encoder.encode(["\x00" * 6], field="messages")
        assert caught.value.field == "messages"
    encoder.close()
