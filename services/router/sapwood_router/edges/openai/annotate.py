"""Additions to an answer's text: its tokens' probabilities, and the echoed prompt before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from msgspec.structs import replace

from sapwood_net.pacing.heavy_work import Stint
from sapwood_router.edges.http.json_list import JsonList
from sapwood_router.edges.openai.logprobs import prompt_entries
from sapwood_router.edges.telling import Telling
from sapwood_router.request.context import ChatPrompt, Delta, Likelihoods, RequestContext, TextPrompt
from sapwood_router.request.output import Output
from sapwood_router.tokenizer.text_stream import Tokenizer
from sapwood_text.vocabulary import Vocabulary


class LogprobsWriter(Protocol):
    """Writes one choice's ``logprobs``."""

    def add(self, ids: Sequence[int], logprobs: Sequence[Likelihoods | None], vocabulary: Vocabulary) -> None:
        """Takes the next tokens."""
        ...

    def take(self) -> Any:
        """The additions since the last call, in JSON: a :class:`msgspec.Raw`."""
        ...


class Annotator:
    """Annotates the deltas of one HTTP request's choices.

    Args:
        contexts: One for each choice.
        tokenizer: Knows tokens' texts.
        make_writer: Makes a choice's writer; None where no probabilities were asked for.
        stint: Whose turns the pieces have, where there are many tokens to tell of.
        echo: Whether each choice begins with its prompt.
        prompt_only: Whether it ends there: what was generated, for there must be something, is dropped.
        tells_prompt: Whether answers include the log probabilities of the prompts.

    Attributes:
        silent: Whether a choice's deltas except the first and the last are left unchanged.
        note: The ``logprobs`` of the delta that was read last, in JSON; None: there are none. Who writes them takes them.
        prompt_note: The data about the prompt, if the delta is the first of its choice.
    """

    def __init__(
        self,
        contexts: Sequence[RequestContext],
        tokenizer: Tokenizer,
        make_writer: Callable[[], LogprobsWriter] | None,
        stint: Stint,
        *,
        echo: bool = False,
        prompt_only: bool = False,
        tells_prompt: bool = False,
    ) -> None:
        self._contexts = contexts
        self._tokenizer = tokenizer
        self._writers = None if make_writer is None else [make_writer() for _ in contexts]
        self._telling = Telling(tokenizer.client, stint)
        self._echo = set(range(len(contexts))) if echo else set[int]()
        self._prompt_only = prompt_only
        self._tells_prompt = tells_prompt
        self.silent = self._writers is None and not prompt_only
        self.note: Any = None
        self.prompt_note: Any = None
        self._begun: set[int] = set()

    async def read(self, delta: Delta) -> None:
        """Makes the notes that go with a delta of a stream. Raises as :meth:`annotate`."""
        self.note = await self.annotate(delta)
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            self.prompt_note = await self.prompt_logprobs(delta.index)

    async def annotate(self, delta: Delta) -> Any:
        """The ``logprobs`` of a choice's next delta, in JSON; None if there are none. The delta's text and usage may be changed.

        Raises:
            SapwoodError: The tokenizer does not say what the tokens are.
        """
        index = delta.index
        ids, logprobs = self._tokens(delta)
        if self._prompt_only:
            ids, logprobs = [], []
            delta.output, delta.token_ids = Output(), []
            if delta.finish is not None:
                delta.finish = replace(delta.finish, usage=replace(delta.finish.usage, completion_tokens=0))
        context = self._contexts[index]
        if index in self._echo:
            self._echo.discard(index)
            delta.output.text = await self._prompt_text(context) + delta.output.text
            if self._writers is not None:
                ids = [*context.token_ids, *ids]
                logprobs = [None, *context.prompt_logprobs, *logprobs]
        if self._writers is None or not ids:
            return None
        vocabulary, writer = await self._telling.vocabulary(context), self._writers[index]
        async for some, found in self._telling.pieces(ids, logprobs):
            writer.add(some, found, vocabulary)
        return writer.take()

    async def prompt_logprobs(self, index: int) -> Any:
        """The log probabilities of a choice's prompt once it has begun, in JSON; None if they are not wanted.

        Raises:
            SapwoodError: As :meth:`annotate`.
        """
        if not self._tells_prompt:
            return None
        context = self._contexts[index]
        ids, logprobs = context.token_ids, [None, *context.prompt_logprobs]
        vocabulary, entries = await self._telling.vocabulary(context), JsonList()
        async for some, found in self._telling.pieces(ids, logprobs):
            entries.add(prompt_entries(some, found, vocabulary))
        return entries.take()

    def _tokens(self, delta: Delta) -> tuple[list[int], list[Likelihoods | None]]:
        """The delta's tokens that stand for text, with their log probabilities."""
        return delta.token_ids[: delta.text_tokens], [*delta.logprobs[: delta.text_tokens]]

    async def _prompt_text(self, context: RequestContext) -> str:
        """The prompt's text; for token ids, the text that they stand for."""
        prompt = context.prompt
        assert not isinstance(prompt, ChatPrompt), "chats are not echoed"
        if isinstance(prompt, TextPrompt):
            return prompt.text
        return await self._tokenizer.text_of(
            context.token_ids,
            context.request_id,
            context.deadline,
            skip_special_tokens=context.output.skip_special_tokens,
        )
