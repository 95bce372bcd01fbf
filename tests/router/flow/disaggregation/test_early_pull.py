"""Whom a router tells of pages that can be read already, and what it keeps for that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sapwood.v1 import worker_pb2
from sapwood_router.flow.disaggregation.handoff import EarlyPull
from sapwood_router.routing.policies.base import Choice, PromptPages
from sapwood_router.transport.held_tickets import HeldTicket
from sapwood_router.transport.shared_call import TOKENS_A_MESSAGE

PROMPT = PromptPages([1, 2, 3])


class Holder:
    """Takes the place of a session's tickets."""

    def __init__(self) -> None:
        self.released: list[bytes] = []

    def release(self, transfer_id: bytes) -> None:
        self.released.append(transfer_id)

    def ticket(self, name: bytes) -> HeldTicket:
        return HeldTicket(worker_pb2.HandoffTicket(transfer_id=name), "there:1", self)  # type: ignore[arg-type]


def told() -> tuple[EarlyPull, list[worker_pb2.HandoffAnnouncement], Any]:
    said: list[worker_pb2.HandoffAnnouncement] = []
    worker: Any = SimpleNamespace(session=SimpleNamespace(announce=said.append))
    return EarlyPull(worker, Choice("here:1", "least_load")), said, worker


def test_the_prompt_goes_with_the_first_announcement_of_each_transfer() -> None:
    early, said, worker = told()
    holder = Holder()
    for name in (b"a", b"a", b"b"):
        early.announce(holder.ticket(name), PROMPT, "salt")
    assert [(list(each.token_ids), each.cache_salt) for each in said] == [
        ([1, 2, 3], "salt"),
        ([], ""),
        ([1, 2, 3], "salt"),
    ]
    assert holder.released == [b"a"]
    worker.session = None  # it is lost: nobody is told
    early.announce(holder.ticket(b"b"), PROMPT, "salt")
    assert len(said) == 3


def test_a_very_long_prompt_is_not_sent_twice() -> None:
    early, said, _ = told()
    early.announce(Holder().ticket(b"a"), PromptPages([1] * (TOKENS_A_MESSAGE + 1)), "")
    assert not said


def test_the_ticket_that_all_is_read_by_is_not_released() -> None:
    early, _, _ = told()
    holder = Holder()
    early.announce(holder.ticket(b"a"), PROMPT, "")
    early.release(holder.ticket(b"a"))
    assert not holder.released
    early.announce(holder.ticket(b"a"), PROMPT, "")
    early.release(holder.ticket(b"other"))
    early.release()
    assert holder.released == [b"a"]
