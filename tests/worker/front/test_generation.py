"""Calls whose prompt is handed off: who has the ticket ends the lease, until somebody has it the scheduler does. And roles."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.errors import DeadlineExceededError
from sapwood_common.telemetry.metrics import MetricSet
from sapwood_worker.front.engine import Engine, Generation
from sapwood_worker.front.metrics import EngineObserver, WorkerMetrics
from sapwood_worker.ipc.messages import Abort, Answered, CacheCommand, Step, Submit, ToScheduler
from sapwood_worker.records.handoff import Handoff, HandoffTicket
from sapwood_worker.records.load import Load
from sapwood_worker.records.output import RequestOutput
from sapwood_worker.settings import Role

TICKET = HandoffTicket(bytes(16), ":1", 1, b"", [], [], 1500)


@pytest.fixture
def sent() -> list[ToScheduler]:
    return []


@pytest.fixture
def engine(sent: list[ToScheduler]) -> Engine:
    return Engine(sent.append, EngineObserver(WorkerMetrics(MetricSet())))


def handed_off(engine: Engine, sent: list[ToScheduler]) -> Generation:
    """A call whose ticket has come and was not read yet."""
    generation = engine.submit("r", [1, 2], SamplingParams(), handoff=Handoff(hands_off=True))
    [submitted] = sent
    assert isinstance(submitted, Submit)
    engine.receive(Step([RequestOutput(submitted.serial, [], "handoff", ticket=TICKET)], Load()))
    return generation


@pytest.mark.parametrize("end", [Generation.close, lambda each: each.fail(DeadlineExceededError("late"))])
async def test_a_ticket_that_nobody_has_read_is_taken_back_when_its_call_ends(
    engine: Engine, sent: list[ToScheduler], end: Callable[[Generation], None]
) -> None:
    generation = handed_off(engine, sent)
    assert not generation.ended
    end(generation)
    [submitted, aborted] = sent
    assert isinstance(submitted, Submit) and aborted == Abort(submitted.serial)


async def test_a_ticket_that_was_read_ends_its_call_and_is_its_readers(engine: Engine, sent: list[ToScheduler]) -> None:
    generation = handed_off(engine, sent)
    output = generation.take()
    assert output is not None and output.ticket == TICKET and generation.ended
    generation.close()
    assert len(sent) == 1
    await asyncio.wait_for(engine.wait_idle(), 60)


async def test_roles_that_are_asked_for_one_after_the_other_are_taken_in_that_order(
    engine: Engine, sent: list[ToScheduler]
) -> None:
    roles: tuple[Role, ...] = ("prefill", "both")
    asked = [asyncio.create_task(engine.set_role(role)) for role in roles]
    for role in roles:  # the scheduler is not asked for the second before it has the first
        while not sent:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        [command] = sent
        assert isinstance(command, CacheCommand) and command.argument == role
        sent.clear()
        engine.receive(Answered(command.call))
    await asyncio.wait_for(asyncio.gather(*asked), 60)
    assert engine.roles[-1] == "both"
