import asyncio
import random

import pytest
from tokenizers import Tokenizer

from sapwood_common.errors import InvalidArgumentError
from sapwood_tokenizer.encoder import Encoder
from sapwood_tokenizer.loader import LoadedTokenizer

MIB = 1024 * 1024


@pytest.fixture
def encoder(demo: LoadedTokenizer):
    made = Encoder(demo.tokenizer, MIB)
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
        special = number % 3 > 0
        ids = await encoder.encode(texts, add_special_tokens=special)
        assert [list(i) for i in ids] == [demo.tokenizer.encode(t, add_special_tokens=special).ids for t in texts]

    await asyncio.gather(*(ask(number) for number in range(60)))


async def test_many_texts_in_one_request_come_back_in_order(encoder: Encoder, demo: LoadedTokenizer) -> None:
    texts = [f"number {number} " + "of many " * (number % 50) for number in range(3000)]
    ids = await encoder.encode(texts, add_special_tokens=True)
    assert [list(i) for i in ids] == [e.ids for e in demo.tokenizer.encode_batch(texts)]


async def test_a_short_text_does_not_wait_for_a_long_one(encoder: Encoder) -> None:
    long = asyncio.create_task(encoder.encode(["x y z! " * 140_000], add_special_tokens=True))
    await asyncio.sleep(0)
    for _ in range(3):
        await encoder.encode(["short"], add_special_tokens=True)
    assert not long.done()
    assert len((await long)[0]) > 140_000


async def test_a_text_over_the_limit_is_refused_by_its_index_and_bytes_count(demo: LoadedTokenizer) -> None:
    encoder = Encoder(demo.tokenizer, 10)
    assert len(await encoder.encode(["0123456789", "ééééé"], add_special_tokens=False)) == 2
    with pytest.raises(InvalidArgumentError, match="12 bytes") as caught:
        await encoder.encode(["ok", "éééééé"], add_special_tokens=False)
    assert caught.value.field == "texts[1]"
    encoder.close()


async def test_a_caller_that_gives_up_takes_nobody_with_it(encoder: Encoder, demo: LoadedTokenizer) -> None:
    tasks = [asyncio.create_task(encoder.encode([f"text {n}"], add_special_tokens=True)) for n in range(20)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for n, result in enumerate(results):
        if n % 2 == 0:
            assert isinstance(result, asyncio.CancelledError)
        else:
            assert list(result[0]) == demo.tokenizer.encode(f"text {n}").ids


async def test_a_text_that_the_library_cannot_take_fails_alone(byte_level: Tokenizer) -> None:
    encoder = Encoder(byte_level, MIB)
    with pytest.raises(RuntimeError, match="library failed"):
        await encoder.encode(["half a pair: \ud800"], add_special_tokens=True)
    assert list((await encoder.encode(["hello"], add_special_tokens=True))[0]) == byte_level.encode("hello").ids
    encoder.close()
