"""Any server with OpenAI's API, through OpenAI's library (``pip install openai``)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from sapwood.lang.backends.base import Ability, Backend, Generated, PerLoop, Piece, Prompt, StreamedLogprobs, Usage
from sapwood.lang.backends.sapwood import schema_of
from sapwood.lang.nodes import GenOptions
from sapwood.lang.templates import Template

_PLAIN = frozenset(
    {"max_tokens", "n", "stop", "temperature", "top_p", "frequency_penalty", "presence_penalty", "seed", "logit_bias"}
)
_LOGPROBS = frozenset({"return_logprob", "top_logprobs_num"})
_EXTRAS = frozenset(
    {"min_tokens", "top_k", "min_p", "repetition_penalty", "ignore_eos", "stop_token_ids", "regex", "ebnf"}
)


class OpenAI(Backend):
    """A model behind OpenAI's API.

    Args:
        model: Its name.
        base_url, api_key: As for OpenAI's library, which also reads ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``.
        completions: Whether the server completes texts, too. Without it a program is a conversation.
        extras: Whether it takes what vLLM, SGLang and Sapwood take beyond OpenAI's: ``top_k``, ``min_p``, ``regex``, ``ebnf``, an
            assistant's turn that the program begins, videos.
        template: Conversations are written as text by this template; for servers that complete texts.
        settings: Further arguments of ``openai.AsyncOpenAI``.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        completions: bool = False,
        extras: bool = False,
        template: Template | str | None = None,
        **settings: Any,
    ) -> None:
        from openai import AsyncOpenAI

        super().__init__(template)
        self.name = f"OpenAI's API with {model}"
        self._model, self._extras = model, extras
        able = {Ability.ROLES, Ability.IMAGE}
        if completions:
            able.add(Ability.TEXT)
        if extras:
            able |= {Ability.PREFILL, Ability.REASONING, Ability.VIDEO}
        self.abilities = frozenset(able)
        self.options = _PLAIN | _LOGPROBS | {"json_schema"} | (_EXTRAS if extras else frozenset())
        self._clients: PerLoop[Any] = PerLoop()
        self._make = lambda: AsyncOpenAI(base_url=base_url, api_key=api_key, **settings)

    async def generate(self, prompt: Prompt, options: GenOptions) -> Generated:
        answer = await self._ask(prompt, options)
        choices = sorted(answer.choices, key=lambda choice: choice.index)
        messages = [getattr(choice, "message", None) for choice in choices]
        texts = [
            choice.text if message is None else message.content or ""
            for choice, message in zip(choices, messages, strict=True)
        ]
        reasoning = [getattr(message, "reasoning_content", None) or "" for message in messages]
        return Generated(
            tuple(texts), usage_of(answer.usage), tuple(reasoning), tuple(_meta(choice) for choice in choices)
        )

    async def stream(self, prompt: Prompt, options: GenOptions) -> AsyncIterator[Piece]:
        found = StreamedLogprobs()
        async for chunk in await self._ask(prompt, options, stream=True, stream_options={"include_usage": True}):
            usage = usage_of(chunk.usage) if chunk.usage is not None else None
            for choice in chunk.choices:
                delta = getattr(choice, "delta", None)
                text = choice.text if delta is None else delta.content or ""
                reasoning = getattr(delta, "reasoning_content", None) or ""
                meta = {name: value for name, value in _meta(choice).items() if value is not None}
                yield Piece(text, reasoning, None, found.with_those_before(meta))
            if usage is not None:
                yield Piece("", usage=usage)

    async def close(self) -> None:
        client = self._clients.pop()
        if client is not None:
            await client.close()

    async def _ask(self, prompt: Prompt, options: GenOptions, **more: Any) -> Any:
        client = self._clients.get(self._make)
        given = {name: value for name, value in options.items() if name in _PLAIN}
        extra = {name: value for name, value in options.items() if name in _EXTRAS}
        if options.get("top_k", 1) <= 0:
            del extra["top_k"]
        if "json_schema" in options:
            schema = schema_of(options["json_schema"])
            schema = json.loads(schema) if isinstance(schema, str) else schema
            given["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        text = not prompt.is_chat or self.renders
        if text and self.renders and self.template.stop:
            stop: Any = given.get("stop", ())
            given["stop"] = [*([stop] if isinstance(stop, str) else stop), *self.template.stop]
        if options.get("return_logprob"):
            top = options.get("top_logprobs_num") or 0
            given |= {"logprobs": top} if text else {"logprobs": True, "top_logprobs": top}
        if text:
            if "response_format" in given:
                extra["response_format"] = given.pop("response_format")
            return await client.completions.create(
                model=self._model, prompt=prompt.text, extra_body=extra or None, **given, **more
            )
        messages = [*prompt.messages]
        if prompt.turn:
            messages.append({"role": prompt.role, "content": prompt.turn})
            extra |= {"continue_final_message": True, "add_generation_prompt": False}
        return await client.chat.completions.create(
            model=self._model, messages=messages, extra_body=extra or None, **given, **more
        )


def usage_of(usage: Any) -> Usage:
    """Usage as OpenAI's API says it."""
    if usage is None:
        return Usage()
    details = getattr(usage, "prompt_tokens_details", None)
    cached = getattr(details, "cached_tokens", None) or 0
    return Usage(usage.prompt_tokens or 0, cached, usage.completion_tokens or 0)


def _meta(choice: Any) -> dict[str, Any]:
    meta: dict[str, Any] = {"finish_reason": choice.finish_reason}
    found: Any = getattr(choice, "logprobs", None)
    if getattr(found, "content", None):
        meta["output_token_logprobs"] = [[token.logprob, None, token.token] for token in found.content]
        meta["output_top_logprobs"] = [
            [[each.logprob, None, each.token] for each in token.top_logprobs] for token in found.content
        ]
    elif getattr(found, "token_logprobs", None):
        pairs = zip(found.token_logprobs, found.tokens, strict=True)
        meta["output_token_logprobs"] = [[logprob, None, token] for logprob, token in pairs]
        meta["output_top_logprobs"] = [
            [[logprob, None, token] for token, logprob in (each or {}).items()] for each in found.top_logprobs or ()
        ]
    return meta
