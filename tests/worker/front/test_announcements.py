"""What a worker's front makes of pages that are announced while a prompt is computed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from sapwood.v1 import worker_pb2
from sapwood_common.errors import InvalidArgumentError
from sapwood_testing.worker.no_loras import no_loras
from sapwood_worker.front.convert import to_announced, to_response
from sapwood_worker.front.engine import Generation
from sapwood_worker.records.handoff import HandoffTicket
from sapwood_worker.records.output import RequestOutput

FIRST = HandoffTicket(bytes(16), ":1", 5, b"model", [b"a", b"b"], [(7, 1), (9, 1)], 1500)
SECOND = replace(FIRST, page_hashes=[b"c"], places=[(4, 2)], first_page=2)
ALL = replace(FIRST, page_hashes=[b"a", b"b", b"c"], places=[(7, 1), (9, 1), (4, 2)])


def generation() -> Generation:
    return Generation("asked", 1, lambda active: None)


def test_announcements_that_a_slow_reader_has_not_taken_come_as_one() -> None:
    asked = generation()
    for ticket in (FIRST, SECOND):
        asked.put(0, RequestOutput(1, [], None, ticket=ticket))
    taken = asked.take()
    assert taken is not None and taken.ticket == ALL
    said = to_response(taken)
    assert said.HasField("announced") and not said.HasField("ticket") and not said.HasField("usage")
    assert list(said.announced.places) == [7, 9, 4]
    asked.put(0, RequestOutput(1, [], None, ticket=SECOND))
    taken = asked.take()
    assert taken is not None and to_response(taken).announced.first_page == 2


def test_an_announcement_of_another_transfer_takes_the_place_of_the_one_before() -> None:
    asked, other = generation(), replace(FIRST, transfer_id=bytes(15) + b"x")
    for ticket in (FIRST, other):
        asked.put(0, RequestOutput(1, [], None, ticket=ticket))
    taken = asked.take()
    assert taken is not None and taken.ticket == other


def test_the_ticket_stands_for_all_that_was_announced() -> None:
    asked = generation()
    asked.put(0, RequestOutput(1, [], None, ticket=FIRST))
    asked.put(0, RequestOutput(1, [3], None, 9, 1))
    asked.put(0, RequestOutput(1, [], "handoff", 9, 1, ticket=ALL))
    taken = asked.take()
    assert taken is not None
    said = to_response(taken)
    assert list(said.token_ids) == [3] and not said.HasField("announced")
    assert list(said.ticket.page_hashes) == [b"a", b"b", b"c"]


def test_only_decode_workers_read_ahead_and_a_false_ticket_is_refused() -> None:
    told, none = worker_pb2.HandoffAnnouncement(token_ids=[1, 2, 3]), no_loras()
    told.ticket.transfer_id, told.ticket.first_page = bytes(16), 4
    assert to_announced(told, ("both", "prefill"), none) is None
    pages = to_announced(told, ("decode", "prefill"), none)
    assert pages is not None and pages.ticket.first_page == 4 and len(pages.token_ids) == 12
    told.ticket.places.append(3)
    with pytest.raises(InvalidArgumentError, match="ticket"):
        to_announced(told, ["decode"], none)
