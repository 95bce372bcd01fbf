"""Many requests at once over one connection: what the engine's blocking and its asyncio form have in common."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeVar

import grpc

from sapwood.call_setup import CHANNEL_OPTIONS
from sapwood.client import AsyncClient
from sapwood.embedding import Embeddings, EmbedOptions
from sapwood.errors import CancelledError, SapwoodError, UnavailableError, from_rpc_error
from sapwood.generation import Answer, Options, TokenLogprobs, answer_of
from sapwood.v1 import tokenizer_pb2, tokenizer_pb2_grpc

ResultT = TypeVar("ResultT")
Prompt = str | Sequence[int]
Message = Mapping[str, Any]

_INPUTS_A_CALL = 64
"""Inputs that are embedded in one call: calls go to several workers."""
_TEXTS_A_CALL = 1024
_PATIENCE_SECONDS, _RETRY_SECONDS = 300.0, 0.5


@dataclass(frozen=True, slots=True)
class Score:
    """How likely the model finds a continuation.

    Attributes:
        logprob: The natural logarithm of its probability: the sum over its tokens.
        token_ids: Its tokens.
        logprobs: The logarithm for each of them.
        greedy: Whether each of them is the likeliest in its place.
    """

    logprob: float
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    greedy: bool


class Batches:
    """Asks for many answers at a time. Belongs to the event loop that it is constructed in.

    Args:
        router: The router's address.
        tokenizer: The tokenizer's.
        at_once: Requests under way at a time.
        timeout: Seconds for each request; None for no limit.
        check: Raises UnavailableError once the cluster is gone for good.
    """

    def __init__(
        self, router: str, tokenizer: str, at_once: int, timeout: float | None, check: Callable[[], None]
    ) -> None:
        self._check = check
        self._closed = False
        self.client = AsyncClient(router, timeout=timeout)
        self._room = asyncio.Semaphore(at_once)
        self._timeout = timeout
        self._channel = grpc.aio.insecure_channel(tokenizer, options=CHANNEL_OPTIONS)
        self._tokenizer: tokenizer_pb2_grpc.TokenizerAsyncStub = tokenizer_pb2_grpc.TokenizerStub(self._channel)

    async def close(self) -> None:
        """Closes the connections; what runs ends with sapwood's CancelledError."""
        self._closed = True
        await self.client.close()
        await self._channel.close()

    async def generate(self, prompts: Sequence[Prompt], options: Options) -> list[Answer]:
        """The answers to prompts: one for each, or ``n``.

        Raises:
            SapwoodError: One of them failed, which the message names; the others are cancelled.
        """

        def ask(prompt: Prompt) -> AsyncIterator[Any]:
            if isinstance(prompt, str):
                return self.client.generate(prompt, **_whole(options))
            return self.client.generate(token_ids=prompt, **_whole(options))

        return await self._answers(prompts, ask)

    async def chat(self, conversations: Sequence[Iterable[Message]], options: Options) -> list[Answer]:
        """The same for conversations."""
        return await self._answers(conversations, lambda turns: self.client.generate(messages=turns, **_whole(options)))

    async def embed(self, inputs: Sequence[Prompt], options: EmbedOptions) -> Embeddings:
        """One vector for each input."""

        async def embed(part: Sequence[Prompt]) -> Embeddings:
            return await self.client.embed(part, **options)

        found = await self._all(_parts(inputs, _INPUTS_A_CALL), embed, "part")
        vectors = tuple(vector for part in found for vector in part.vectors)
        return Embeddings(vectors, sum(part.prompt_tokens for part in found), found[0].model if found else "")

    async def score(self, pairs: Sequence[tuple[Prompt, Prompt]]) -> list[Score]:
        """How likely each continuation is after its prompt.

        Raises:
            ValueError: A prompt has no tokens, or a continuation adds none.
            SapwoodError: One of them failed.
        """
        heads = await self._tokens([prompt for prompt, _ in pairs], special=True)
        tails = await self._tokens(
            [prompt + more if isinstance(prompt, str) and isinstance(more, str) else more for prompt, more in pairs],
            special=[isinstance(prompt, str) for prompt, _ in pairs],
        )
        jobs = [
            _begin(index, head, tail if isinstance(prompt, str) and isinstance(more, str) else head + tail)
            for index, ((prompt, more), head, tail) in enumerate(zip(pairs, heads, tails, strict=True))
        ]

        async def score(job: tuple[int, list[int]]) -> Score:
            start, tokens = job
            call = self.client.generate(
                token_ids=tokens,
                max_tokens=1,
                temperature=0,
                prompt_logprobs=1,
                prompt_logprobs_start=start - 1,
                detokenize=False,
                whole=True,
            )
            answer = await call.answer()
            return _score(tokens[start:], answer.prompt_logprobs)

        return await self._all(jobs, score, "pair")

    async def tokenize(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """The token ids of texts; ``special``: with the model's own around them."""

        async def tokenize(part: Sequence[str]) -> list[list[int]]:
            request = tokenizer_pb2.TokenizeRequest(texts=part, add_special_tokens=special)
            found = await self._tokenizer.Tokenize(request, timeout=self._timeout)
            return [list(sequence.ids) for sequence in found.sequences]

        return [ids for part in await self._all(_parts(texts, _TEXTS_A_CALL), tokenize, "part") for ids in part]

    async def detokenize(self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        """The text of token ids."""

        async def detokenize(part: Sequence[Sequence[int]]) -> list[str]:
            options = tokenizer_pb2.DetokenizeOptions(skip_special_tokens=skip_special_tokens)
            inputs = [
                tokenizer_pb2.DetokenizeInput(stream_id=index, options=options, token_ids=ids, end=True)
                for index, ids in enumerate(part)
            ]
            call = self._tokenizer.Detokenize(
                iter([tokenizer_pb2.DetokenizeRequest(inputs=inputs)]), timeout=self._timeout
            )
            texts = [""] * len(part)
            async for response in call:
                for output in response.outputs:
                    texts[output.stream_id] += output.text
            return texts

        return [text for part in await self._all(_parts(sequences, _TEXTS_A_CALL), detokenize, "part") for text in part]

    async def _tokens(self, prompts: Sequence[Prompt], *, special: bool | Sequence[bool]) -> list[list[int]]:
        """The tokens of each: texts are tokenized."""
        wanted = [special] * len(prompts) if isinstance(special, bool) else special
        found: list[list[int]] = [[] if isinstance(prompt, str) else [*prompt] for prompt in prompts]
        for kind in (True, False):
            texts = {i: prompt for i, prompt in enumerate(prompts) if isinstance(prompt, str) and wanted[i] is kind}
            for index, ids in zip(texts, await self.tokenize([*texts.values()], special=kind), strict=True):
                found[index] = ids
        return found

    async def _answers(self, prompts: Sequence[Any], ask: Callable[[Any], AsyncIterator[Any]]) -> list[Answer]:
        async def answers(prompt: Any) -> list[Answer]:
            # Each delta is a whole answer.
            return [answer_of([delta]) for delta in sorted([each async for each in ask(prompt)], key=_index)]

        return [answer for found in await self._all(prompts, answers, "prompt") for answer in found]

    async def _all(self, items: Sequence[Any], work: Callable[[Any], Awaitable[ResultT]], noun: str) -> list[ResultT]:
        """The results for all items; ``at_once`` are under way at a time. The first error cancels the others."""

        async def one(index: int, item: Any) -> ResultT:
            async with self._room:
                try:
                    return await self._patiently(work, item)
                except SapwoodError as error:
                    if len(items) > 1:
                        error.message = f"{noun} {index}: {error.message}"
                    raise

        tasks = [asyncio.ensure_future(one(index, item)) for index, item in enumerate(items)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _patiently(self, work: Callable[[Any], Awaitable[ResultT]], item: Any) -> ResultT:
        """Asks again after the loss of a service, which is started again: no part of the answer has reached the caller yet."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + _PATIENCE_SECONDS
        while True:
            try:
                return await work(item)
            except grpc.aio.AioRpcError as failure:
                error = from_rpc_error(failure)
            except SapwoodError as failure:
                error = failure
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self._closed and task is not None and not task.cancelling():  # the connection's end, not the task's
                    raise CancelledError(grpc.StatusCode.CANCELLED, "the engine was closed") from None
                raise
            if not isinstance(error, UnavailableError) or loop.time() > give_up:
                raise error
            self._check()
            await asyncio.sleep(error.retry_after or _RETRY_SECONDS)


def is_one(prompts: Any) -> bool:
    """Whether this is one prompt (a text, token ids, a conversation) and no list of them."""
    if isinstance(prompts, str):
        return True
    first = next(iter(prompts), None)
    return isinstance(first, (Integral, Mapping))


def _whole(options: Options) -> Options:
    return {**options, "whole": True}


def _index(delta: Any) -> int:
    return int(delta.index)


def _parts(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _begin(index: int, head: list[int], whole: list[int]) -> tuple[int, list[int]]:
    """Where a continuation begins in all tokens: at the first that is not the prompt's own, and all tokens."""
    start = 0
    while start < min(len(head), len(whole)) and head[start] == whole[start]:
        start += 1
    if start == 0:
        raise ValueError(f"pair {index}: the prompt has no token that the continuation could follow")
    if start == len(whole):
        raise ValueError(f"pair {index}: the continuation adds no token")
    return start, whole


def _score(token_ids: list[int], found: Sequence[TokenLogprobs]) -> Score:
    logprobs = tuple(each.logprob for each in found)
    greedy = all(each.top[0][0] == token for token, each in zip(token_ids, found, strict=True))
    return Score(sum(logprobs), tuple(token_ids), logprobs, greedy)
