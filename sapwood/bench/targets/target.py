"""The interface of servers for the load generator and the evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from sapwood.bench.data.conversation import Ask
from sapwood.bench.targets.record import Record


class TargetError(Exception):
    """The server cannot be asked at all: unreachable, without models, or it refused a request that all others resemble."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """What all requests have in common.

    Attributes:
        temperature: 0 is greedy.
        ignore_eos: Whether answers continue to ``max_tokens`` past the model's end tokens. Not every server knows it.
        extra: Further fields of the body, over HTTP only.
    """

    temperature: float = 0.0
    ignore_eos: bool = False
    extra: dict[str, Any] | None = None


class Asked(Protocol):
    """What answers requests."""

    async def ask(self, ask: Ask, record: Record) -> None:
        """Sends a request and notes what comes back; failures are noted, too.

        Raises:
            asyncio.CancelledError: The request was cancelled; it is also cancelled on the server.
        """
        ...


class Target(Asked, Protocol):
    """A server."""

    async def connect(self) -> str:
        """Finds the model and returns its name. Raises TargetError."""
        ...

    async def score(self, text: str, record: Record) -> list[float]:
        """The log probabilities of a text's tokens but its first; empty if the record says that it failed."""
        ...

    async def close(self) -> None:
        """Closes the connections."""
        ...
