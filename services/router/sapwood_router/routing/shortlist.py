"""Which workers of a large fleet a policy looks at. Looking at a thousand workers for each request would be too slow.

Up to MANY workers a policy sees all. In a larger fleet it names the workers that it would choose from: some that are likely to
suit the prompt, and some that are drawn. Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing" (2001): the least
loaded of a few drawn workers has hardly more to do than the least loaded of all. Complexity: O(draws), whatever the fleet's size.
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

    Prompts with a common prefix draw the same workers, at every router. So they meet there even if no KV event tells where the
    prefix is: because the event is still on its way, or the worker publishes none.

    Args:
        addresses: Of all workers.
        hashes: The prompt's page hashes.
        held: How many of the first pages some worker is known to hold. Of the depths within these only the last one draws,
            for prompts that share more than what is known; all deeper ones draw too.
    """
    length, drawn, depth = len(addresses), [], 1
    while depth < len(hashes):
        if depth * 4 > held:
            drawn.append(addresses[int.from_bytes(hashes[depth - 1][:8], "big") % length])
        depth *= 4
    if len(hashes) > held:
        drawn.append(addresses[int.from_bytes(hashes[-1][:8], "big") % length])
    return drawn
