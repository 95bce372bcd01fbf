"""What the page asks besides the fleet: ``GET /ui/history``, ``/ui/cache`` and ``/ui/traces``. All where workers may be shown."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from sapwood_common.errors import InvalidArgumentError, UnimplementedError
from sapwood_router.edges.guard import Guard
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.origins import Origins
from sapwood_router.observe.history import History
from sapwood_router.observe.timelines import Timeline, Timelines
from sapwood_router.routing.index.blocks import BlockIndex, Tier
from sapwood_router.routing.index.prefix_picture import MOST_CHAINS, Held, TreeNode, tree_of
from sapwood_router.routing.policy_book import PolicyBook

_HEADERS = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
_TREE_SECONDS = 1.0
"""How long a picture of the tree is shown before another is made."""
_LONGEST_NUMBER = 15


class TracesView(msgspec.Struct):
    """The latest requests."""

    requests: list[Timeline]


class HeldPages(msgspec.Struct):
    """How many pages a worker holds by its KV events, by tier; ``known``: whether it publishes them."""

    worker: str
    page_size: int
    known: bool
    device: int
    host: int
    storage: int


class CacheView(msgspec.Struct):
    """The radix tree of the latest prompts, parents first, and what each worker holds in all. No node has a text or a token."""

    page_size: int
    workers: list[HeldPages]
    tree: list[TreeNode]


class Observed:
    """What is shown.

    Args:
        history: Samples and events.
        timelines: The latest requests.
        policies, blocks: Know what is cached.
        workers: Each worker's address and page size.
    """

    def __init__(
        self,
        history: History,
        timelines: Timelines,
        policies: PolicyBook,
        blocks: BlockIndex,
        workers: Callable[[], list[tuple[str, int]]],
    ) -> None:
        self.history = history
        self.timelines = timelines
        self._policies = policies
        self._blocks = blocks
        self._workers = workers
        self._picture = b""
        self._pictured_at = float("-inf")

    def cache(self) -> bytes:
        """A :class:`CacheView` as JSON."""
        now = time.monotonic()
        if now - self._pictured_at >= _TREE_SECONDS:
            self._picture, self._pictured_at = msgspec.json.encode(self._draw()), now
        return self._picture

    def _draw(self) -> CacheView:
        blocks = self._blocks
        workers = [
            HeldPages(
                address,
                size,
                blocks.knows(address),
                blocks.count(address, Tier.GPU),
                blocks.count(address, Tier.HOST),
                blocks.count(address, Tier.REMOTE),
            )
            for address, size in self._workers()
        ]
        latest = self._policies.latest(max(1, MOST_CHAINS // max(1, len(workers))))
        given = {page: worker for worker, chain in latest for page in chain}
        unknown = {worker for worker, _ in latest if not blocks.knows(worker)}

        def where(page: bytes) -> Held:
            held = tuple((worker, tier.name.lower()) for worker, tier in blocks.where(page))
            return held or (((given[page], "believed"),) if given[page] in unknown else ())

        tree = tree_of([chain for _, chain in latest], where)
        return CacheView(workers[0].page_size if workers else 0, workers, tree)


class ObservedPages:
    """Answers the page.

    Args:
        observed: What is shown.
        guard: Asks for a key, if the router asks for keys; takes nothing from its rate.
        origins: Under which names the page may be.
    """

    def __init__(self, observed: Observed, guard: Guard, origins: Origins) -> None:
        self._observed = observed
        self._guard = guard
        self._origins = origins

    def _check(self, exchange: Exchange) -> str | None:
        self._origins.check(exchange.headers)
        self._origins.check_host(exchange.headers)
        return self._guard.recognise(exchange.headers)

    async def show_history(self, exchange: Exchange) -> None:
        """Sends samples and events after ``?after=``, all by default.

        Raises:
            InvalidArgumentError: ``after`` is no number.
        """
        self._check(exchange)
        after = exchange.query.get("after", "0")
        if not (after.isascii() and after.isdigit() and len(after) <= _LONGEST_NUMBER):
            raise InvalidArgumentError("expected the `next` of an earlier answer, or nothing for all", field="after")
        await exchange.send_body(200, msgspec.json.encode(self._observed.history.since(int(after))), _HEADERS)

    async def show_traces(self, exchange: Exchange) -> None:
        """Sends the latest requests; with keys, the caller's own."""
        tenant = self._check(exchange)
        latest = self._observed.timelines.latest(tenant)
        await exchange.send_body(200, msgspec.json.encode(TracesView(latest)), _HEADERS)

    async def show_cache(self, exchange: Exchange) -> None:
        """Sends the radix tree.

        Raises:
            UnimplementedError: The router asks for keys: the tree is of all tenants' prompts.
        """
        self._check(exchange)
        if self._guard.asks_for_keys:
            raise UnimplementedError(
                "with --api-keys the cache is shown to nobody: its tree is of all tenants' prompts"
            )
        await exchange.send_body(200, self._observed.cache(), _HEADERS)
