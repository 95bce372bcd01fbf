"""One request as its client saw it."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field

INTERRUPTED = "interrupted"
"""The error of requests that the client itself broke off."""
NOTHING = "empty stream"
"""The error of answers that ended without one piece and without a count of tokens."""

clock = time.perf_counter


@dataclass(slots=True)
class Record:
    """Times are seconds on :data:`clock`.

    Attributes:
        due: When it was to be sent.
        sent: When it was sent; 0 before.
        arrivals: When each piece of the answer came.
        ended: When the answer was over, or failed; 0 before.
        prompt_tokens: By the server's usage; None if it sent none.
        completion_tokens: The same.
        cached_tokens: The same, of the prompt.
        error: The kind of failure, such as ``HTTP 503``; empty if there was none.
        message: What the failure said.
        pieces: The answer's text.
        finish_reason: As the server gave it.
    """

    due: float = 0.0
    sent: float = 0.0
    arrivals: array[float] = field(default_factory=lambda: array("d"))
    ended: float = 0.0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    error: str = ""
    message: str = ""
    pieces: list[str] = field(default_factory=list)
    finish_reason: str = ""

    @property
    def text(self) -> str:
        """The answer."""
        return "".join(self.pieces)

    def fail(self, kind: str, message: str = "") -> None:
        """Notes a failure; the first one counts."""
        if not self.error:
            self.error, self.message = kind, " ".join(message.split())[:500]

    @property
    def ttft(self) -> float | None:
        """Time to first token: from sending to the first piece."""
        return self.arrivals[0] - self.sent if self.arrivals else None

    @property
    def gaps(self) -> list[float]:
        """Times between one piece and the next."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for answers of fewer than two tokens or of an unknown number."""
        if self.completion_tokens is None or self.completion_tokens < 2 or not self.arrivals:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.completion_tokens - 1)

    @property
    def e2e(self) -> float:
        """Seconds from sending to the end of the answer."""
        return self.ended - self.sent
