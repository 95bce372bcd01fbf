"""A policy's input and its answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from sapwood_common.contract.page_hash import cache_namespace, hash_pages, weights_namespace
from sapwood_common.contract.pictures import PictureSpan
from sapwood_router.routing.worker_view import WorkerView


class PromptPages:
    """A prompt as policies see it: its tokens, and its page hashes, which are computed once for each page size.

    Args:
        token_ids: The prompt.
        session: What the client named as its session; may be empty.
        cache_salt: The tenant's salt: it goes into the hashes, so that tenants share no pages.
        lora: The adapter; empty: none.
        digest: The adapter's, which goes into the hashes, too; empty: it is not known, and no worker is believed to hold a page.
        pictures: The pictures among the tokens, whose digests go into the hashes of their pages.
        weights: Stands for the model's weights in the hashes; empty: they are those that its workers started with.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        session: str = "",
        cache_salt: str = "",
        lora: str = "",
        digest: bytes = b"",
        pictures: Sequence[PictureSpan] = (),
        weights: bytes = b"",
    ) -> None:
        self.token_ids = token_ids
        self.session = session
        self.lora = lora
        self.pictures = pictures
        self._namespace = weights_namespace(cache_namespace(cache_salt, digest.hex() or lora), weights)
        self._hashes: dict[int, list[bytes]] = {}

    def hashes(self, page_size: int) -> list[bytes]:
        """The hashes of the prompt's full pages. The list is shared: callers do not change it."""
        found = self._hashes.get(page_size)
        if found is None:
            found = self._hashes[page_size] = hash_pages(
                self.token_ids, page_size, salt=self._namespace, pictures=self.pictures
            )
        return found

    def hash_steps(self, page_size: int, tokens: int) -> Iterator[None]:
        """Computes what :meth:`hashes` returns, about ``tokens`` tokens a step."""
        if page_size in self._hashes:
            return
        hashes: list[bytes] = []
        step = max(1, tokens // page_size) * page_size
        for at in range(0, len(self.token_ids), step):
            before = hashes[-1] if hashes else self._namespace
            piece = self.token_ids[at : at + step]
            hashes += hash_pages(piece, page_size, salt=before, pictures=self.pictures, first=at)
            yield
        self._hashes[page_size] = hashes

    def extended(self, new_tokens: Sequence[int], page_size: int) -> list[bytes]:
        """The hashes of the full pages of the prompt followed by ``new_tokens``; hashes only what is new."""
        hashes = self.hashes(page_size)
        known = len(hashes) * page_size
        tail = [*self.token_ids[known:], *new_tokens]
        before = hashes[-1] if hashes else self._namespace
        return hashes + hash_pages(tail, page_size, salt=before, pictures=self.pictures, first=known)


class Choice(msgspec.Struct, frozen=True):
    """A policy's answer.

    Attributes:
        address: The worker's.
        reason: Why, in one word or two joined by ``_``: a label in logs and metrics.
        cached_tokens: How many of the prompt's tokens the worker is believed to hold; 0 if the policy does not know.
    """

    address: str
    reason: str
    cached_tokens: int = 0


class Policy(Protocol):
    """Chooses workers. Runs on the event loop: every method is quick and does no I/O.

    Attributes:
        remembers: True if it remembers workers' pages. A policy that does serves all models and learns of resets and
            drains. Of a policy that does not (it takes turns, or draws), each model has one of its own.
        reads_events: Whether it reads the index that workers' KV events fill. If no policy does, the router does not follow
            the events.
    """

    remembers: bool
    reads_events: bool

    def shortlist(self, addresses: Sequence[str], page_size: int, prompt: PromptPages) -> Sequence[str] | None:
        """The workers of a large fleet that it would choose from, in any order; one may be named twice. None: it needs all.

        Args:
            addresses: More than ``shortlist.MANY`` workers; the same object until the fleet changes.
            page_size: Tokens in a page of their caches.
            prompt: The prompt that needs a worker.
        """
        ...

    def choose(self, workers: Sequence[WorkerView], prompt: PromptPages) -> Choice:
        """One of ``workers``, which are not empty and all available: the fleet, or those of its own shortlist.

        Mutates nothing but the policy's own counter or random generator; the answer is valid for these views only.
        """
        ...

    def placed(self, address: str, page_size: int, prompt: PromptPages) -> None:
        """The prompt goes to that worker. Mutates only what the policy remembers; effective for the next choice."""
        ...

    def finished(self, address: str, page_size: int, prompt: PromptPages, new_tokens: Sequence[int]) -> None:
        """The worker now holds the prompt and ``new_tokens`` after it. Mutates only what the policy remembers."""
        ...

    def failed(self, address: str, page_size: int, prompt: PromptPages) -> None:
        """The worker refused the prompt that was placed there, failed at it or was lost, so it may hold nothing of it.

        Mutates only what the policy remembers. For a request that its client gave up, neither this nor :meth:`finished` is
        called.
        """
        ...

    def explain(self, workers: Sequence[WorkerView], prompt: PromptPages) -> Mapping[str, tuple[int, float]]:
        """For each worker's address, its cached tokens of the prompt and the cost; empty if the policy uses neither.
        Mutates nothing.
        """
        ...

    def reset(self, address: str, num_pages: int) -> None:
        """The worker (re)started: it holds nothing and has room for ``num_pages`` pages."""
        ...

    def drained(self, address: str, heirs: Sequence[str]) -> None:
        """The worker gets nothing new; prompts like its latest ones go to ``heirs``. Mutates only what the policy remembers."""
        ...


class CostPart(msgspec.Struct, frozen=True):
    """A part of a worker's cost.

    Attributes:
        name: What costs.
        amount: How many of it, in ``unit``.
        unit: "tokens", "requests" or "tokens given lately".
        weight: Cost of one of them, in tokens.
    """

    name: str
    amount: float
    unit: str
    weight: float

    @property
    def cost(self) -> float:
        """In tokens."""
        return self.weight * self.amount


@runtime_checkable
class Itemised(Protocol):
    """A policy that can say what its costs are made of."""

    def parts(self, workers: Sequence[WorkerView], prompt: PromptPages) -> Mapping[str, Sequence[CostPart]]:
        """For each worker's address, the parts whose costs sum up to the cost of ``explain``. Mutates nothing."""
        ...


@runtime_checkable
class ShowsPrefixes(Protocol):
    """A policy that knows the latest prompts."""

    def latest(self, most: int) -> Sequence[tuple[str, Sequence[bytes]]]:
        """Workers and the page hashes of prompts that they were given, each worker's latest first; ``most`` of each."""
        ...


class Forgetful:
    """The part of a :class:`Policy` that remembers no earlier placements."""

    remembers = False
    reads_events = False

    def shortlist(self, addresses: Sequence[str], page_size: int, prompt: PromptPages) -> Sequence[str] | None:
        """It sees all."""
        return None

    def placed(self, address: str, page_size: int, prompt: PromptPages) -> None:
        """Nothing to remember."""

    def finished(self, address: str, page_size: int, prompt: PromptPages, new_tokens: Sequence[int]) -> None:
        """Nothing to remember."""

    def failed(self, address: str, page_size: int, prompt: PromptPages) -> None:
        """Nothing to take back."""

    def explain(self, workers: Sequence[WorkerView], prompt: PromptPages) -> Mapping[str, tuple[int, float]]:
        """It has no measure of cost."""
        return {}

    def reset(self, address: str, num_pages: int) -> None:
        """Nothing to forget."""

    def drained(self, address: str, heirs: Sequence[str]) -> None:
        """Nothing to hand on."""


REQUEST_TOKENS = 1024
"""Each request at a worker counts as this many prompt tokens more, for its answer.

Found by simulation of 48 requests that come at once (``Fleet.burst`` of ``tests/router/flow/disaggregation/test_mixes.py``): with
512 to 2048 the last of them is answered up to 14 % sooner than where requests are counted, if their lengths differ much, and
nowhere more than 1 % later."""

LoadKey = tuple[float, float]


def load_key(view: WorkerView) -> LoadKey:
    """Sorts workers by load: by pending work in prompt tokens, then by recently given work, so that idle ones take turns."""
    return (view.queued_tokens + REQUEST_TOKENS * view.requests, view.recent_work)
