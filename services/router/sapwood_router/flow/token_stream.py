"""One request's tokens on their way to a client that wants token ids: no text is made, and no tokenizer is asked."""

from __future__ import annotations

from collections.abc import Sequence

from sapwood_router.request.output import Output
from sapwood_router.request.output_stream import OutputChunk, OutputStream


class TokenStream(OutputStream):
    """Only counts tokens; their ids are in the request's context.

    Args:
        whole: The output is taken in one piece, at its end.
    """

    def push(self, token_ids: Sequence[int], *, end: bool = False) -> bool:
        if self.over:
            return False
        self._tokens += len(token_ids)
        self._ended = end
        self._fresh = self._tokens > self._tokens_taken
        self._tell()
        if end:
            self._tell_pusher()
        return self.full

    def _waiting_tokens(self) -> int:
        return self._tokens - self._tokens_taken

    def _chunk(self) -> OutputChunk:
        return OutputChunk(Output(), self._tokens, self._ended)
