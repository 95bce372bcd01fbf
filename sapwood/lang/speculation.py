"""Speculation for completion APIs: one request writes on past a ``gen``'s stop, and later nodes take what fits.

While the program's own texts are what the model wrote next, the rest of the answer is as good as one that was asked for then.
The first text that differs drops the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sapwood.lang.nodes import GRAMMARS, GenOptions

if TYPE_CHECKING:
    from sapwood.lang.backends.base import Backend, Prompt, Usage


class Speculation:
    """What a state has in store.

    Args:
        tokens: Tokens that a request asks for.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._rest = ""

    def take(self, text: str) -> None:
        """The program has written ``text``."""
        self._rest = self._rest.removeprefix(text) if self._rest.startswith(text) else ""

    def fits(self, options: GenOptions, prompt: Prompt) -> bool:
        """Whether a ``gen`` can be answered so: a text that ends at a stop, with nothing else to match."""
        fixed = ("n", "stop_regex", "stop_token_ids", "min_tokens", "return_logprob", *GRAMMARS)
        return not prompt.is_chat and bool(options.get("stop")) and not any(options.get(name) for name in fixed)

    async def answer(
        self, backend: Backend, prompt: Prompt, options: GenOptions
    ) -> tuple[str, Usage, Mapping[str, Any]]:
        """The answer, from the store or of a new request."""
        from sapwood.lang.backends.base import Usage

        stop = options["stop"]
        stops = [stop] if isinstance(stop, str) else list(stop)
        usage, meta = Usage(requests=0), {"speculated": True}
        if self._end(stops) < 0:
            asked = {**options, "max_tokens": max(self.tokens, options.get("max_tokens", 0))}
            asked.pop("stop")
            found = await backend.generate(prompt, asked)  # type: ignore[arg-type]
            self._rest, usage = found.texts[0], found.usage
            meta = {**(found.meta[0] if found.meta else {}), "speculated": False}
        end = self._end(stops)
        text = self._rest if end < 0 else self._rest[:end]
        self._rest = self._rest[len(text) :]
        return text, usage, meta

    def _end(self, stops: list[str]) -> int:
        return min((at for at in map(self._rest.find, stops) if at >= 0), default=-1)
