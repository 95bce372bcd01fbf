"""The simulation notices when a line that matters is wrong: each of these mutations of scheduler or cache must make it fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from sapwood_testing.mutations import Mutation, check_noticed, simulate

SIMULATION = Path(__file__).with_name("test_simulation.py")
MOST_STEPS = 80_000
"""A part of the default run; each mutation is noticed within it."""

MUTATIONS = [
    # The last token must be computed again, for its logits.
    Mutation("core/cache/prefix.py", "return len(token_ids) - 1 if", "return len(token_ids) if"),
    # What a row relies on must be locked, and unlocked in the end.
    Mutation(
        "core/cache/prefix.py",
        "        self._tree.lock(match.node)\n        self._allocator.name",
        "        self._allocator.name",
    ),
    # Also a pin must be given back.
    Mutation("core/cache/prefix.py", "        self._tree.unlock(pin.node)\n", ""),
    Mutation(
        "core/cache/prefix.py",
        "        self._tree.unlock(row.node)\n        self._leave_part(row)\n        row.node, row",
        "        self._leave_part(row)\n        row.node, row",
    ),
    # Pages the tree did not take must be given back.
    Mutation("core/cache/prefix.py", "            self._allocator.free(own[first:][~taken[first:]], slot)\n", ""),
    # A page that is copied stays until it has been, and is free then.
    Mutation("core/cache/prefix.py", "            self._tree.unlock(row.source)\n", ""),
    # A row takes no token from a page that differs from its own.
    Mutation("core/cache/prefix.py", "return row.copied", "return row.copied + 1"),
    # The page is copied in each window, too.
    Mutation("core/cache/prefix.py", "            if window.reach:\n", "            if False:\n"),
    # Of the page that a row writes only what is computed may be shared.
    Mutation(
        "core/cache/prefix.py",
        "token_ids[row.shared * self._page_size : computed].tobytes()",
        "token_ids[row.shared * self._page_size : computed + 1].tobytes()[: 4 * self._page_size - 4]",
    ),
    # Only what is computed may be shared.
    Mutation("core/scheduler/batch.py", "min(request.computed, known))", "known)"),
    # A page slides out of a window when no query sees it, not before.
    Mutation("core/cache/pages.py", "max(0, position - self.reach)", "max(0, position + 1 - self.reach)"),
    # A prefix can be used where all that its next query sees is there.
    Mutation("core/cache/pages.py", "(ends - self.tail, 0))", "(ends - self.tail + 1, 0))"),
    # What a row uses is not evicted.
    Mutation("core/cache/pages.py", "            self._users[there] += 1\n", ""),
    # A split node keeps the locks of what it was.
    Mutation("core/cache/radix.py", "            locks=node.locks,\n", ""),
    # Locked nodes, and nodes with children, stay.
    Mutation("core/cache/radix.py", "not node.children and not node.locks\n", "not node.children\n"),
    Mutation("core/cache/radix.py", "not node.children and not node.locks\n", "not node.locks\n"),
    # A parent becomes evictable with the end of its last child.
    Mutation("core/cache/radix.py", "                self._offer(parent)\n", ""),
    # A decode needs a page as soon as the last one is full.
    Mutation(
        "core/scheduler/scheduler.py",
        "while (known > request.capacity or",
        "while (known > request.capacity + 1 or",
    ),
    # The runner must know every request that gets a row.
    Mutation(
        "core/scheduler/batch.py",
        "        request.enters = True\n",
        "        request.enters = not request.retractions\n",
    ),
    # The youngest is the victim.
    Mutation("core/scheduler/admission.py", "return running[-1]", "return running[0]"),
    # A request leaves the batch when it gives up its row.
    Mutation("core/scheduler/batch.py", "        self.requests.remove(request)\n", ""),
    # Who waited too long goes first.
    Mutation(
        "core/scheduler/waiting.py",
        "return request.waited + queued >= self._starved_after",
        "return False",
    ),
    # So does a tenant, however many new ones come.
    Mutation(
        "core/scheduler/waiting.py",
        "return self.starved(oldest, step) and since >= self._starved_after",
        "return False",
    ),
    # What has a deadline ends by it.
    Mutation("core/scheduler/results.py", "self._heap[0][0] <= now", "self._heap[0][0] <= now - 3"),
    # What leaves the queue is not counted in it.
    Mutation("core/scheduler/waiting.py", "        self.num_tokens -= tokens\n", ""),
    # What was right of a draft is computed, what was wrong is not.
    Mutation(
        "core/scheduler/speculation/speculation.py",
        "                right = len(tokens) - 1\n",
        "                right = len(draft)\n",
    ),
    # A draft needs pages too.
    Mutation("core/scheduler/batch.py", "- 1, request.capacity - start))", "- 1, count))"),
    # How much of a draft was right must be known before the next step is planned.
    Mutation("core/scheduler/batch.py", "bool(grammars or drafts)", "bool(grammars)"),
    # An abort during a step waits for its end.
    Mutation("core/scheduler/results.py", "            if request.over:\n", "            if False:\n"),
    # A request that ends stays until no step in flight computes it.
    Mutation("core/scheduler/results.py", "        if request.in_flight:\n", "        if False:\n"),
    # Who joins a step gives its row back, samples after the end of the prompt only, and is not started meanwhile.
    Mutation(
        "core/scheduler/results.py", "        self._running.take_row(join.slot)\n        request", "        request"
    ),
    Mutation("core/scheduler/admission.py", "leader.planned + count == leader.prompt_length", "count > 0"),
    Mutation("core/scheduler/admission.py", "                request.held = True\n", ""),
    # Cached pages that a new request would lock are not available to it a second time.
    Mutation("core/scheduler/batch.py", "- found + unlocked", "- found"),
]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.title)
def test_a_wrong_line_is_noticed(mutation: Mutation, tmp_path: Path) -> None:
    check_noticed(SIMULATION, MOST_STEPS, tmp_path, mutation)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_lines_as_they_are_pass(tmp_path: Path) -> None:
    done = simulate(SIMULATION, 10_000, tmp_path)
    assert done.returncode == 0, done.stderr
