"""The policies by name; packages add theirs as entry points of ``GROUP``: what takes ``PolicyParts`` and makes a policy."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from sapwood_common.plugins import find_part, part_names
from sapwood_router.routing.index.blocks import BlockIndex
from sapwood_router.routing.index.prefixes import HotPrefixes, PrefixIndex
from sapwood_router.routing.policies.base import Policy
from sapwood_router.routing.policies.cache_aware import CacheAware
from sapwood_router.routing.policies.consistent_hash import ConsistentHash
from sapwood_router.routing.policies.least_load import LeastLoad, LeastTokens
from sapwood_router.routing.policies.power_of_two import PowerOfTwo
from sapwood_router.routing.policies.prefix_hash import PrefixHash
from sapwood_router.routing.policies.random import Random
from sapwood_router.routing.policies.round_robin import RoundRobin
from sapwood_router.routing.policies.session_affinity import SessionAffinity

GROUP = "sapwood.policies"


@dataclass(frozen=True, slots=True)
class PolicyParts:
    """What policies are made of.

    Attributes:
        index_bytes: What an index of the policy's own may hold.
        rng: For those that draw.
        clock: Seconds, monotonic.
        blocks: The exact index of what workers hold.
    """

    index_bytes: int
    rng: random.Random
    clock: Callable[[], float]
    blocks: BlockIndex


_MAKERS: dict[str, Callable[[PolicyParts], Policy]] = {
    "cache_aware": lambda parts: CacheAware(
        PrefixIndex(parts.index_bytes, parts.clock), parts.blocks, HotPrefixes(parts.clock), parts.rng
    ),
    "session_affinity": lambda parts: SessionAffinity(parts.rng),
    "round_robin": lambda parts: RoundRobin(),
    "random": lambda parts: Random(parts.rng),
    "least_load": lambda parts: LeastLoad(parts.rng),
    "least_tokens": lambda parts: LeastTokens(parts.rng),
    "prefix_hash": lambda parts: PrefixHash(parts.rng),
    "consistent_hash": lambda parts: ConsistentHash(parts.rng),
    "power_of_two": lambda parts: PowerOfTwo(parts.rng),
}


def policy_names() -> tuple[str, ...]:
    """All there are, those of other packages included."""
    return part_names(GROUP, _MAKERS)


def make_policy(name: str, parts: PolicyParts) -> Policy:
    """A policy by its name.

    Raises:
        ConfigError: There is none.
    """
    return find_part(GROUP, name, _MAKERS)(parts)
