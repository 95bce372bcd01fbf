"""Renderings that take long keep nobody else waiting, and have their turns."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from sapwood.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from sapwood_common.errors import ResourceExhaustedError
from sapwood_tokenizer.template.render_threads import RenderThreads
from sapwood_tokenizer.template.sandbox import Budget, BudgetError

TEMPLATE = (
    "{% if slow %}" + "{% for a in range(99999) %}" * 5 + "{% endfor %}" * 5 + "{% endif %}{{ messages[0].content }}"
)


def start(threads: RenderThreads, budgets: list[Budget], cpu: float) -> asyncio.Future[str]:
    """A rendering that works for so many CPU seconds."""

    async def run() -> str:
        place = await threads.enter()
        budget = Budget(600.0, 1, place)
        budgets.append(budget)

        def work() -> str:
            budget.start()
            until = time.thread_time() + cpu
            while time.thread_time() < until:
                budget.check_time()
            return "done"

        return await threads.run(place, work)

    return asyncio.ensure_future(run())


async def test_slow_renderings_leave_their_places_and_take_turns() -> None:
    threads, budgets = RenderThreads(quick=1, slow=4), []
    endless = [start(threads, budgets, 1e9) for _ in range(3)]
    assert await asyncio.wait_for(start(threads, budgets, 0.0), 120) == "done"
    assert await asyncio.wait_for(start(threads, budgets, 0.2), 120) == "done", "slow, in turn with the endless ones"
    assert not any(one.done() for one in endless)
    for budget in budgets:
        budget.cancel()
    ended = await asyncio.wait_for(asyncio.gather(*endless, return_exceptions=True), 120)
    assert all(isinstance(error, BudgetError) for error in ended)
    assert await asyncio.wait_for(start(threads, budgets, 0.2), 120) == "done", "all is given back"
    threads.close()


async def test_more_slow_renderings_than_there_may_be_are_refused() -> None:
    threads, budgets = RenderThreads(quick=2, slow=1), []
    both = [start(threads, budgets, 1e9) for _ in range(2)]
    (refused,), (left,) = await asyncio.wait(both, timeout=120, return_when=asyncio.FIRST_COMPLETED)
    with pytest.raises(ResourceExhaustedError):
        await refused
    assert await asyncio.wait_for(start(threads, budgets, 0.0), 120) == "done"
    for budget in budgets:
        budget.cancel()
    with pytest.raises(BudgetError):
        await asyncio.wait_for(left, 120)
    threads.close()


async def test_a_flood_of_hostile_renderings_keeps_no_other_waiting(start_service: Callable, tmp_path: Path) -> None:
    (tmp_path / "some.jinja").write_text(TEMPLATE)
    service = start_service("--chat-template", str(tmp_path / "some.jinja"), "--template-timeout", "600")
    hostile_request = tokenizer_pb2.ApplyChatTemplateRequest(
        messages=[{"role": "user", "content": "x"}], template_variables='{"slow": true}'
    )
    async with grpc.aio.insecure_channel(service.address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerStub(channel)
        hostile = [stub.ApplyChatTemplate(hostile_request) for _ in range(12)]
        for number in range(20):
            chat = tokenizer_pb2.ApplyChatTemplateRequest(messages=[{"role": "user", "content": f"other {number}"}])
            answer = await stub.ApplyChatTemplate(chat, timeout=120)
            assert answer.text == f"other {number}"
        assert not any(call.done() for call in hostile)
        for call in hostile:
            call.cancel()
    assert service.stop() == 0
