"""The vocabulary that a router decodes answers with: fetched once, checked when the tokenizer may be another."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import pytest

from sapwood.v1 import tokenizer_pb2
from sapwood_common.network.channel import Dialer
from sapwood_router.tokenizer.client import TokenizerClient
from sapwood_router.tokenizer.replica import TokenizerReplica
from sapwood_testing.router.fake_tokenizer import FakeTokenizer

PATIENCE = 60.0


@contextlib.asynccontextmanager
async def client_of(*fakes: FakeTokenizer) -> AsyncIterator[TokenizerClient]:
    for fake in fakes:
        await fake.start()
    replicas = [TokenizerReplica(fake.address, Dialer(), lambda: None, problem=None) for fake in fakes]
    try:
        yield TokenizerClient(lambda: replicas, PATIENCE)
    finally:
        for replica in replicas:
            await replica.channel.close()
        for fake in fakes:
            await fake.kill()


def later() -> float:
    return asyncio.get_running_loop().time() + PATIENCE


async def test_requests_of_one_moment_share_one_fetch_of_all_parts() -> None:
    fake = FakeTokenizer()
    async with client_of(fake) as client:
        found = await asyncio.gather(*(client.vocabulary("r", later()) for _ in range(20)))
        assert all(each is found[0] for each in found)
        assert [found[0].bytes_of(token) for token in (2, 3, 100, 258)] == [b"<2>", b"\x00", b"a", b"\xff"]
        assert (found[0].special_ids, found[0].special[2], found[0].size) == ({0, 1, 2}, "<2>", 259)
        assert found[0].bytes_of(2**32 - 1) == b""
        assert fake.vocabularies == 2


async def test_a_vocabulary_is_fetched_again_only_if_its_fingerprint_changed() -> None:
    fake = FakeTokenizer()
    async with client_of(fake) as client:
        first = await client.vocabulary("r", later())
        client.forget()
        assert await client.vocabulary("r", later()) is first
        assert fake.vocabularies == 2
        fake._offset = 40
        assert await client.vocabulary("r", later()) is first, "nothing was lost"
        client.forget()
        second = await client.vocabulary("r", later())
        assert second.bytes_of(137) == b"a" == first.bytes_of(100)


async def test_parts_of_two_vocabularies_are_never_mixed() -> None:
    class Replaced(FakeTokenizer):
        async def GetVocabulary(self, request, context):  # noqa: N802 - the method of the protocol
            if request.first and self.vocabularies == 1:
                self._offset = 40
            return await super().GetVocabulary(request, context)

    fake = Replaced()
    async with client_of(fake) as client:
        found = await client.vocabulary("r", later())
        assert [found.bytes_of(token) for token in (2, 137, 295)] == [b"<2>", b"a", b"\xff"]


@pytest.mark.parametrize(("strips", "beside_a_new_one"), [(True, False), (False, False), (False, True)])
async def test_an_older_tokenizer_is_asked_for_each_token(strips: bool, beside_a_new_one: bool) -> None:
    words = {300: b" word", 301: " wörd".encode()}

    class Old(FakeTokenizer):
        async def GetVocabulary(self, request, context):  # noqa: N802 - the method of the protocol
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")

        async def GetInfo(self, request, context):  # noqa: N802 - the method of the protocol
            info = await super().GetInfo(request, context)
            if not beside_a_new_one:  # which may be the one that says what it is
                info.ClearField("vocabulary_fingerprint")
            info.vocab_size = 20_000
            return info

        async def GetTokenBytes(self, request, context):  # noqa: N802 - the method of the protocol
            tokens = [words.get(token, b"<2>" if token == 2 else b"%d" % token) for token in request.token_ids]
            return tokenizer_pb2.GetTokenBytesResponse(tokens=tokens, special=[2] if 2 in request.token_ids else ())

        async def Detokenize(self, request_iterator, context):  # noqa: N802 - the method of the protocol
            async for request in request_iterator:
                (asked,) = request.inputs
                assert asked.token_ids == [300] and asked.end
                text = words[300].decode().removeprefix(" " * strips)
                yield tokenizer_pb2.DetokenizeResponse(
                    outputs=[tokenizer_pb2.DetokenizeOutput(stream_id=asked.stream_id, text=text, ended=True)]
                )

    async with client_of(Old()) as client:
        found = await client.vocabulary("r", later())
        assert [found.bytes_of(token) for token in (2, 301, 19_999, 20_000)] == [b"<2>", words[301], b"19999", b""]
        assert (found.special, found.size, found.table.strips_leading_space) == ({2: "<2>"}, 20_000, strips)


async def test_a_request_that_leaves_takes_the_vocabulary_from_nobody_else() -> None:
    class Slow(FakeTokenizer):
        go_on = asyncio.Event()

        async def GetVocabulary(self, request: tokenizer_pb2.GetVocabularyRequest, context):  # noqa: N802
            await self.go_on.wait()
            return await super().GetVocabulary(request, context)

    fake = Slow()
    async with client_of(fake) as client:
        leaves, stays = (asyncio.ensure_future(client.vocabulary("r", later())) for _ in range(2))
        await asyncio.sleep(0.05)
        leaves.cancel()
        fake.go_on.set()
        assert (await stays).size == 259
