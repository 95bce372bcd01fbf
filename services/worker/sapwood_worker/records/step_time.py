"""How long a step took and what its requests waited for, as the front is told."""

from __future__ import annotations

from typing import Literal

import msgspec


class LoadTime(msgspec.Struct, frozen=True, array_like=True):
    """What a request got from a tier of the cache below the device.

    Attributes:
        serial: The request.
        tier: ``storage``: read from the store while the request queued; ``host``: copied to the device with its first step.
        pages: How many pages.
        began: Seconds on ``time.monotonic``'s clock.
        ended: Seconds on the same clock.
    """

    serial: int
    tier: Literal["storage", "host"]
    pages: int
    began: float
    ended: float


class StepTime(msgspec.Struct, frozen=True, array_like=True):
    """One step.

    Attributes:
        seconds: Seconds from its plan to its tokens.
        prefill_tokens: Prompt tokens computed.
        decode_tokens: Requests that decoded a token.
        started: Serials of the requests for which it was the first step.
        at: When it was planned, in seconds on ``time.monotonic``'s clock, which all processes of a machine share.
        loads: What requests that started with it got from the cache's lower tiers.
        spared_tokens: Cached tokens that each layer did not read, as another request of the step that has them too did.
    """

    seconds: float
    prefill_tokens: int
    decode_tokens: int
    started: list[int]
    at: float
    loads: list[LoadTime] = []
    spared_tokens: int = 0
