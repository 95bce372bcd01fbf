"""What goes with an answer's text: its tokens' probabilities, and the prompt before it where it is echoed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
from msgspec.structs import replace

from sapwood_router.edges.openai.logprobs import PromptLogprobs, TokenName, chat_object, chat_tokens, prompt_object
from sapwood_router.request.context import ChatPrompt, Delta, RequestContext, TextPrompt
from sapwood_router.request.logprobs import TokenLogprobs
from sapwood_router.request.output import Output
from sapwood_router.request.tokens import TokenTable
from sapwood_router.tokenizer.tokenizers import Tokenizer


class LogprobsWriter(Protocol):
    """Writes one choice's ``logprobs``, piece after piece."""

    def add(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], table: TokenTable) -> object:
        """The next piece, for JSON; changes the writer only by where the next one begins."""
        ...


class ChatWriter:
    """Implements :class:`LogprobsWriter` for chats: each piece stands for itself.

    Args:
        name: How tokens are shown.
    """

    def __init__(self, name: TokenName) -> None:
        self._name = name

    def add(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], table: TokenTable) -> object:
        return chat_object(chat_tokens(ids, [found for found in logprobs if found is not None], table, self._name))


class Annotator:
    """Annotates the deltas of one HTTP request's choices.

    Args:
        contexts: One for each choice.
        tokenizer: Knows tokens' texts.
        make_writer: Makes a choice's writer; None where no probabilities were asked for.
        echo: Whether each choice begins with its prompt.
        prompt_only: Whether it ends there: what was generated, for there must be something, is dropped.
        tells_prompt: Whether the prompts' own probabilities are told beside the answers.

    Attributes:
        silent: Whether deltas after each choice's first are left as they are, but for the last.
    """

    def __init__(
        self,
        contexts: Sequence[RequestContext],
        tokenizer: Tokenizer,
        make_writer: Callable[[], LogprobsWriter] | None,
        *,
        echo: bool = False,
        prompt_only: bool = False,
        tells_prompt: bool = False,
    ) -> None:
        self._contexts = contexts
        self._tokenizer = tokenizer
        self._writers = None if make_writer is None else [make_writer() for _ in contexts]
        self._echo = set(range(len(contexts))) if echo else set[int]()
        self._prompt_only = prompt_only
        self._tells_prompt = tells_prompt
        self.silent = self._writers is None and not prompt_only

    async def annotate(self, index: int, delta: Delta) -> object | None:
        """The ``logprobs`` of a choice's next delta, None if there are none. The delta's text and usage may be changed.

        Raises:
            SapwoodError: The tokenizer does not say what the tokens are.
        """
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
        return self._writers[index].add(ids, logprobs, await self._table(context, ids, logprobs))

    async def prompt_logprobs(self, index: int) -> PromptLogprobs | msgspec.UnsetType:
        """Those of a choice's prompt, if they are told, once the choice has begun.

        Raises:
            SapwoodError: As :meth:`annotate`.
        """
        if not self._tells_prompt:
            return msgspec.UNSET
        context = self._contexts[index]
        table = await self._table(context, context.token_ids, context.prompt_logprobs)
        return prompt_object(context.token_ids, context.prompt_logprobs, table)

    async def _table(
        self, context: RequestContext, ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> TokenTable:
        """What these tokens stand for."""
        needed = set(ids)
        for found in logprobs:
            if found is not None:
                needed.update(found.top_ids)
        return await self._tokenizer.client.token_bytes(needed, context.request_id, context.deadline)

    def _tokens(self, delta: Delta) -> tuple[list[int], list[TokenLogprobs | None]]:
        """The delta's tokens that stand for text, with their log probabilities."""
        return delta.token_ids[: delta.text_tokens], [*delta.logprobs[: delta.text_tokens]]

    async def _prompt_text(self, context: RequestContext) -> str:
        """The prompt's text; of token ids, what they say where a model writes them."""
        prompt = context.prompt
        assert not isinstance(prompt, ChatPrompt), "chats are not echoed"
        if isinstance(prompt, TextPrompt):
            return prompt.text
        return await self._tokenizer.text_of(
            context.token_ids, context.deadline, skip_special_tokens=context.output.skip_special_tokens
        )
