"""Statistics of the KV cache's tiers, for operators."""

from __future__ import annotations

from typing import Literal

import msgspec

TierName = Literal["device", "host", "storage"]


class TierReport(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One tier. What is counted is counted since the worker's start.

    Attributes:
        tier: The tier's name.
        pages: Pages that hold something.
        capacity: Pages there are; 0 for a store, which says neither.
        hit_tokens: Tokens that requests found there, in no tier above; of a store, tokens read from it.
        bytes_in: Bytes written to it.
        bytes_out: Bytes read from it.
        seconds_in: Seconds that writing took, summed over copies or calls.
        seconds_out: Seconds that reading took, summed likewise.
        failures: Copies or calls that failed.
        dropped_pages: Pages that should have been written to it, but were not.
        rejected_pages: Pages that were read from it, but were not what they should have been.
        url: A store's URL.
        state: A store's state: ``attached``, ``opening``, ``failing`` (left alone for a while), or ``none``.
        error: A store's last error.
    """

    tier: TierName
    pages: int = 0
    capacity: int = 0
    hit_tokens: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    seconds_in: float = 0.0
    seconds_out: float = 0.0
    failures: int = 0
    dropped_pages: int = 0
    rejected_pages: int = 0
    url: str = ""
    state: str = ""
    error: str = ""
