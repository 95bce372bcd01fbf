"""Which tokenizer service is whose: one for all models, and those that models have of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sapwood_common.errors import DeadlineExceededError, SapwoodError
from sapwood_router.fleet.registry import Registry
from sapwood_router.request.output import OutputOptions
from sapwood_router.tokenizer.client import TokenizerClient
from sapwood_router.tokenizer.replica import TokenizerReplicas
from sapwood_router.tokenizer.text_stream import TextStreams


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """One tokenizer service, whatever its number of replicas: of one vocabulary and one chat template.

    Attributes:
        replicas: As they come and go.
        client: Makes tokens of prompts.
        streams: Make text of tokens.
    """

    replicas: TokenizerReplicas
    client: TokenizerClient
    streams: TextStreams

    async def text_of(
        self, token_ids: Sequence[int], request_id: str, deadline: float, *, skip_special_tokens: bool
    ) -> str:
        """What tokens say where a model writes them; each must be below the vocabulary's size.

        Args:
            token_ids: The tokens.
            request_id: For the service's log.
            deadline: On the event loop's clock.
            skip_special_tokens: Whether special tokens are left out.

        Raises:
            SapwoodError: The service's own error; UnavailableError if it is gone; DeadlineExceededError.
        """
        options = OutputOptions(skip_special_tokens=skip_special_tokens)
        stream = await self.streams.open(options, request_id, deadline, whole=True)
        written = asyncio.Event()
        stream.follow(written.set)
        try:
            async with asyncio.timeout_at(deadline):
                stream.push(token_ids, end=True)
                await written.wait()
            return stream.take().output.text
        except TimeoutError:
            raise DeadlineExceededError("the deadline passed before the tokens were text") from None
        finally:
            stream.close()


class Tokenizers:
    """The tokenizer services that this router uses.

    Args:
        usual: For models that have none of their own.
        of_models: Models' own.
        registry: Knows which model is meant where a request names none.
    """

    def __init__(self, usual: Tokenizer, of_models: Mapping[str, Tokenizer], registry: Registry) -> None:
        self._usual = usual
        self._of_models = of_models
        self._registry = registry

    @property
    def problem(self) -> str | None:
        """Why nothing can be tokenized; None while one of them is well."""
        problems = [("", self._usual), *((f" of {model}", own) for model, own in self._of_models.items())]
        if any(item.client.problem is None for _, item in problems):
            return None
        return "; ".join(f"tokenizer{whose} {item.client.problem}" for whose, item in problems)

    def of(self, model: str | None) -> Tokenizer:
        """The tokenizer of a model, as a request names it."""
        if not self._of_models:
            return self._usual
        if not model:  # as for the registry, an empty name is none
            try:
                model = self._registry.resolve(None)
            except SapwoodError:  # there is none yet, or the request must say: it will be told
                return self._usual
        return self._of_models.get(model, self._usual)

    def all(self) -> Iterable[Tokenizer]:
        """Each of them."""
        return (self._usual, *self._of_models.values())
