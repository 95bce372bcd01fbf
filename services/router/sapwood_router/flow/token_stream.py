"""One request's tokens on their way to a client that wants token ids: no text is made, and no tokenizer is asked."""

from __future__ import annotations

from collections.abc import Sequence

from sapwood_router.request.output import Output
from sapwood_router.request.output_stream import WINDOW, OutputChunk, OutputStream, Relay


class TokenStream(OutputStream):
    """Only counts tokens; their ids are in the request's context.

    Args:
        whole: The output is taken in one piece, at its end.
    """

    def __init__(self, *, whole: bool = False) -> None:
        super().__init__(whole=whole)
        self._relay: Relay | None = None

    @property
    def relays(self) -> bool:
        """Whether :meth:`pass_on` was called."""
        return self._relay is not None

    def push(self, token_ids: Sequence[int], *, end: bool = False) -> bool:
        if self._ended or self._closed or self._error is not None:
            return False
        self._tokens += len(token_ids)
        self._ended = end
        self._fresh = self._tokens > self._tokens_taken
        if end or (self._fresh and not self._whole):
            self.relay = None  # so that no later token overtakes what is pushed now
            if self._listener is not None:
                self._listener()
            if end:
                self._tell_pusher()
            return self._tokens - self._tokens_taken >= WINDOW and not end
        return False

    def pass_on(self, relay: Relay) -> None:
        """From now on the pusher gives single tokens to ``relay`` while no token waits here. The stream does not count those."""
        self._relay = relay
        if not self._fresh and not self.over:
            self.relay = relay

    def close(self) -> None:
        self._relay = None
        super().close()

    def _waiting_tokens(self) -> int:
        return self._tokens - self._tokens_taken

    def _chunk(self) -> OutputChunk:
        self.relay = self._relay
        return OutputChunk(Output(), self._tokens, self._ended)
