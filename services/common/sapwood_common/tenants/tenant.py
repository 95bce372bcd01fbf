"""A tenant: its requests share an allowance, a share of the workers and a part of the cache."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass

from sapwood_common.errors import ResourceExhaustedError
from sapwood_net.pacing.rate import Rate


@dataclass(frozen=True, slots=True)
class TargetRange:
    """The targets that requests may name, in milliseconds; one that names none has the ``most``."""

    least: float
    most: float


@dataclass(frozen=True, slots=True)
class TenantSettings:
    """A tenant's settings.

    Attributes:
        name: The name that its keys have in the file.
        requests_per_minute, tokens_per_minute: The allowance; 0 sets no limit.
        weight: Its share of busy workers, relative to others'.
        priority: The highest that its requests may ask for. A request that asks for none has 0, or this if it is lower.
        operator: Whether its requests may do what operators do over HTTP.
        cache_salt: Workers share cached pages only among requests with the same salt.
        first_token, each_token: Its targets for the first token, and for each further one; None: it has none, and its
            requests may name any.
    """

    name: str
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    weight: float = 1.0
    priority: int = 0
    cache_salt: str = ""
    operator: bool = False
    first_token: TargetRange | None = None
    each_token: TargetRange | None = None


class Tenant:
    """A tenant's account. Mutable: its allowances are drawn on.

    Args:
        settings: The tenant's settings.
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
            ResourceExhaustedError: The allowance is used up for now; nothing was taken.
        """
        if wait := self._requests.wait():
            raise ResourceExhaustedError("the API key's request rate is used up", retry_after=wait)
        self._requests.take(1)

    def take_prompt(self, tokens: int) -> None:
        """Takes a prompt's tokens from its allowance, also more than are left, as long as any are.

        Raises:
            ResourceExhaustedError: The allowance is used up for now; nothing was taken.
        """
        if wait := self._tokens.wait():
            raise ResourceExhaustedError("the API key's token rate is used up", retry_after=wait)
        self._tokens.take(tokens)

    def take_output(self, tokens: int) -> None:
        """Takes generated tokens from its allowance; once it is overdrawn, later requests wait until it is not."""
        self._tokens.take(tokens)


def mint_salt(name: str, secret: str = "") -> str:
    """The cache salt of a tenant: the same on every router that knows ``secret``, and another for every name."""
    return hmac.new(secret.encode(), b"sapwood cache salt\0" + name.encode(), hashlib.sha256).hexdigest()[:32]
