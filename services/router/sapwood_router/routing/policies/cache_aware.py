"""The worker that costs least to give the prompt to: it holds the longest prefix, unless it has so much to do that another
computes the rest sooner, or has been given so much more than the others that its cache would be fought over.

What a worker holds: exactly what its KV events say, each page weighted by the tier it is in (and what a worker says of a store
counts for all that share the store), or what this router has just sent
there, whichever is more (a burst of siblings follows the first of them before its event can arrive); for a worker without events,
whatever this router has sent there and the worker has had room for.

Algorithm: for each worker, cost in tokens =
    RECOMPUTE_WEIGHT x prompt tokens it does not hold (computing them takes time *and* puts a second copy into some cache)
  + tokens queued before them
  + REQUEST_COST x requests it runs (a decode slows a prefill and is slowed by it)
  + BALANCE x (work given to it lately - the least given to any worker) / (mean work given lately + QUIET).
The least cost wins. The last term spreads what many conversations share, such as a system prompt, over the workers, so that
the conversations spread too; what one conversation alone has always outweighs it, and in quiet times it is next to nothing.
What a worker that drains was asked lately is handed on to the others (see ``index/hot.py``) and counts half there.
If nobody holds a page of the prompt, load alone decides. A worker with far more requests than the least loaded one is out,
whatever it holds: a hot prefix thus gets as many holders as it needs.

In a large fleet it looks at some workers that hold the longest prefixes by their events, at some that the prompt's own hashes
draw (its siblings were sent to the same ones), and at some drawn at random for their load.

Complexity: O(workers x log pages) to choose, from at most MOST_HOLDERS + DRAWS + log pages workers; O(pages) to remember.
Bound: the prefix index's byte budget.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from weakref import WeakKeyDictionary

import msgspec

from sapwood_router.routing.index.blocks import BlockIndex
from sapwood_router.routing.index.hot import HotPrefixes
from sapwood_router.routing.index.prefixes import Insertion, PrefixIndex
from sapwood_router.routing.policies.base import Choice, LoadKey, PromptPages, load_key
from sapwood_router.routing.shortlist import draw, drawn_by_prefix
from sapwood_router.routing.worker_view import WorkerView

RECOMPUTE_WEIGHT = 3
REQUEST_COST = 16
BALANCE = 4096
HANDED_WEIGHT = 0.5  # less than any copy that is there
QUIET = 4096
# Found by simulation of multi-turn workloads with ample and with scarce cache (tests/router/routing/test_policy_workloads.py):
# hit rate as with one fixed worker a conversation, while loads stay within a few per cent of each other.

MOST_HOLDERS = 6
"""Workers it looks at for what they hold, in a large fleet."""

_EVENT_SECONDS = 5.0
"""How long a placement counts although no event has confirmed it: the prompt may wait in the worker's queue."""

_SLACK_SHARE = 1.5
_SLACK_REQUESTS = 8


class _Held(msgspec.Struct, frozen=True):
    """How many of a prompt's tokens a worker holds, and how many computed tokens that saves."""

    tokens: int
    saved: float


