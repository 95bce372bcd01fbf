"""The simulation of two schedulers notices when a line that matters is wrong: each of these mutations must make it fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from sapwood_testing.mutations import Mutation, check_noticed

SIMULATION = Path(__file__).with_name("test_two_schedulers.py")
MOST_STEPS = 250_000
"""As many as the default run makes, of the same seeds; each mutation is noticed within it."""
LANDING = "core/cache/transfer/reads.py"
LEASES, PULLS = "core/cache/transfer/leases.py", "core/cache/transfer/reads.py"
RECORD = "core/cache/storage/record.py"
HANDOFFS = "core/scheduler/results.py"
ARRIVALS, HOST, TIERS = "core/cache/host.py", "core/cache/host.py", "core/cache/hierarchical.py"

MUTATIONS = [
    # A page that was given to somebody else while it was read is not used.
    Mutation(LEASES, "is lease and self._host.epoch_of(page) == epoch", "is lease"),
    # Nor is one whose lease has ended.
    Mutation(LEASES, "return self._leases.get(lease.ticket.transfer_id) is lease and self", "return self"),
    # A lease that nobody renews ends.
    Mutation(LEASES, "if each.until <= now]", "if each.until <= now - 3]"),
    # One that somebody renews does not.
    Mutation(LEASES, "                lease.until = until\n", ""),
    # What was leased is given back.
    Mutation(
        LEASES,
        "        del self._leases[lease.ticket.transfer_id], self._by_serial[lease.serial]\n        self._unpin(lease)\n",
        "        del self._leases[lease.ticket.transfer_id], self._by_serial[lease.serial]\n",
    ),
    # Leases pin their share at most.
    Mutation(LEASES, "return max(0, self._limit - pinned)", "return wanted"),
    # What a ticket names is kept.
    Mutation(LEASES, "        self._host.pin(kept)\n", ""),
    # Pins that were taken for another lease are not given back twice.
    Mutation(LEASES, "        lease.pinned = []\n", ""),
    # What was announced of a prompt is given back if it is not computed.
    Mutation(LEASES, "offer.until is None:\n            self.cancel(serial)", "offer.until is None:\n            pass"),
    # Pages are announced once.
    Mutation(LEASES, "islice(offer.keys, known, None)", "offer.keys"),
    # What was read ahead is the request's when it comes.
    Mutation(PULLS, "if announced is None:\n            pending", "if True:\n            pending"),
    # If it does not come, that is given back.
    Mutation(PULLS, "                self.arrivals.let_go(pending)\n", "                pass\n"),
    # Every byte that came is checked.
    Mutation(RECORD, "there and verify(record, entry.key, namespace)", "there"),
    # Pages that did not come are given back.
    Mutation(
        ARRIVALS, "zip(batch, good, strict=True) if not fine])", "zip(batch, good, strict=True) if not fine][1:])"
    ),
    # For a request that has gone nothing is kept.
    Mutation(ARRIVALS, "        if arrival.cancelled:\n", "        if False:\n"),
    Mutation(ARRIVALS, "        self._host.unpin(arrival.pinned)\n", ""),
    # Reads hold their share at most.
    Mutation(ARRIVALS, "max(0, self._limit - self._occupied)", "self._host.num_pages"),
    # A request waits no longer than its patience.
    Mutation(PULLS, "now >= pending.deadline or not", "not"),
    # A host page that is being written to is not found.
    Mutation(HOST, "entry is not None and entry.ready and", "entry is not None and"),
    # Each allocation of a page gets an epoch of its own.
    Mutation("core/cache/pages.py", "        self._epoch[pages] += 1\n", ""),
    # Pages that a step was to fill and did not are nobody's any more.
    Mutation(TIERS, "            self.leases.lost(entries)\n", "            pass\n"),
    # What a step has not filled is not passed on.
    Mutation(
        HANDOFFS,
        "request.planned // self._page_size, end // self._page_size",
        "request.planned // self._page_size, -(-end // self._page_size)",
    ),
    # What was kept for a request is given back when it starts.
    Mutation(TIERS, "None if self.reads is None else self.reads.settle(serial)", "None"),
    # A request that is aborted while its pages are on their way to the host gets no ticket.
    Mutation(HANDOFFS, "return self._leases is not None and self._leases.cancel(serial)", "return False"),
    # A prompt that is handed off ends with its first token.
    Mutation(
        "core/scheduler/results.py",
        "self._handoffs.offer_whole(request)\n            self._lifecycle.end(request)\n",
        "self._handoffs.offer_whole(request)\n",
    ),
    # What came for nobody is given back, but for what is shared.
    Mutation(LANDING, "        self._drop(entry for", "        list(entry for"),
    Mutation(LANDING, " and self._entries.get(entry.key.hash) is entry)", ")"),
    Mutation(ARRIVALS, "            self._host.unpin(arrived)\n", ""),
    # A page of the source's device that was given to another is not used.
    Mutation("core/cache/transfer/cuda_ipc.py", "if self.epoch_of(page) == epoch else -1", "if page >= 0 else -1"),
    # Of a page that is read from there it does not have to be known that the host has it, but that it was computed.
    Mutation(
        "core/cache/transfer/leases.py", "entry.ready or (on_device and entry.computed)", "entry.ready or on_device"
    ),
    # What comes through the host's memory is checked.
    Mutation(LANDING, "if there and verify(record, entries[place].key, namespace)", "if there"),
    # Pages that came are shared in their order.
    Mutation(LANDING, "entry is not None and entry.ready and", "entry is not None and"),
    # Of pages that came nothing is stored which is given to another before.
    Mutation(TIERS, "        self._adopted.forget(pages)\n", ""),
    # Requests whose pages are there continue.
    Mutation("core/scheduler/scheduler.py", "            self._requests[serial].held = False\n", "            pass\n"),
]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.title)
def test_a_wrong_line_is_noticed(mutation: Mutation, tmp_path: Path) -> None:
    check_noticed(SIMULATION, MOST_STEPS, tmp_path, mutation)
