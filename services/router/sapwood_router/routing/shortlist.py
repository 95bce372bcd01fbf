"""Which workers of a large fleet a policy looks at: it is too slow to look at a thousand for each request.

Up to MANY workers a policy sees all. Beyond, it names those it would choose from: those that it knows something good of, and some
that are drawn. Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing" (2001): the least loaded of a few drawn ones
has hardly more to do than the least loaded of all. Complexity: O(draws), however many workers there are.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

MANY = 64
"""Workers up to which a policy sees all of them."""
DRAWS = 4


def draw(addresses: Sequence[str], rng: random.Random, count: int = DRAWS) -> list[str]:
    """Some workers at random; one may be there twice."""
    length = len(addresses)
    return [addresses[int(rng.random() * length)] for _ in range(count)]


def drawn_by_prefix(addresses: Sequence[str], hashes: Sequence[bytes], held: int = 0) -> list[str]:
    """Workers drawn by a prompt's own page hashes, at 1, 4, 16 ... pages and at its end.

    Prompts that share a prefix share these workers, at every router: so those find each other that nobody has told of yet, whose
    KV events are still on their way or whose worker publishes none.

    Args:
        addresses: Of all workers.
        hashes: The prompt's page hashes.
        held: So many first pages are known to be held by somebody: it is drawn by the last of these depths within them, for what
            siblings share beyond, and by those that are deeper.
    """
    length, drawn, depth = len(addresses), [], 1
    while depth < len(hashes):
        if depth * 4 > held:
            drawn.append(addresses[int.from_bytes(hashes[depth - 1][:8], "big") % length])
        depth *= 4
    if len(hashes) > held:
        drawn.append(addresses[int.from_bytes(hashes[-1][:8], "big") % length])
    return drawn
