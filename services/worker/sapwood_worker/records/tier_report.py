"""What an operator is shown of the tiers."""

from __future__ import annotations

from typing import Literal

import msgspec

TierName = Literal["device", "host", "storage"]


class TierReport(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One tier, since the start where it counts.

    Attributes:
        tier: Which.
        pages: Pages that hold something.
        capacity: Pages there are; 0 for a store, which says neither.
        hit_tokens: Tokens that requests found there, in no tier above; of a store, tokens read from it.
        bytes_in: Written to it.
        bytes_out: Read from it.
        seconds_in: What that took, summed over copies or calls.
        seconds_out: What that took.
        failures: Copies or calls that failed.
        dropped_pages: Pages that should have been written to it, but were not.
        rejected_pages: Pages that were read from it, but were not what they should have been.
        url: Of a store.
        state: Of a store: ``attached``, ``opening``, ``failing`` (left alone for a while), or ``none``.
        error: What it said last.
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
