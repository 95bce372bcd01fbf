"""A tenant: whose requests share an allowance, a share of the workers and a part of the cache."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass

from sapwood_common.errors import ResourceExhaustedError
from sapwood_common.pacing.rate import Rate


@dataclass(frozen=True, slots=True)
class TenantSettings:
    """What a tenant gets.

    Attributes:
        name: Of its keys.
        requests_per_minute, tokens_per_minute: 0 is without limit.
        weight: Its share of busy workers, relative to others'.
        priority: The most that its requests may say theirs is; of one that says nothing it is 0, or this if it is less.
        cache_salt: Under which workers cache for it, and for nobody else.
    """

    name: str
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    weight: float = 1.0
    priority: int = 0
    cache_salt: str = ""


class Tenant:
    """A tenant's account. Mutable: its allowances are drawn on.

    Args:
        settings: What it gets.
        clock: Seconds, monotonic.
    """

    def __init__(self, settings: TenantSettings, clock: Callable[[], float]) -> None:
        self.settings = settings
        self._requests = Rate(settings.requests_per_minute, clock)
        self._tokens = Rate(settings.tokens_per_minute, clock)

    @property
    def name(self) -> str:
        """Its name."""
        return self.settings.name

    def begin_request(self) -> None:
        """Takes one request from its allowance.

        Raises:
            ResourceExhaustedError: None is left for now; nothing was taken.
        """
        if wait := self._requests.wait():
            raise ResourceExhaustedError("the API key's request rate is used up", retry_after=wait)
        self._requests.take(1)

    def take_prompt(self, tokens: int) -> None:
        """Takes a prompt's tokens, as many as they are, if any are left.

        Raises:
            ResourceExhaustedError: None is left for now; nothing was taken.
        """
        if wait := self._tokens.wait():
            raise ResourceExhaustedError("the API key's token rate is used up", retry_after=wait)
        self._tokens.take(tokens)

    def take_output(self, tokens: int) -> None:
        """Takes generated tokens; what is overdrawn, later requests wait for."""
        self._tokens.take(tokens)


def mint_salt(name: str, secret: str = "") -> str:
    """The cache salt of a tenant: the same on every router that knows ``secret``, and another for every name."""
    return hmac.new(secret.encode(), b"sapwood cache salt\0" + name.encode(), hashlib.sha256).hexdigest()[:32]
