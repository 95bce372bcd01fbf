"""What a seed decides of a simulated KV transfer: sizes, rates, prompts; the time, and what has happened so far."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from itertools import count

from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.clock import Clock
from sapwood_worker.core.cache.storage.record import namespace_of
from sapwood_worker.core.scheduler.request import Request

VOCAB = 60
FINGERPRINT = bytes.fromhex(namespace_of("model"))
STRANGERS = 1 << 30
"""Serials from here on are those of requests that nobody follows."""


class World:
    """Facts that the parts of a simulation share.

    Args:
        seed: Decides everything.

    Attributes:
        chance: The source of all that is random.
        clock: The time, in seconds.
        page_size: Tokens in a page.
        limit: Tokens of the longest request.
        pages, host_pages: Pages of each worker's device and of its host's memory.
        share: The most of the host pages that leases pin, and reads hold.
        epoch: How often the prefill worker was started again.
        faults, loss: How often something happens to a page while it is read, and to a message.
        arrivals, aborts, restarts, retries: How often that happens in a turn.
        serials: Numbers for clients' requests.
        counts: What has happened so far.
        contents: What each page was first seen to hold, by the proof of its tokens.
        steps: Turns of either scheduler so far.
        lands: Whether pages go to the decode worker's device.
    """

    def __init__(self, seed: int) -> None:
        chance = self.chance = random.Random(seed)
        self.clock = Clock()
        self.page_size = chance.choice([1, 2, 4])
        self.limit = chance.randint(20, 40)
        self.pages = int(self.limit * chance.uniform(1, 2.5) / self.page_size) + 1
        self.host_pages = max(4, int(self.pages * chance.choice([0.5, 1, 2, 4])))
        self.share = chance.choice([0.1, 0.3, 0.5])
        self.epoch = 0
        self.faults = chance.choice([0.0, 0.2, 0.5])
        self.loss = chance.choice([0.0, 0.1, 0.4])
        self.aborts = chance.choice([0.0, 0.02, 0.1])
        self.restarts = chance.choice([0.0, 0.002, 0.01])
        self.retries = chance.choice([0.0, 0.05, 0.2])
        self.arrivals = chance.choice([0.005, 0.02, 0.06])
        self.serials = count(1)
        self.counts: Counter[str] = Counter()
        self.contents: dict[bytes, bytes] = {}
        self.steps = 0
        self.lands = chance.random() < 0.5
        self._strangers = count(STRANGERS)
        self._documents = [self.tokens(chance.randint(4, self.limit - 6)) for _ in range(chance.randint(2, 4))]

    def tokens(self, length: int) -> list[int]:
        """Random ones."""
        return [self.chance.randrange(VOCAB) for _ in range(length)]

    def prompt(self) -> list[int]:
        """A document's beginning, and perhaps something new."""
        chance = self.chance
        document = chance.choice(self._documents)
        prompt = document[: chance.randint(1, len(document))] + self.tokens(chance.choice([0, 1, 2, 3, 12]))
        return prompt[: self.limit - 8]

    def filler(self) -> Request:
        """A long request of a stranger, who takes pages."""
        sampling = SamplingParams(seed=1, max_tokens=1, ignore_eos=True)
        return Request(next(self._strangers), "stranger", array("I", self.tokens(self.limit - 4)), sampling)

    def calm(self) -> None:
        """Nobody comes, leaves or fails any more."""
        self.arrivals = self.aborts = self.restarts = self.retries = self.faults = 0.0
