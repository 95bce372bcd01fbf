"""LiteLLM's library (``pip install litellm``): one call for many providers, such as Vertex AI with ``vertex_ai/...``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from sapwood.lang.backends.base import Ability, Backend, Generated, Piece, Prompt
from sapwood.lang.backends.openai import usage_of
from sapwood.lang.nodes import GenOptions


class LiteLLM(Backend):
    """A model by LiteLLM's name of it.

    Args:
        model: Such as ``vertex_ai/gemini-2.5-pro``, ``bedrock/...``, ``openai/...``.
        settings: Arguments of each ``litellm.acompletion``: ``api_base``, ``api_key``, ``vertex_project`` and others.
    """

    abilities = frozenset({Ability.ROLES, Ability.IMAGE})
    options = frozenset(
        {"max_tokens", "n", "stop", "temperature", "top_p", "frequency_penalty", "presence_penalty", "seed"}
    )

    def __init__(self, model: str, **settings: Any) -> None:
        import litellm

        super().__init__()
        self.name = f"LiteLLM with {model}"
        self._ask = litellm.acompletion
        self._given = {"model": model, **settings}

    async def generate(self, prompt: Prompt, options: GenOptions) -> Generated:
        answer = await self._ask(messages=self._messages(prompt), **self._given, **options)
        choices = sorted(answer.choices, key=lambda choice: choice.index)
        return Generated(
            tuple(choice.message.content or "" for choice in choices),
            usage_of(getattr(answer, "usage", None)),
            tuple(getattr(choice.message, "reasoning_content", None) or "" for choice in choices),
            tuple({"finish_reason": choice.finish_reason} for choice in choices),
        )

    async def stream(self, prompt: Prompt, options: GenOptions) -> AsyncIterator[Piece]:
        more = {"stream": True, "stream_options": {"include_usage": True}}
        async for chunk in await self._ask(messages=self._messages(prompt), **self._given, **options, **more):
            for choice in chunk.choices:
                yield Piece(choice.delta.content or "", getattr(choice.delta, "reasoning_content", None) or "")
            if getattr(chunk, "usage", None) is not None:
                yield Piece("", usage=usage_of(chunk.usage))

    def _messages(self, prompt: Prompt) -> list[dict[str, Any]]:
        return [{"role": turn["role"], "content": turn["content"]} for turn in prompt.messages]
