"""Between two worker processes: pages are kept as long as somebody renews their lease, and used only if they pass their check."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from sapwood.v1 import worker_pb2, worker_pb2_grpc
from sapwood_common.network.channel import open_channel
from sapwood_testing.link import Link
from sapwood_testing.ports import port_of_its_own
from sapwood_testing.router.handoff_fleet import PAGE, Worker, expected, new_prompt, started, tokens_of
from sapwood_worker.model.pools.host_pool import HEADER_BYTES

pytestmark = pytest.mark.asyncio(loop_scope="module")

_numbers = itertools.count()
TRIES = 20
"""On a machine that is so busy that a lease was not renewed in time, there is another."""


class Pair:
    """Two workers, and what the way for their pages is."""

    def __init__(self, prefill: Worker, decode: Worker, there: Any, here: Any, link: Link, port: int) -> None:
        self.prefill, self.decode, self.there, self.here, self.link, self.port = (
            prefill,
            decode,
            there,
            here,
            link,
            port,
        )

    async def hand_off(self, prompt: Sequence[int]) -> tuple[list[int], worker_pb2.HandoffTicket]:
        """The first token, and the ticket."""
        asked = worker_pb2.WorkerGenerateRequest(request_id=f"p{next(_numbers)}", token_ids=prompt, hand_off=True)
        asked.sampling.seed, asked.sampling.max_tokens = 7, 20
        got = [each async for each in self.there.Generate(asked, timeout=60)]
        ticket = got[-1].ticket
        ticket.source = f"{self.link.host}:{self.port}"
        return tokens_of(got), ticket

    async def take_over(self, prompt: Sequence[int], first: list[int], ticket: worker_pb2.HandoffTicket) -> list[int]:
        """The other tokens."""
        rest = worker_pb2.WorkerGenerateRequest(
            request_id=f"d{next(_numbers)}", token_ids=[*prompt, *first], output_tokens=len(first), ticket=ticket
        )
        rest.sampling.seed, rest.sampling.max_tokens = 7, 20 - len(first)
        return tokens_of([each async for each in self.here.Generate(rest, timeout=60)])

    @contextlib.asynccontextmanager
    async def renewed(self, ticket: worker_pb2.HandoffTicket) -> AsyncIterator[None]:
        """Renews a ticket's lease, as a router does; then the session stands, and nobody says anything on it."""
        call = self.there.Session()
        await call.write(worker_pb2.SessionRequest(heartbeat_ms=100))

        async def renew() -> None:
            while True:
                await call.write(worker_pb2.SessionRequest(renew_handoffs=[ticket.transfer_id]))
                await asyncio.sleep(0.1)

        renewing = asyncio.ensure_future(renew())
        try:
            yield
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[Pair]:
    port = port_of_its_own()
    prefill, decode = Worker("prefill", "--handoff-port", str(port)), Worker("decode", "--handoff-mover", "tcp")
    link = Link("127.0.0.9", "127.0.0.1", (port,))
    await link.open()
    async with started(prefill, decode), open_channel(prefill.address) as there, open_channel(decode.address) as here:
        stubs = worker_pb2_grpc.WorkerStub(there), worker_pb2_grpc.WorkerStub(here)
        yield Pair(prefill, decode, *stubs, link, port)
    await link.close()


async def test_a_page_that_was_spoilt_on_its_way_is_computed_and_the_others_are_used(pair: Pair) -> None:
    for _ in range(TRIES):
        pair.link.spoil(pair.port, 1 + HEADER_BYTES + 5)  # in the content of the first page, after a yes
        prompt = new_prompt()
        before = await pair.decode.counts("pulled_pages", "pull_stale_pages", "pull_fallbacks", "pulled_bytes")
        first, ticket = await pair.hand_off(prompt)
        assert first + await pair.take_over(prompt, first, ticket) == expected(prompt)
        after = await pair.decode.counts("pulled_pages", "pull_stale_pages", "pull_fallbacks", "pulled_bytes")
        pulled, stale, fallbacks, size = (now - then for now, then in zip(after, before, strict=True))
        if pulled:
            break
    assert (pulled, stale, fallbacks) == (len(prompt) // PAGE - 1, 1, 1)
    assert size == pulled * PAGE * 8


async def test_pages_are_kept_while_their_lease_is_renewed_and_freed_after_silence(
    pair: Pair,
) -> None:
    for _ in range(TRIES):
        prompt = new_prompt()
        await pair.prefill.reaches("handoff_pages", lambda held: held == 0)
        expired, renewals = await pair.prefill.counts("handoff_expired", "handoff_renewals")
        first, ticket = await pair.hand_off(prompt)
        async with pair.renewed(ticket):
            await asyncio.sleep(1.5 * ticket.lease_ms / 1000)
            held, lapsed, renewed = await pair.prefill.counts("handoff_pages", "handoff_expired", "handoff_renewals")
        if lapsed == expired:
            break
    assert held == len(prompt) // PAGE and lapsed == expired and renewed > renewals
    await pair.prefill.reaches("handoff_expired", lambda count: count == lapsed + 1)
    assert await pair.prefill.count("handoff_pages") == 0
    stale, fallbacks, pulled = await pair.decode.counts("pull_stale_pages", "pull_fallbacks", "pulled_pages")
    assert first + await pair.take_over(prompt, first, ticket) == expected(prompt)
    found = await pair.decode.counts("pull_stale_pages", "pull_fallbacks", "pulled_pages")
    assert found == [stale + len(prompt) // PAGE, fallbacks + 1, pulled]
