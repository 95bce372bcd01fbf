"""Chooses the worker with the lowest cost for a prompt: usually the one that holds the longest prefix of it. Another worker wins
if it would compute the rest sooner, or if the holder has been given so much more than the others that its cache would run over.

What a worker is believed to hold is the larger of two answers:
- what its KV events say. Each page is weighted by the tier it is in, and what one worker says of a store counts for all that
  share the store.
- what this router has sent there lately. A burst of prompts with one prefix arrives before the first one's event does. For a
  worker without events this is all that is known: whatever was sent there and the worker has had room for.

Algorithm: for each worker, cost in tokens =
    RECOMPUTE_WEIGHT x prompt tokens it does not hold (computing them takes time *and* puts a second copy into some cache)
  + tokens queued before them
  + REQUEST_COST x requests it runs (a decode slows a prefill and is slowed by it)
  + BALANCE x (work given to it lately - the least given to any worker) / (mean work given lately + QUIET).
The lowest cost wins. The last term spreads prefixes that many conversations share, such as a system prompt, over the workers, so
that the conversations spread too. The prefix of a single conversation always outweighs that term, and in quiet times the
term is nearly 0. When a worker drains, its latest prompts are handed on to others (``index/hot.py``) and count half there.
If no worker holds a page of the prompt, the one with least to do gets it (``load_key``). For what it
holds, no worker is chosen that has far more requests than the one with fewest: so a hot prefix gets as many holders as it needs.

In a large fleet it looks at three groups only: some workers that hold the longest prefixes by their events; some that are drawn
by the prompt's own hashes, beyond what the first group holds (prompts with the same prefix were sent to the same ones); and
some drawn at random, for their load.

Complexity: O(workers x log pages) to choose, from at most MOST_HOLDERS + DRAWS + log pages workers; O(pages) to remember.
Bound: the prefix index's byte budget.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

from sapwood_router.routing.index.blocks import BlockIndex
from sapwood_router.routing.index.prefixes import HotPrefixes, Insertion, PrefixIndex
from sapwood_router.routing.policies.base import Choice, CostPart, PromptPages, load_key
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
"""How many workers of a large fleet it checks for cached tokens."""

_EVENT_SECONDS = 5.0
"""How long a placement counts although no event has confirmed it: the prompt may wait in the worker's queue."""

_SLACK_SHARE = 1.5
_SLACK_REQUESTS = 8


