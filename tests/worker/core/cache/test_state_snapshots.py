"""Snapshots of states: what a row resumes from is exactly the state of its tokens, whatever was taken, evicted and split."""

from __future__ import annotations

import importlib.util
import random
from array import array
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sapwood_common.errors import ResourceExhaustedError
from sapwood_worker.core.cache.pages import PageAllocator, PageTable
from sapwood_worker.core.cache.prefix import PrefixCache
from sapwood_worker.core.cache.states import StateSnapshots
from sapwood_worker.records.kv_layout import KVComponent, KVLayout, StateSlots

PAGES, ROWS, WIDTH = 40, 4, 24


def test_states_are_no_pages_and_a_layer_may_have_both() -> None:
    kept = KVComponent((0, 1), 2, 4, 8, "bfloat16"), KVComponent((1, 2), 1, 4, 96, "float32", needed="state")
    layout = KVLayout(kept, 16)
    assert layout.groups == ("all",)
    assert layout.layers == (0, 1)
    assert layout.state_bytes == 2 * 4 * 96 * 4, "one vector a head, however many tokens there are"
    assert layout.page_bytes == 2 * 2 * 4 * 16 * 8 * 2
    with pytest.raises(ValueError, match="a component with pages"):
        KVLayout(kept[1:], 16)


