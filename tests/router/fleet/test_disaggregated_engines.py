"""Real worker processes that pass pages on by a transfer engine, over TCP as between two hosts."""

from __future__ import annotations

import signal
from importlib.util import find_spec

import pytest

from sapwood_testing.router.handoff_fleet import Front, Worker, expected, front, new_prompt, started, tokens_of
from sapwood_testing.worker.storage.mooncake_cluster import mooncake_is_installed

pytestmark = pytest.mark.slow
_MOVERS = [
    pytest.param("nixl", marks=pytest.mark.skipif(find_spec("nixl_cu12") is None, reason="NIXL is not installed")),
    pytest.param("mooncake", marks=pytest.mark.skipif(not mooncake_is_installed(), reason="Mooncake is not installed")),
]


async def _until_pulled(router: Front, decode: Worker, more_than: float) -> float:
    """Answers requests until pages were pulled; how many then."""
    for _ in range(20):  # on a busy machine a lease may end before its pages were pulled
        prompt = new_prompt()
        assert tokens_of(await router.answer(prompt)) == expected(prompt)
        if (pulled := await decode.count("pulled_pages")) > more_than:
            return pulled
    raise AssertionError("no page was pulled")


@pytest.mark.parametrize("mover", _MOVERS)
async def test_pages_pass_by_an_engine_from_a_worker_and_from_its_successor(
    mover: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    prefill, decode = Worker("prefill", "--handoff-mover", mover), Worker("decode", "--handoff-mover", mover)
    async with started(prefill, decode), front([prefill, decode]) as router:
        pulled = await _until_pulled(router, decode, 0)
        prefill.send(signal.SIGKILL)
        await prefill.kill()
        await router.available(1)
        await prefill.start()
        await router.available(2)
        await _until_pulled(router, decode, pulled)
