"""Sapwood's router over HTTP, through aiohttp (``pip install aiohttp``)."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from sapwood.lang.backends.base import Ability, Backend, Generated, PerLoop, Piece, Prompt, StreamedLogprobs, Usage
from sapwood.lang.backends.sapwood import compiled, gather, schema_of
from sapwood.lang.choices import Scored
from sapwood.lang.nodes import GenOptions
from sapwood.lang.templates import Template, get_template, template_of

ResultT = TypeVar("ResultT")
_RETRY_SECONDS = 0.5
_OF_GENERATE = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
_LOGPROBS = ("return_logprob", "top_logprobs_num", "logprob_start_len", "return_text_in_logprobs")
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")


class HttpError(Exception):
    """The server refused or failed; ``status`` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class SapwoodHttp(Backend):
    """A router's HTTP port.

    Args:
        base_url: Such as ``http://127.0.0.1:8000``.
        model: The model's name; None: the only one there is.
        api_key: Where the router asks for one; else the variable ``SAPWOOD_API_KEY``.
        template: Conversations are written as text by this template; None: by the server, with the model's own.
        patience: Seconds for which a request that found no server is asked again.

    Raises:
        ValueError: ``base_url`` is no URL of HTTP.
    """

    abilities = frozenset(
        {Ability.TEXT, Ability.ROLES, Ability.PREFILL, Ability.SELECT, Ability.UNCONDITIONAL, Ability.COMMIT,
         Ability.IMAGE, Ability.VIDEO, Ability.REASONING}
    )  # fmt: skip

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        template: Template | str | None = None,
        patience: float = 300.0,
    ) -> None:
        import aiohttp

        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url begins with http:// or https://, unlike {base_url!r}")
        super().__init__(template)
        self.name = f"Sapwood at {base_url}"
        self._url, self._model, self._patience = base_url.rstrip("/"), model, patience
        key = api_key or os.environ.get("SAPWOOD_API_KEY")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._aiohttp = aiohttp
        self._sessions: PerLoop[Any] = PerLoop()
        timeout = aiohttp.ClientTimeout(total=None)
        connector: Any = aiohttp.TCPConnector
        self._make = lambda: aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector(limit=0))

    async def generate(self, prompt: Prompt, options: GenOptions) -> Generated:
        if options.get("stop_regex"):
            return await self._generate_to_regex(prompt, options)
        if prompt.is_chat and not self.renders:
            answer = await self._post("/v1/chat/completions", self._chat(prompt, options))
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            return Generated(
                tuple(choice["message"]["content"] or "" for choice in choices),
                _usage(answer["usage"]),
                tuple(choice["message"].get("reasoning_content") or "" for choice in choices),
                tuple(_meta_of_choice(choice) for choice in choices),
            )
        found = await self._post("/generate", self._text(prompt, options))
        answers = found if isinstance(found, list) else [found]
        metas = [_meta(answer["meta_info"]) for answer in answers]
        usage = Usage(
            metas[0]["prompt_tokens"],
            metas[0].get("cached_tokens", 0),
            sum(meta["completion_tokens"] for meta in metas),
        )
        return Generated(tuple(answer["text"] for answer in answers), usage, meta=tuple(metas))

    async def stream(self, prompt: Prompt, options: GenOptions) -> AsyncGenerator[Piece]:
        if options.get("stop_regex"):  # a part of the text does not show what a pattern will match
            async for piece in super().stream(prompt, options):
                yield piece
            return
        if prompt.is_chat and not self.renders:
            asked = {**self._chat(prompt, options), "stream": True, "stream_options": {"include_usage": True}}
            found = StreamedLogprobs()
            async for chunk in self._events("/v1/chat/completions", asked):
                for choice in chunk["choices"]:
                    delta, meta = choice["delta"], found.with_those_before(_meta_of_choice(choice))
                    yield Piece(delta.get("content") or "", delta.get("reasoning_content") or "", None, meta)
                if chunk.get("usage"):
                    yield Piece("", usage=_usage(chunk["usage"]))
            return
        at, found = 0, StreamedLogprobs()
        async for event in self._events("/generate", {**self._text(prompt, options), "stream": True}):
            meta = found.with_those_before(_meta(event["meta_info"]))
            usage = Usage(meta["prompt_tokens"], meta.get("cached_tokens", 0), meta["completion_tokens"])
            yield Piece(event["text"][at:], usage=usage if meta["finish_reason"] else None, meta=meta)
            at = len(event["text"])

    async def _generate_to_regex(self, prompt: Prompt, options: GenOptions) -> Generated:
        """The answer is read as it comes; its request ends at the first match, and the answer before it."""
        patterns = compiled(options["stop_regex"])

        async def read(index: int) -> tuple[str, str, Usage, Mapping[str, Any]]:
            given: GenOptions = {**options, "n": 1}
            del given["stop_regex"]
            if "seed" in given:
                given["seed"] += index  # as the server does for the answers of one request
            text, reasoning, usage = "", "", Usage()
            meta: dict[str, Any] = {}
            async with aclosing(self.stream(prompt, given)) as pieces:
                async for piece in pieces:
                    text, reasoning = text + piece.text, reasoning + piece.reasoning
                    usage, meta = piece.usage or usage, {**meta, **piece.meta}
                    if (match := patterns.search(text)) is not None:
                        counts = (meta.get(name, 0) for name in ("prompt_tokens", "cached_tokens", "completion_tokens"))
                        meta |= {"finish_reason": "stop", "matched_stop": match[0]}
                        return text[: match.start()], reasoning, Usage(*counts), meta
            return text, reasoning, usage, meta

        async def patiently(index: int) -> tuple[str, str, Usage, Mapping[str, Any]]:
            return await self._patiently(lambda: read(index))

        found = await gather(*map(patiently, range(options.get("n", 1))))
        texts, reasonings, usages, metas = zip(*found, strict=True)
        done = sum(usage.completion_tokens for usage in usages)
        usage = Usage(usages[0].prompt_tokens, usages[0].cached_tokens, done, len(usages))
        return Generated(texts, usage, reasonings, metas)

    async def score(self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool) -> tuple[list[Scored], Usage]:
        """One request: prompt and choices are a tree to the server, which computes what they share once."""
        asked: dict[str, Any] = {"continuations": list(choices), "unconditional": unconditional}
        if not prompt.is_chat or self.renders:
            asked["prompt"] = prompt.text
        else:
            asked |= _conversation(prompt)
            asked.pop("add_generation_prompt", None)
        found = await self._post("/v1/score_tree", self._named(asked))
        scored = [
            Scored(choice, *(tuple(each[name] or ()) for name in ("token_ids", "logprobs", "unconditional_logprobs")))
            for choice, each in zip(choices, found["scores"], strict=True)
        ]
        usage = found["usage"]
        return scored, Usage(usage["cached_tokens"] + usage["computed_tokens"], usage["cached_tokens"])

    async def commit(self, prompt: Prompt) -> Usage:
        if prompt.shows:  # tokens alone would be without what is shown
            return (await self.generate(prompt, {"max_tokens": 1, "temperature": 0})).usage
        asked = self._named({"input_ids": await self._tokens(prompt), "sampling_params": {"max_new_tokens": 0}})
        meta = (await self._post("/generate", asked))["meta_info"]
        return Usage(meta["prompt_tokens"], meta["cached_tokens"])

    async def warm(self, prompt: Prompt) -> None:
        await self.commit(prompt)

    async def flush_cache(self) -> None:
        await self._post("/flush_cache", {})

    async def server_info(self) -> Mapping[str, Any]:
        async with self._sessions.get(self._make).get(f"{self._url}/server_info") as answer:
            return dict(await self._read(answer))

    async def close(self) -> None:
        session = self._sessions.pop()
        if session is not None:
            await session.close()

    async def _tokens(self, prompt: Prompt) -> list[int]:
        if not prompt.is_chat or self.renders:
            asked: dict[str, Any] = {"prompt": prompt.text}
        else:
            asked = _conversation(prompt)
        return list((await self._post("/tokenize", self._named(asked)))["tokens"])

    def _named(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        return {**asked, **({"model": self._model} if self._model is not None else {})}

    def _text(self, prompt: Prompt, options: GenOptions) -> dict[str, Any]:
        settings: dict[str, Any] = {
            _OF_GENERATE.get(name, name): value for name, value in options.items() if name not in _LOGPROBS
        }
        if self.renders and self.template.stop:
            stop = settings.get("stop", ())
            settings["stop"] = [*([stop] if isinstance(stop, str) else stop), *self.template.stop]
        if "json_schema" in settings:
            settings["json_schema"] = _as_json(schema_of(settings["json_schema"]))
        if "structural_tag" in settings:
            settings["structural_tag"] = _as_json(settings["structural_tag"])
        asked = {"text": prompt.text, "sampling_params": settings}
        return self._named({**asked, **{name: value for name, value in options.items() if name in _LOGPROBS}})

    def _chat(self, prompt: Prompt, options: GenOptions) -> dict[str, Any]:
        given: dict[str, Any] = {name: value for name, value in options.items() if name not in (*_LOGPROBS, *_GRAMMARS)}
        if "json_schema" in options:
            schema = schema_of(options["json_schema"])
            given["structured_outputs"] = {"json": json.loads(schema) if isinstance(schema, str) else schema}
        given |= {name: value for name, value in options.items() if name in ("regex", "ebnf")}
        if "structural_tag" in options:
            given["structural_tag"] = _as_json(options["structural_tag"])
        if options.get("return_logprob"):
            top = options.get("top_logprobs_num") or 0
            given |= {"logprobs": True, "top_logprobs": top, "return_token_ids": True}
        return self._named({**_conversation(prompt), **given})

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The answer's JSON; asked again while there is no server."""

        async def ask() -> Any:
            async with self._sessions.get(self._make).post(self._url + path, json=body) as answer:
                return await self._read(answer)

        return await self._patiently(ask)

    async def _patiently(self, ask: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Asks again while there is no server, or it ended with half an answer, of which nobody has anything yet."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._patience
        while True:
            try:
                return await ask()
            except (self._aiohttp.ClientConnectionError, self._aiohttp.ClientPayloadError, HttpError) as error:
                if (isinstance(error, HttpError) and error.status != 503) or loop.time() >= give_up:
                    raise
                await asyncio.sleep(_RETRY_SECONDS)

    async def _events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any]:
        async def begin() -> Any:
            answer = await self._sessions.get(self._make).post(self._url + path, json=body)
            if answer.status != 200:
                async with answer:
                    await self._read(answer)
            return answer

        async with await self._patiently(begin) as answer:
            async for line in answer.content:
                if line.startswith(b"data:") and b"[DONE]" not in line:
                    event = json.loads(line[5:])
                    if "error" in event:
                        raise HttpError(500, str(event["error"].get("message", event["error"])))
                    yield event

    async def _read(self, answer: Any) -> Any:
        text = await answer.text()
        try:
            found = json.loads(text)
        except ValueError:
            found = {"text": text}
        if answer.status != 200:
            raise HttpError(answer.status, str(found.get("error", {}).get("message", text) if found else text))
        return found


def runtime_endpoint(
    base_url: str, api_key: str | None = None, verify: str | None = None, chat_template_name: str | None = None
) -> SapwoodHttp:
    """``RuntimeEndpoint`` of SGLang's programs: conversations are text by a template, found by the model's name if none is named.

    Args:
        base_url, api_key: As for :class:`SapwoodHttp`.
        verify: Not served: certificates are checked against the system's.
        chat_template_name: A template's name.

    Raises:
        ValueError: ``verify`` is given, or there is no such template.
    """
    if verify is not None:
        raise ValueError("verify: certificates are checked against the system's")
    if chat_template_name is not None:
        return SapwoodHttp(base_url, api_key=api_key, template=get_template(chat_template_name))
    backend = SapwoodHttp(base_url, api_key=api_key, template="plain")
    backend.template = template_of(str(backend.loop.wait(backend.server_info()).get("model_path", "")))
    return backend


def _conversation(prompt: Prompt) -> dict[str, Any]:
    if not prompt.turn:
        return {"messages": list(prompt.messages)}
    turn = {"role": prompt.role, "content": prompt.turn}
    return {"messages": [*prompt.messages, turn], "continue_final_message": True, "add_generation_prompt": False}


def _meta(found: Mapping[str, Any]) -> dict[str, Any]:
    """What ``/generate`` knows of an answer, with the reason for its end as other backends say it."""
    reason = found.get("finish_reason")
    if not isinstance(reason, Mapping):
        return dict(found)
    matched = {} if reason.get("matched") is None else {"matched_stop": reason["matched"]}
    return {**found, "finish_reason": reason["type"], **matched}


def _meta_of_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    meta: dict[str, Any] = {"finish_reason": choice["finish_reason"]} if choice.get("finish_reason") else {}
    if choice.get("stop_reason") is not None:
        meta["matched_stop"] = choice["stop_reason"]
    tokens = (choice.get("logprobs") or {}).get("content") or []
    if tokens:
        ids = choice.get("token_ids") or ()
        ids = ids if len(ids) == len(tokens) else [None] * len(tokens)
        meta["output_token_logprobs"] = [
            [each["logprob"], token_id, each["token"]] for token_id, each in zip(ids, tokens, strict=True)
        ]
        meta["output_top_logprobs"] = [
            [[top["logprob"], None, top["token"]] for top in each["top_logprobs"]] for each in tokens
        ]
    return meta


def _as_json(given: Any) -> str:
    return given if isinstance(given, str) else json.dumps(given)


def _usage(usage: Mapping[str, Any]) -> Usage:
    details = usage.get("prompt_tokens_details") or {}
    return Usage(usage["prompt_tokens"], details.get("cached_tokens") or 0, usage["completion_tokens"])
