"""The line that the router logs when a request ends: as much of it as it was told to show."""

from __future__ import annotations

import logging
import time
from typing import Any, Literal

import grpc
import msgspec

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.status import row_of
from sapwood_common.telemetry.shown_text import LongText
from sapwood_router.request.context import RequestContext, TextPrompt, TokenPrompt
from sapwood_router.request.output import Output

logger = logging.getLogger(__name__)

Detail = Literal["off", "line", "parameters", "content"]
_LONGEST = 2048
"""Characters that are shown of a prompt and of an answer."""


class RequestLog:
    """Writes the lines.

    Args:
        detail: ``off``: none. ``line``: ids, counts, times and how it ended. ``parameters``: also how tokens are chosen and
            what else was asked, but nothing that anybody said. ``content``: also the prompt and the answer.
    """

    def __init__(self, detail: Detail = "line") -> None:
        self._detail = detail

    def open(self, context: RequestContext) -> OpenLine:
        """A request came."""
        return OpenLine(self._detail, context)


class OpenLine:
    """The line of one request."""

    __slots__ = ("_context", "_detail", "_said")

    def __init__(self, detail: Detail, context: RequestContext) -> None:
        self._detail = detail
        self._context = context
        self._said: list[Output] | None = [] if detail == "content" else None

    def said(self, output: Output) -> None:
        """Something of the answer."""
        if self._said is not None and len(self._said) < _LONGEST:
            self._said.append(output)

    def end(self) -> None:
        """The request has ended; writes the line."""
        if self._detail == "off" or not logger.isEnabledFor(logging.INFO):
            return
        context = self._context
        now = time.perf_counter()
        generated, asked = context.token_counts
        if context.error is not None:
            status = row_of(context.error).grpc
        else:
            status = grpc.StatusCode.CANCELLED if context.usage is None else grpc.StatusCode.OK
        ttft = "-" if context.first_token is None else f"{(context.first_token - context.started) * 1000:.1f}ms"
        logger.info(
            "request=%s model=%s worker=%s reason=%s prompt=%d cached=%d completion=%d status=%s duration=%.1fms ttft=%s%s%s%s",
            context.request_id,
            context.model or "-",
            context.worker,
            context.reason,
            asked,
            context.cached_tokens,
            generated,
            status.name,
            (now - context.started) * 1000,
            ttft,
            f" resumptions={context.resumptions}" if context.resumptions else "",
            "" if context.error is None else f" error={context.error.message!r}",
            LongText(self._details()),
        )

    def _details(self) -> str:
        if self._detail not in ("parameters", "content"):
            return ""
        shown = f" parameters={_json(_parameters(self._context))}"
        if self._said is None:
            return shown
        answer = {
            "reasoning": "".join(output.reasoning for output in self._said),
            "text": "".join(output.text for output in self._said),
            "tool_calls": "".join(
                f"{call.name}{call.arguments}" for output in self._said for call in output.tool_calls
            ),
        }
        told = {name: text[:_LONGEST] for name, text in answer.items() if text}
        if not self._context.detokenize:
            told["token_ids"] = str(self._context.output_ids.tolist())[:_LONGEST]
        return f"{shown} prompt_content={_json(_prompt(self._context))} answer={_json(told)}"


def _parameters(context: RequestContext) -> dict[str, Any]:
    """What was asked that is not said to the model, defaults left out."""
    sampling: dict[str, Any] = msgspec.to_builtins(context.sampling, str_keys=True)
    if context.sampling.max_tokens == SamplingParams().max_tokens:
        sampling.pop("max_tokens", None)
    asked: dict[str, Any] = {
        "sampling": sampling,
        "stop": len(context.output.stop),
        "grammar": "" if context.grammar is None else context.grammar.kind,
        "tool_required": context.tool_choice.required,
        "whole": context.whole,
        "token_ids_only": not context.detokenize,
        "tenant": context.caller.tenant,
        "priority": context.caller.priority,
    }
    return {name: value for name, value in asked.items() if value}


def _prompt(context: RequestContext) -> str:
    prompt = context.prompt
    if isinstance(prompt, TextPrompt):
        return prompt.text[:_LONGEST]
    given = prompt.token_ids if isinstance(prompt, TokenPrompt) else prompt.turns
    return _json(msgspec.to_builtins(given))[:_LONGEST]


def _json(value: Any) -> str:
    """The text on one line, whatever it holds."""
    return msgspec.json.encode(value).decode()
