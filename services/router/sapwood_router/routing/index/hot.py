"""Each worker's recent prompts, and their heirs when the worker drains.

Each worker's MOST_CHAINS latest prompts are kept, each as the hashes of its first MOST_PAGES pages. When the worker drains, each
chain goes to the heir that was handed the most of it already, so that what shares a prefix stays together, but none gets more
than SPREAD times an equal share (bounded loads, as in ``ring.py``); the latest chains choose first.

Complexity: O(1) to remember but for copying the hashes; O(chains x heirs x log pages) to hand over. Bound: about 1 MB a worker.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

from sapwood_router.routing.index.prefixes import PrefixIndex

MOST_CHAINS = 64
MOST_PAGES = 256
SPREAD = 1.25
HANDED_SECONDS = 60.0
"""How long what was handed over counts: a conversation that continues later begins again wherever there is room."""
_HANDED_BYTES = 16 * 1024 * 1024


class HotPrefixes:
    """Mutable, not thread-safe.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._chains: dict[str, OrderedDict[bytes, list[bytes]]] = {}
        self._handed = PrefixIndex(_HANDED_BYTES, clock)

    def asked(self, worker: str, hashes: Sequence[bytes]) -> None:
        """The worker was given a prompt with these page hashes."""
        if not hashes:
            return
        chains = self._chains.setdefault(worker, OrderedDict())
        chain = list(hashes[:MOST_PAGES])
        chains[chain[-1]] = chain
        chains.move_to_end(chain[-1])
        if len(chains) > MOST_CHAINS:
            chains.popitem(last=False)

    def forget(self, worker: str) -> None:
        """The worker is gone, or began again: nothing of it is left to hand over, or was handed to it."""
        self._chains.pop(worker, None)
        self._handed.reset(worker, MOST_CHAINS * MOST_PAGES)

    def hand_over(self, worker: str, heirs: Sequence[str]) -> None:
        """Hands what was asked of the worker to others; with no heirs, to nobody. It has nothing to hand over then."""
        chains = self._chains.pop(worker, None)
        if not chains or not heirs:
            return
        most = math.ceil(SPREAD * len(chains) / len(heirs))
        got = dict.fromkeys(heirs, 0)
        for chain in reversed(chains.values()):
            open_heirs = [heir for heir in heirs if got[heir] < most]
            heir = max(open_heirs, key=lambda name: (self._handed.overlap(name, chain), -got[name]))
            self._handed.insert(heir, chain)
            got[heir] += 1

    @property
    def handing(self) -> bool:
        """Whether anything was handed over lately to anybody."""
        return self._handed.bytes_used > 0

    def handed(self, worker: str, hashes: Sequence[bytes]) -> int:
        """How many of a prompt's pages were lately handed to a worker, which need not hold them yet."""
        return self._handed.overlap(worker, hashes, HANDED_SECONDS)
