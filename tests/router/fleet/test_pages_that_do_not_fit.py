"""Real worker processes (around a runner without a model) whose pages others cannot use: they are not paired with those."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from sapwood.cli.main import main
from sapwood_testing.router.handoff_fleet import PAGE, Worker, expected, front, new_prompt, started, tokens_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

NONE_FITS = "no prefill worker's pages fit those of a decode worker"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers() -> AsyncIterator[dict[str, Worker]]:
    made = {
        "prefill": Worker("prefill"),
        "decode": Worker("decode"),
        "strange": Worker("decode", "--page-size", str(PAGE // 2)),
    }
    async with started(*made.values()):
        yield made


async def test_a_prompt_is_handed_off_to_whom_its_pages_are_of_use(workers: dict[str, Worker]) -> None:
    async with front(list(workers.values())) as router:
        for _ in range(6):
            prompt = new_prompt()
            explained = await router.explain(prompt)
            assert (explained.chosen, explained.decode_chosen) == (
                workers["prefill"].address,
                workers["decode"].address,
            )
            assert tokens_of(await router.answer(prompt)) == expected(prompt)
        assert router.count("handoffs") == 6
        assert await workers["strange"].count("prompt_tokens") == 0
        assert await workers["decode"].count("pulled_pages") > 0


async def test_nothing_is_handed_off_where_no_pages_fit_and_explain_says_so(workers: dict[str, Worker]) -> None:
    async with front([workers["prefill"], workers["strange"]]) as router:
        prompt = new_prompt()
        explained = await router.explain(prompt)
        assert not explained.disaggregated
        assert explained.disaggregation == NONE_FITS
        assert tokens_of(await router.answer(prompt)) == expected(prompt)
        assert router.count("handoffs") == 0


async def test_a_worker_with_a_changed_role_is_not_paired_where_pages_do_not_fit(
    workers: dict[str, Worker],
) -> None:
    late = Worker("both", "--host-cache-ratio", "1", "--page-size", str(PAGE // 2))
    async with started(late), front([workers["prefill"], late]) as router:
        assert await asyncio.to_thread(main, ["worker", "role", "decode", "--worker", late.address]) == 0
        for _ in range(2):
            async with asyncio.timeout(60):
                while (await router.explain(new_prompt())).disaggregation != NONE_FITS:
                    await asyncio.sleep(0.01)
            assert tokens_of(await router.answer(prompt := new_prompt())) == expected(prompt)
            assert router.count("handoffs") == 0
            late.send_to_scheduler(signal.SIGKILL)  # the next one is what this one was made
            await router.available(1)
            await router.available(2)


async def test_a_worker_whose_pages_do_not_fit_goes_on_where_nobody_else_is_left(workers: dict[str, Worker]) -> None:
    pair = workers["prefill"], workers["decode"]
    async with front([*pair, workers["strange"]]) as router:
        prompt = new_prompt()
        call = router.stream(prompt, 60)
        answer = [await anext(aiter(call))]
        for lost in pair:
            lost.process.kill()
        answer += [response async for response in call]
        assert tokens_of(answer) == expected(prompt, 60)
