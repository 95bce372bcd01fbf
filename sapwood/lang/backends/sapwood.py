"""Sapwood's router over gRPC."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import grpc

from sapwood.async_client import AsyncClient, AsyncGeneration
from sapwood.errors import NotFoundError, UnavailableError
from sapwood.generation import Answer, Delta, Options, TokenLogprobs, answer_of
from sapwood.lang.backends.base import Ability, Backend, Generated, PerLoop, Piece, Prompt, Usage
from sapwood.lang.choices import Scored
from sapwood.lang.nodes import OPTION_NAMES, GenOptions
from sapwood.lang.templates import Template
from sapwood.scoring import ScoreOptions, Scores

ResultT = TypeVar("ResultT")
_RETRY_SECONDS = 0.5
_HERE = {"return_logprob", "top_logprobs_num", "stop_regex", "json_schema", "top_k"}
"""Options that are not passed on as they are."""


@dataclass(slots=True)
class _Session:
    """A state's session: its id, and the text that it holds; None: nobody knows."""

    id: str
    text: str | None


class Sapwood(Backend):
    """A router's gRPC port.

    Args:
        address: ``host:port``; else the variable ``SAPWOOD_ROUTER``, else 127.0.0.1:50051.
        model: The model's name; None: the only one there is.
        template: Conversations are written as text by this template; None: by the server, with the model's own.
        api_key, credentials, timeout: As for :class:`~sapwood.async_client.AsyncClient`.
        patience: Seconds for which a request that found no server is asked again: a router or worker may be restarting.
        sessions: Whether each state's text lives in a session of the router: a request sends what is new, and the worker keeps
            the rest pinned; a fork is a fork of its session. Texts are then encoded piece by piece. For texts, not conversations.
    """

    abilities = frozenset(
        {
            Ability.TEXT,
            Ability.ROLES,
            Ability.PREFILL,
            Ability.SELECT,
            Ability.UNCONDITIONAL,
            Ability.IMAGE,
            Ability.VIDEO,
            Ability.COMMIT,
            Ability.REASONING,
        }
    )
    options = OPTION_NAMES - {"logprob_start_len", "return_text_in_logprobs"}

    def __init__(
        self,
        address: str | None = None,
        *,
        model: str | None = None,
        template: Template | str | None = None,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        timeout: float | None = None,
        patience: float = 300.0,
        sessions: bool = False,
    ) -> None:
        super().__init__(template)
        self.name = f"Sapwood at {address or 'its default address'}"
        self._model = model
        self._patience = patience
        self._clients: PerLoop[AsyncClient] = PerLoop()
        self._make = lambda: AsyncClient(address, api_key=api_key, credentials=credentials, timeout=timeout)
        self._in_sessions = sessions
        self._sessions: dict[int, _Session] = {}
        """By state."""

    @property
    def _client(self) -> AsyncClient:
        return self._clients.get(self._make)

    async def generate(self, prompt: Prompt, options: GenOptions) -> Generated:
        if options.get("stop_regex"):
            return await self._generate_to_regex(prompt, options)
        given = self._given(options)
        if self._in_sessions and options.get("n", 1) == 1 and (not prompt.is_chat or self.renders):
            answer = await self._patiently(lambda: self._continue(prompt, given))
            return Generated((answer.text,), _usage([answer]), meta=(_meta(answer),))

        async def ask() -> list[Answer]:
            deltas = [delta async for delta in self._ask(prompt, {**given, "whole": True})]
            return [answer_of([delta]) for delta in sorted(deltas, key=lambda delta: delta.index)]

        answers = await self._patiently(ask)
        return Generated(
            tuple(answer.text for answer in answers),
            _usage(answers),
            tuple(answer.reasoning for answer in answers),
            tuple(map(_meta, answers)),
        )

    async def stream(self, prompt: Prompt, options: GenOptions) -> AsyncIterator[Piece]:
        if options.get("stop_regex"):  # a part of the text does not show what a pattern will match
            async for piece in super().stream(prompt, options):
                yield piece
            return
        deltas: list[Delta] = []
        call = None

        async def begin() -> Delta | None:
            nonlocal call
            call = self._ask(prompt, self._given(options))
            return await anext(call, None)

        delta = await self._patiently(begin)
        while delta is not None:
            deltas.append(delta)
            answer = answer_of(deltas)
            yield Piece(
                delta.text, delta.reasoning, _usage([answer]) if delta.usage is not None else None, _meta(answer)
            )
            assert call is not None
            delta = await anext(call, None)

    async def _generate_to_regex(self, prompt: Prompt, options: GenOptions) -> Generated:
        """The answer is read as it comes; it is cancelled at the first match, and ends before it."""

        async def read(index: int) -> tuple[str, Answer, str]:
            return await self._patiently(lambda: self._read_to_regex(prompt, options, index))

        found = await gather(*map(read, range(options.get("n", 1))))
        return Generated(
            tuple(text for text, _, _ in found),
            replace(_usage([answer for _, answer, _ in found]), requests=len(found)),
            tuple(answer.reasoning for _, answer, _ in found),
            tuple({**_meta(answer), **({"matched_stop": match} if match else {})} for _, answer, match in found),
        )

    async def _read_to_regex(self, prompt: Prompt, options: GenOptions, index: int) -> tuple[str, Answer, str]:
        given = self._given({**options, "n": 1})
        if "seed" in given:
            given["seed"] += index  # as the server does for the answers of one request
        stop = compiled(options["stop_regex"])
        call = self._ask(prompt, given)
        deltas: list[Delta] = []
        text = ""
        async for delta in call:
            deltas.append(delta)
            text += delta.text
            match = stop.search(text)
            if match is not None:
                call.cancel()
                return text[: match.start()], replace(answer_of(deltas), finish_reason="stop"), match[0]
        return text, answer_of(deltas), ""

    async def score(self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool) -> tuple[list[Scored], Usage]:
        """One request: prompt and choices are a tree to the server, which computes what they share once."""
        options: ScoreOptions = {"unconditional": unconditional}
        if self._model is not None:
            options["model"] = self._model

        async def ask() -> Scores:
            if not prompt.is_chat or self.renders:
                return await self._client.score(choices, prompt.text, **options)
            messages = [*prompt.messages]
            if prompt.turn:
                messages.append({"role": prompt.role, "content": prompt.turn})
                more: ScoreOptions = {**options, "continue_final_message": True}
                return await self._client.score(choices, messages=messages, **more)
            return await self._client.score(choices, messages=messages, **options)

        found = await self._patiently(ask)
        scored = [
            Scored(choice, each.token_ids, each.logprobs, each.unconditional)
            for choice, each in zip(choices, found.scores, strict=True)
        ]
        return scored, Usage(found.cached_tokens + found.computed_tokens, found.cached_tokens)

    async def commit(self, prompt: Prompt) -> Usage:
        if prompt.is_chat and not self.renders:  # a session continues text: the conversation is computed, not pinned
            return await self._compute(prompt)
        asked: Options = {"max_tokens": 1, "temperature": 0}
        return _usage([await self._patiently(lambda: self._continue(prompt, asked))])

    async def warm(self, prompt: Prompt) -> None:
        await self._compute(prompt)

    async def fork(self, parent: int, children: Sequence[int]) -> None:
        source = self._sessions.get(parent)
        if not self._in_sessions or source is None or source.text is None:
            return

        async def fork(child: int) -> None:
            with suppress(NotFoundError):  # the router was restarted: the child has no session yet
                self._sessions[child] = _Session(await self._client.open_session(fork_of=source.id), source.text)

        await gather(*map(fork, children))

    async def release(self, states: Sequence[int]) -> None:
        held = [self._sessions.pop(state) for state in states if state in self._sessions]
        await gather(*(self._close(session) for session in held))

    async def server_info(self) -> Mapping[str, Any]:
        models = await self._client.list_models()
        return {"models": {model.id: model.context_length for model in models}}

    async def close(self) -> None:
        client = self._clients.pop()
        if client is not None:
            await client.close()

    async def _continue(self, prompt: Prompt, options: Options) -> Answer:
        """Asks in the state's session for what comes after the text; a new one, if it holds anything else."""
        session = self._sessions.get(prompt.state)
        if session is None or session.text is None or not _is_longer(prompt.text, session.text):
            if session is not None:
                await self._close(session)
            session = self._sessions[prompt.state] = _Session(await self._client.open_session(), "")
        begun, session.text = session.text, None
        more: Options = {"session": session.id, "whole": True}
        if begun:
            more["add_special_tokens"] = False
        assert begun is not None
        try:
            answer = await self._client.generate(
                prompt.text[len(begun) :], **self._of_model({**options, **more})
            ).answer()
        except (
            NotFoundError
        ) as error:  # it was not used for too long, or the router was restarted: it has no sessions now
            if error.field != "session":
                raise
            self._sessions.pop(prompt.state)
            raise UnavailableError(error.status, error.message, retry_after=0.01) from None
        if answer.finish_reason == "length":  # else it holds what ended the text, which is not part of it
            session.text = prompt.text + answer.text
        return answer

    async def _close(self, session: _Session) -> None:
        with suppress(NotFoundError, UnavailableError):  # it ended by itself, or its router did
            await self._client.close_session(session.id)

    async def _compute(self, prompt: Prompt) -> Usage:
        """Has a prompt computed; a worker generates at least one token, which is dropped."""

        async def ask() -> Answer:
            asked: Options = {"max_tokens": 1, "temperature": 0, "detokenize": False, "whole": True}
            return answer_of([delta async for delta in self._ask(prompt, asked)])

        return _usage([await self._patiently(ask)])

    def _ask(self, prompt: Prompt, options: Options) -> AsyncGeneration:
        options = self._of_model(options)
        if not prompt.is_chat or self.renders:
            return self._client.generate(prompt.text, **options)
        messages = [*prompt.messages]
        if prompt.turn:
            messages.append({"role": prompt.role, "content": prompt.turn})
            options = {**options, "continue_final_message": True}
        return self._client.generate(messages=messages, **options)

    def _of_model(self, options: Options) -> Options:
        return options if self._model is None else {**options, "model": self._model}

    def _given(self, options: GenOptions) -> Options:
        """The options by the client's names."""
        given: dict[str, Any] = {name: value for name, value in options.items() if name not in _HERE}
        if options.get("top_k", -1) > 0:
            given["top_k"] = options["top_k"]
        if self.renders and self.template.stop:
            stop = given.get("stop", ())
            given["stop"] = [*([stop] if isinstance(stop, str) else stop), *self.template.stop]
        if options.get("return_logprob"):
            given["logprobs"] = options.get("top_logprobs_num") or 0
        if "json_schema" in options:
            given["json_schema"] = schema_of(options["json_schema"])
        return given  # type: ignore[return-value]

    async def _patiently(self, ask: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Asks again while there is no server: nothing of the answer has come yet."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._patience
        while True:
            try:
                return await ask()
            except UnavailableError as error:
                if loop.time() >= give_up:
                    raise
                await asyncio.sleep(error.retry_after or _RETRY_SECONDS)


def compiled(patterns: str | Sequence[str]) -> re.Pattern[str]:
    """One pattern for all of them."""
    return re.compile("|".join(f"(?:{each})" for each in ([patterns] if isinstance(patterns, str) else patterns)))


def schema_of(given: Any) -> Any:
    """A JSON schema: of a class that knows its own, such as pydantic's."""
    return given.model_json_schema() if hasattr(given, "model_json_schema") else given


def _is_longer(text: str, begun: str) -> bool:
    return text.startswith(begun) and len(text) > len(begun)


async def gather(*work: Coroutine[Any, Any, ResultT]) -> list[ResultT]:
    """The results of all; the first error, or a cancellation, cancels the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _usage(answers: Sequence[Answer]) -> Usage:
    usages = [answer.usage for answer in answers if answer.usage is not None]
    if not usages:
        return Usage()
    return Usage(usages[0].prompt_tokens, usages[0].cached_tokens, sum(each.completion_tokens for each in usages))


def _meta(answer: Answer) -> dict[str, Any]:
    meta: dict[str, Any] = {"finish_reason": answer.finish_reason}
    if answer.stop_match is not None:
        meta["matched_stop"] = answer.stop_match
    if answer.logprobs:
        meta["token_ids"] = list(answer.token_ids)
        meta["output_token_logprobs"] = [
            [each.logprob, token_id, None] for token_id, each in zip(answer.token_ids, answer.logprobs, strict=True)
        ]
        meta["output_top_logprobs"] = [_alternatives(each) for each in answer.logprobs]
    return meta


def _alternatives(found: TokenLogprobs) -> list[list[Any]]:
    return [[logprob, token_id, None] for token_id, logprob in found.top]