class CacheAware:
    """Implements ``Policy``; the default.

    Args:
        index: What each worker is believed to hold from this router's placements; this policy is its only writer.
        blocks: What each worker holds by its own account; written by the monitors of their events.
        hot: What is handed on when a worker drains; this policy is its only writer.
        rng: Draws, in large fleets.
    """

    remembers = True
    reads_events = True

    def __init__(
        self, index: PrefixIndex, blocks: BlockIndex, hot: HotPrefixes, rng: random.Random | None = None
    ) -> None:
        self._rng = rng or random.Random()
        self._index = index
        self._blocks = blocks
        self._hot = hot
        self._placed: WeakKeyDictionary[PromptPages, Insertion] = WeakKeyDictionary()
        """What the latest placement of each prompt that somebody still asks about added to the index."""

    def shortlist(self, addresses: Sequence[str], page_size: int, prompt: PromptPages) -> Sequence[str]:
        hashes = prompt.hashes(page_size)
        holders = self._blocks.holders(hashes, MOST_HOLDERS, self._rng)
        return [*holders, *drawn_by_prefix(addresses, hashes), *draw(addresses, self._rng)]

    def choose(self, workers: Sequence[WorkerView], prompt: PromptPages) -> Choice:
        """Reasons: cache_hit, cache_spill, cache_miss; cache_handed: a worker that drains handed the prefix on."""
        least = min(workers, key=load_key)
        held = self._held(workers, prompt)
        most = max(each.saved for each in held)
        if most == 0:
            return Choice(least.address, "cache_miss")
        limit = least.requests * _SLACK_SHARE + _SLACK_REQUESTS
        chosen, found = min(
            ((view, each) for view, each in zip(workers, held, strict=True) if view.requests <= limit),
            key=self._cost(workers, len(prompt.token_ids)),
        )
        if found.saved < most:
            return Choice(chosen.address, "cache_spill", found.tokens)
        return Choice(chosen.address, "cache_hit" if found.tokens else "cache_handed", found.tokens)

    def explain(self, workers: Sequence[WorkerView], prompt: PromptPages) -> Mapping[str, tuple[int, float]]:
        cost = self._cost(workers, len(prompt.token_ids))
        held = self._held(workers, prompt)
        return {view.address: (found.tokens, cost((view, found))[0]) for view, found in zip(workers, held, strict=True)}

    def _held(self, workers: Sequence[WorkerView], prompt: PromptPages) -> list[_Held]:
        stores = {view.address: view.storage_id for view in workers if view.storage_id}
        addresses = [view.address for view in workers]
        blocks, index, hot = self._blocks, self._index, self._hot
        chains = {size: prompt.hashes(size) for size in {view.page_size for view in workers}}
        exact = {size: blocks.overlaps(hashes, stores, addresses) for size, hashes in chains.items()}
        handing = hot.handing
        result = []
        for view in workers:
            size, address = view.page_size, view.address
            hashes = chains[size]
            handed = HANDED_WEIGHT * hot.handed(address, hashes) if handing else 0.0
            if not blocks.knows(address):
                pages = index.overlap(address, hashes)
                result.append(_Held(pages * size, max(pages, handed) * size))
                continue
            pages, weight = exact[size].get(address, (0, 0.0))
            sent = index.overlap(address, hashes, _EVENT_SECONDS, beyond=int(weight))  # no more would change nothing
            result.append(_Held(max(pages, sent) * size, max(weight, sent, handed) * size))
        return result

    @staticmethod
    def _cost(
        workers: Sequence[WorkerView], length: int
    ) -> Callable[[tuple[WorkerView, _Held]], tuple[float, LoadKey]]:
        least_given = min(view.recent_work for view in workers)
        share = BALANCE / (sum(view.recent_work for view in workers) / len(workers) + QUIET)

        def cost(item: tuple[WorkerView, _Held]) -> tuple[float, LoadKey]:
            view, held = item
            tokens = (
                RECOMPUTE_WEIGHT * (length - held.saved)
                + view.queued_tokens
                + REQUEST_COST * view.requests
                + share * (view.recent_work - least_given)
            )
            return tokens, load_key(view)

        return cost

    def placed(self, address: str, page_size: int, prompt: PromptPages) -> None:
        """The worker will hold the prompt: a sibling sent right after follows it."""
        hashes = prompt.hashes(page_size)
        self._placed[prompt] = self._index.insert(address, hashes)
        self._hot.asked(address, hashes)

    def finished(self, address: str, page_size: int, prompt: PromptPages, new_tokens: Sequence[int]) -> None:
        """The worker holds the answer too: the conversation's next turn starts with it."""
        # The last token was sampled, but its KV was never computed.
        self._index.insert(address, prompt.extended(new_tokens[:-1], page_size))

    def failed(self, address: str, page_size: int, prompt: PromptPages) -> None:
        """What the placement alone made believe is believed no more; what the worker held before, or others placed since, is."""
        insertion = self._placed.pop(prompt, None)
        if insertion is not None:
            self._index.take_back(address, prompt.hashes(page_size), insertion)

    def reset(self, address: str, num_pages: int) -> None:
        self._index.reset(address, num_pages)
        self._hot.forget(address)

    def drained(self, address: str, heirs: Sequence[str]) -> None:
        self._hot.hand_over(address, heirs)