class Computed:
    """A prefix cache, and what a device would have: each page's and each state's tokens, instead of numbers."""

    def __init__(self, page_size: int, snapshots: int, pages: int = PAGES) -> None:
        self.size = page_size
        self.table = PageTable(ROWS, WIDTH)
        self.cache = PrefixCache(PageAllocator(pages), self.table, page_size, states=StateSlots(snapshots))
        self.pages: dict[int, tuple[int, ...]] = {}
        self.snapshots: dict[int, tuple[int, ...]] = {}
        self.rows: dict[int, list[int]] = {}  # tokens of each row
        self.computed: dict[int, int] = {}
        self.states: dict[int, tuple[int, ...]] = {}

    @property
    def known(self) -> StateSnapshots:
        assert self.cache.states is not None
        return self.cache.states

    def start(self, tokens: list[int]) -> int | None:
        """Begins a row; returns it, or None if there is no room."""
        needed = -(-len(tokens) // self.size)
        found, unlocked = self.cache.probe(array("I", tokens), b"")
        if needed - found + unlocked > self.cache.num_available or not self.table.num_free:
            return None
        expected = self.cache.find(array("I", tokens), b"")
        row = self.table.open()
        self.computed[row] = self.cache.open(row, str(row), array("I", tokens), b"")
        assert self.computed[row] == expected
        assert self.cache.allocate(row, needed - self.table.length(row))
        self.rows[row] = tokens
        return row

    def step(self, row: int, count: int) -> None:
        """Computes a row's next tokens, as a runner and a scheduler do."""
        tokens, start = self.rows[row], self.computed[row]
        end = min(start + count, len(tokens))
        if row not in self.states:
            source = self.known.enter(row)
            self.states[row] = () if source < 0 else self.snapshots[source]
        planned = self.known.plan(row, start, end, len(tokens))
        assert self.states[row] == tuple(tokens[:start]), "the state is not that of the tokens before"
        kept = self.cache.kept(row)
        for at in range(start // self.size, -(-end // self.size)):
            page, prefix = int(self.table.rows[row, at]), tuple(tokens[: (at + 1) * self.size])
            if (at + 1) * self.size <= kept:
                assert self.pages[page] == prefix, "a page that is not computed again holds other tokens"
            elif end >= (at + 1) * self.size:
                self.pages[page] = prefix
        for count_of, slot in planned:
            assert start < count_of <= end and count_of % self.size == 0
            self.snapshots[slot] = tuple(tokens[:count_of])
        self.states[row], self.computed[row] = tuple(tokens[:end]), end
        for count_of, _ in planned:
            self.known.took(row, count_of, len(tokens))
        self.cache.commit(row, array("I", tokens), end)

    def stop(self, row: int) -> None:
        """Ends a row, wherever it is."""
        self.cache.close(row)
        self.table.close(row)
        self.states.pop(row, None)
        del self.rows[row], self.computed[row]

    def run(self, tokens: list[int], chunk: int = 512) -> int:
        """Computes a whole prompt; returns how many of its tokens need not be computed."""
        row = self.start(tokens)
        assert row is not None
        found = self.computed[row]
        while self.computed[row] < len(tokens):
            self.step(row, chunk)
        self.stop(row)
        return found


def test_the_second_request_of_a_branch_makes_its_snapshot() -> None:
    model = Computed(4, snapshots=8, pages=200)
    common = list(range(40))
    assert model.run([*common, *range(100, 140)]) == 0
    assert model.run([*common, *range(200, 240)]) == 0, "nobody knew that requests branch there"
    assert model.run([*common, *range(300, 340)]) == 40
    assert model.run([*common, *range(100, 140)]) == 76, "the last page before the end of the first input"


@pytest.mark.parametrize("snapshots", [0, 1])
def test_requests_run_with_fewer_snapshots_than_are_wanted(snapshots: int) -> None:
    model = Computed(4, snapshots=snapshots, pages=200)
    for _ in range(3):
        for seed in range(4):
            model.run(random.Random(seed).choices(range(9), k=60))
    model.cache.check()
    model.cache.check_idle()


def test_what_is_often_asked_for_outlives_many_that_nobody_asks_for() -> None:
    model = Computed(4, snapshots=6, pages=400)
    system = list(range(48))
    for seed in range(60):
        found = model.run([*system, *random.Random(seed).choices(range(100, 999), k=40)])
        assert seed < 2 or found == 48, f"request {seed}"


def test_a_text_that_goes_on_gives_up_its_earlier_snapshots_first() -> None:
    model = Computed(16, snapshots=3, pages=100)
    other = list(range(500, 548))
    model.run(other)
    talk: list[int] = []
    for turn in range(8):
        talk = [*talk, *range(1000 * turn, 1000 * turn + 48)]
        assert model.run(talk) == max(0, 48 * turn - 16), f"turn {turn}"
    assert model.known.num_evicted > 6
    assert model.run(other) == 32, "another text keeps its own"


def test_what_never_has_a_state_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Computed(4, snapshots=0, pages=200)
    for _ in range(200):
        model.run(list(range(40)))
    [said] = [record.getMessage() for record in caplog.records]
    assert "64 requests had cached pages, but the states of none of them were there" in said


def test_agents_find_states_for_nearly_all_tokens_whose_pages_are_cached() -> None:
    path = Path(__file__).resolve().parents[4] / "benchmarks" / "bench_state_prefixes.py"
    spec = importlib.util.spec_from_file_location("bench_state_prefixes", path)
    assert spec is not None and spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    load = bench.ours(page_size=16, snapshots=48, num_pages=1 << 14, at_once=8)
    assert load.prefix_page_tokens > 0.9 * load.prompt_tokens
    assert load.prefix_state_tokens > 0.98 * load.prefix_page_tokens, (
        "with two snapshots and a half for each conversation"
    )
    pages, states = bench.aligned(block=528)
    assert states < 0.9 * pages, "one state a request finds less, though it forgets nothing"


class Machine(RuleBasedStateMachine):
    """Requests over few different tokens, so that they share beginnings, in a pool that is too small for all of them."""

    @initialize(size=st.sampled_from([1, 4, 16]), snapshots=st.integers(0, 6))
    def begin(self, size: int, snapshots: int) -> None:
        self.model = Computed(size, snapshots)
        self.talks: list[list[int]] = [[]]

    @rule(data=st.data(), extra=st.integers(1, 40))
    def start(self, data: st.DataObject, extra: int) -> None:
        talk = data.draw(st.sampled_from(self.talks))
        cut = data.draw(st.integers(0, len(talk)))
        seed = data.draw(st.integers(0, 3))
        most = min(WIDTH, PAGES // 2) * self.model.size
        tokens = [*talk[:cut], *random.Random(seed).choices(range(3), k=extra)][:most]
        if self.model.start(tokens) is not None:
            self.talks = [*self.talks[-6:], tokens]

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data(), count=st.integers(1, 40))
    def compute(self, data: st.DataObject, count: int) -> None:
        row = data.draw(st.sampled_from(sorted(self.model.rows)))
        if self.model.computed[row] < len(self.model.rows[row]):
            self.model.step(row, count)

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data(), where=st.integers(1, 10))
    def want(self, data: st.DataObject, where: int) -> None:
        row = data.draw(st.sampled_from(sorted(self.model.rows)))
        self.model.known.want(row, where * self.model.size)

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        self.model.stop(data.draw(st.sampled_from(sorted(self.model.rows))))

    @rule(data=st.data(), name=st.sampled_from("ab"))
    def pin(self, data: st.DataObject, name: str) -> None:
        tokens = array("I", data.draw(st.sampled_from(self.talks)))
        try:
            pinned = self.model.cache.pin(name, tokens, b"", PAGES // 4, None)
        except ResourceExhaustedError:
            return
        assert pinned == 0 or self.model.cache.find(array("I", [*tokens[:pinned], 0]), b"") == pinned

    @rule(name=st.sampled_from("ab"))
    def unpin(self, name: str) -> None:
        self.model.cache.pins.remove(name)

    @rule()
    def flush(self) -> None:
        self.model.cache.flush()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "model"):
            return
        self.model.cache.check()
        known = self.model.known
        for page in np.flatnonzero(known._beside >= 0).tolist():
            assert self.model.snapshots[int(known._beside[page])] == self.model.pages[page]

    def teardown(self) -> None:
        if hasattr(self, "model"):
            for row in list(self.model.rows):
                self.model.stop(row)
            self.model.cache.check()
            self.model.cache.check_idle()


Machine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
test_snapshots_are_the_states_of_their_tokens_in_any_order_of_events = Machine.TestCase