_Held = tuple[int, float]
"""How many of a prompt's tokens a worker holds, and how many computed tokens that saves."""
_NOTHING = (0, 0.0)
_MOST_PAGES = 16_384
"""Of a longer prompt only its first pages are noted as sent: to note all would take the event loop 10 ms and more."""


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
        """The pages that the latest placement of each prompt added to the index, while the prompt is in use."""

    def shortlist(self, addresses: Sequence[str], page_size: int, prompt: PromptPages) -> Sequence[str]:
        hashes = prompt.hashes(page_size)
        holders = self._blocks.holders(hashes, MOST_HOLDERS, self._rng)
        held = max(holders.values(), default=0)
        return [*holders, *drawn_by_prefix(addresses, hashes, held), *draw(addresses, self._rng)]

    def choose(self, workers: Sequence[WorkerView], prompt: PromptPages) -> Choice:
        """Reasons: cache_hit, cache_spill, cache_miss; cache_handed: a worker that drains handed the prefix on."""
        held = self._held(workers, prompt)
        most = max([saved for _, saved in held])
        if most == 0:
            return Choice(min(workers, key=load_key).address, "cache_miss")
        limit = min([view.requests for view in workers]) * _SLACK_SHARE + _SLACK_REQUESTS
        costs = self._costs(workers, held, len(prompt.token_ids))
        _, _, at = min([(costs[at], load_key(view), at) for at, view in enumerate(workers) if view.requests <= limit])
        tokens, saved = held[at]
        if saved < most:
            return Choice(workers[at].address, "cache_spill", tokens)
        return Choice(workers[at].address, "cache_hit" if tokens else "cache_handed", tokens)

    def explain(self, workers: Sequence[WorkerView], prompt: PromptPages) -> Mapping[str, tuple[int, float]]:
        held = self._held(workers, prompt)
        costs = self._costs(workers, held, len(prompt.token_ids))
        return {view.address: (tokens, cost) for view, (tokens, _), cost in zip(workers, held, costs, strict=True)}

    def parts(self, workers: Sequence[WorkerView], prompt: PromptPages) -> Mapping[str, Sequence[CostPart]]:
        """What :meth:`_costs` adds up."""
        given = [view.recent_work for view in workers]
        least, share = min(given), BALANCE / (sum(given) / len(given) + QUIET)
        length = len(prompt.token_ids)
        return {
            view.address: (
                CostPart("to compute", length - saved, "tokens", RECOMPUTE_WEIGHT),
                CostPart("queued before", view.queued_tokens, "tokens", 1),
                CostPart("running", view.requests, "requests", REQUEST_COST),
                CostPart("given more than others", view.recent_work - least, "tokens given lately", share),
            )
            for view, (_, saved) in zip(workers, self._held(workers, prompt), strict=True)
        }

    def latest(self, most: int) -> Sequence[tuple[str, Sequence[bytes]]]:
        """The prompts that workers were given lately."""
        return self._hot.latest(most)

    def _held(self, workers: Sequence[WorkerView], prompt: PromptPages) -> list[_Held]:
        stores = {view.address: view.storage_id for view in workers if view.storage_id}
        blocks, index, hot = self._blocks, self._index, self._hot
        exact: dict[str, tuple[int, float]] = {}
        sent: dict[str, int] = {}
        handed: dict[str, float] = {}
        for size in {view.page_size for view in workers}:
            addresses = [view.address for view in workers if view.page_size == size]
            hashes = prompt.hashes(size)
            exact |= blocks.overlaps(hashes, stores, addresses)
            known = {}  # by events: only a placement of more pages than these can change the answer
            for address in addresses:
                if blocks.knows(address):
                    known[address] = int(exact.get(address, _NOTHING)[1])
                elif (pages := index.overlap(address, hashes)) > 0:
                    sent[address] = pages
            sent |= index.beyond(known, hashes, _EVENT_SECONDS)
            if hot.handing:
                handed |= {address: HANDED_WEIGHT * hot.handed(address, hashes) for address in addresses}
        found = [(view.address, view.page_size, *exact.get(view.address, _NOTHING)) for view in workers]
        if not sent and not handed:
            return [(pages * size, weight * size) for _, size, pages, weight in found]
        result = []
        for address, size, pages, weight in found:
            more = sent.get(address, 0)
            result.append((max(pages, more) * size, max(weight, more, handed.get(address, 0.0)) * size))
        return result

    @staticmethod
    def _costs(workers: Sequence[WorkerView], held: Sequence[_Held], length: int) -> list[float]:
        given = [view.recent_work for view in workers]
        least = min(given)
        share = BALANCE / (sum(given) / len(given) + QUIET)
        return [
            RECOMPUTE_WEIGHT * (length - saved)
            + view.queued_tokens
            + REQUEST_COST * view.requests
            + share * (view.recent_work - least)
            for view, (_, saved) in zip(workers, held, strict=True)
        ]

    def placed(self, address: str, page_size: int, prompt: PromptPages) -> None:
        """The worker will hold the prompt: one with the same prefix that comes right after is sent there too."""
        hashes = prompt.hashes(page_size)[:_MOST_PAGES]
        self._placed[prompt] = self._index.insert(address, hashes)
        self._hot.asked(address, hashes)

    def finished(self, address: str, page_size: int, prompt: PromptPages, new_tokens: Sequence[int]) -> None:
        """The worker holds the answer too: the conversation's next turn starts with it."""
        hashes = prompt.hashes(page_size)
        if len(hashes) < _MOST_PAGES:
            # The last token was sampled, but its KV was never computed.
            hashes = prompt.extended(new_tokens[:-1], page_size)
        self._index.insert(address, hashes[:_MOST_PAGES])

    def failed(self, address: str, page_size: int, prompt: PromptPages) -> None:
        """Takes back what this placement added to the index, but nothing that was there before or that others placed since."""
        insertion = self._placed.pop(prompt, None)
        if insertion is not None:
            self._index.take_back(address, prompt.hashes(page_size)[:_MOST_PAGES], insertion)

    def reset(self, address: str, num_pages: int) -> None:
        self._index.reset(address, num_pages)
        self._hot.forget(address)

    def drained(self, address: str, heirs: Sequence[str]) -> None:
        self._hot.hand_over(address, heirs)
