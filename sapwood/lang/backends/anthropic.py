"""Anthropic's API, or a server that speaks it, through Anthropic's library (``pip install anthropic``)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from sapwood.lang.backends.base import Ability, Backend, Generated, PerLoop, Piece, Prompt, Usage
from sapwood.lang.nodes import GenOptions


class Anthropic(Backend):
    """A model behind Anthropic's messages.

    An assistant's turn that the program begins is the last message, which the answer continues.

    Args:
        model: Its name.
        prefill: Whether the model takes such a turn; some newer ones do not.
        settings: Arguments of ``anthropic.AsyncAnthropic``: ``api_key``, ``base_url`` and others.
    """

    options = frozenset({"max_tokens", "stop", "temperature", "top_p", "top_k"})

    def __init__(self, model: str, *, prefill: bool = True, **settings: Any) -> None:
        from anthropic import AsyncAnthropic

        super().__init__()
        self.name = f"Anthropic's API with {model}"
        self._model = model
        able = {Ability.ROLES, Ability.IMAGE, Ability.REASONING}
        self.abilities = frozenset(able | {Ability.PREFILL}) if prefill else frozenset(able)
        self._clients: PerLoop[Any] = PerLoop()
        self._make = lambda: AsyncAnthropic(**settings)

    async def generate(self, prompt: Prompt, options: GenOptions) -> Generated:
        answer = await self._clients.get(self._make).messages.create(**self._given(prompt, options))
        text = "".join(block.text for block in answer.content if block.type == "text")
        reasoning = "".join(block.thinking for block in answer.content if block.type == "thinking")
        return Generated((text,), _usage(answer.usage), (reasoning,), ({"finish_reason": answer.stop_reason},))

    async def stream(self, prompt: Prompt, options: GenOptions) -> AsyncIterator[Piece]:
        async with self._clients.get(self._make).messages.stream(**self._given(prompt, options)) as stream:
            async for text in stream.text_stream:
                yield Piece(text)
            last = await stream.get_final_message()
        yield Piece("", usage=_usage(last.usage), meta={"finish_reason": last.stop_reason})

    async def close(self) -> None:
        client = self._clients.pop()
        if client is not None:
            await client.close()

    def _given(self, prompt: Prompt, options: GenOptions) -> dict[str, Any]:
        stop = options.get("stop", ())
        # Newer versions of the library leave these to the body: newer models do not take them.
        extra = {name: value for name, value in options.items() if name in ("temperature", "top_p", "top_k")}
        if options.get("top_k", 1) <= 0:
            del extra["top_k"]
        given: dict[str, Any] = {"max_tokens": options["max_tokens"]}
        if extra:
            given["extra_body"] = extra
        if stop:
            given["stop_sequences"] = [stop] if isinstance(stop, str) else list(stop)
        turns = [*prompt.messages]
        if prompt.turn:
            turns.append({"role": prompt.role, "content": prompt.turn})
        system = [turn["content"] for turn in turns if turn["role"] == "system"]
        if system:
            given["system"] = "\n".join(map(str, system))
        messages = [
            {"role": turn["role"], "content": _content(turn["content"])} for turn in turns if turn["role"] != "system"
        ]
        return {"model": self._model, "messages": messages, **given}


def _content(content: Any) -> Any:
    """A turn's content in Anthropic's form."""
    if isinstance(content, str):
        return content
    parts: Sequence[Mapping[str, Any]] = content
    return [_image(part["image_url"]["url"]) if part["type"] == "image_url" else part for part in parts]


def _image(url: str) -> dict[str, Any]:
    if not url.startswith("data:"):
        return {"type": "image", "source": {"type": "url", "url": url}}
    kind, _, data = url.removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def _usage(usage: Any) -> Usage:
    cached = getattr(usage, "cache_read_input_tokens", None) or 0
    return Usage((usage.input_tokens or 0) + cached, cached, usage.output_tokens or 0)
