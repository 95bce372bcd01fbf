"""The events of the prefix cache: which blocks (pages) were stored and removed, so that a subscriber can build the same tree.

The events are those that vLLM and SGLang publish. A block is named by the chained hash of
``sapwood_common.contract.page_hash``; its parent's hash makes the tree. A stored block's parent is stored on the same medium; a
block is removed with or after its children. Events cost O(changed pages), however many pages are cached.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from sapwood_common.contract.page_hash import HASH_BYTES

Medium = Literal["GPU", "CPU_TIER1", "CPU_TIER2"]
"""Where a block's KV is: on the device, in the host's memory, in a store."""

MEDIA: tuple[Medium, ...] = ("GPU", "CPU_TIER1", "CPU_TIER2")


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag="BlockStored"):
    """A run of blocks was cached; each block is the parent of the next.

    Attributes:
        hashes: Their hashes, 16 bytes each, the first block's first.
        parent: The hash of the block before them; empty at the start of a sequence.
        token_ids: Their tokens, native uint32.
        medium: Where they are.
        lora: The LoRA they were computed with; empty: none.
    """

    hashes: bytes
    parent: bytes
    token_ids: bytes
    medium: Medium = "GPU"
    lora: str = ""


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag="BlockRemoved"):
    """A run of blocks is no longer cached; ``hashes`` are 16 bytes each."""

    hashes: bytes
    medium: Medium = "GPU"


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag="AllBlocksCleared"):
    """A reset: nothing is cached any more, on any medium. Evictions are reported as BlockRemoved, even if nothing remains."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


def split_hashes(hashes: bytes) -> list[bytes]:
    """The single hashes of a run."""
    return [hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)]
