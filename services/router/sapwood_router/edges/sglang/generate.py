"""``POST /generate``: the text so far, and what is known of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from sapwood_common.errors import InvalidArgumentError
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.json_body import convert, decode_object
from sapwood_router.edges.sending import Running, collect, send_events, told_headers, with_resumptions
from sapwood_router.edges.sglang.logprobs import LogprobsWish, StreamedLogprobs, Told, tell, wish_of
from sapwood_router.edges.sglang.request import IGNORED, NEUTRAL, GenerateRequest, contexts_of, is_prompt_only
from sapwood_router.flow.generation import Pipeline
from sapwood_router.request.context import Delta, Finish, FinishReason, RequestContext
from sapwood_router.request.output import Output

_DONE = b"data: [DONE]\n\n"


class MetaInfo(Told, kw_only=True):
    """The metadata of an answer; ``finish_reason`` is null while it is generated. ``weight_version`` is that of the last token;
    where several weights have computed it, ``weight_versions`` has each with its first token's place."""

    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float
    weight_version: str | msgspec.UnsetType = msgspec.UNSET
    weight_versions: list[tuple[int, str]] | msgspec.UnsetType = msgspec.UNSET


class Generated(msgspec.Struct):
    """An answer, or all of it so far."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo


async def generate(exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
    """Answers a request.

    Raises:
        SapwoodError: It is wrong, or it failed.
    """
    given = decode_object(body)
    request = convert(given, GenerateRequest, NEUTRAL, IGNORED, left_out=exchange.left_out)
    exchange.accept_body_id(request)
    deadline = deadline if request.stream else exchange.sooner(deadline)
    wish = wish_of(request)
    contexts, is_list = await contexts_of(request, wish, exchange, deadline, pipeline)
    prompt_only = is_prompt_only(request.sampling_params)
    caller = exchange.caller(request, given)
    for context in contexts:
        context.caller = caller
    if not request.stream:
        await _send_whole(exchange, contexts, pipeline, wish, is_list=is_list, prompt_only=prompt_only)
        return
    if prompt_only:
        raise InvalidArgumentError("a stream has at least one token", field="sampling_params.max_new_tokens")
    if wish is not None and wish.start >= 0:
        raise InvalidArgumentError("a stream tells of the answer's tokens only", field="logprob_start_len")
    if len(contexts) > 1:
        raise InvalidArgumentError("a stream is of one prompt and one answer", field="stream")
    logprobs = None
    if wish is not None:
        client = pipeline.tokenizers.of(pipeline.registry.resolve(request.model)).client
        logprobs = StreamedLogprobs(contexts[0], wish, client, pipeline.heavy.stint(exchange.tenant))
    await send_events(exchange, contexts, pipeline, _TextSoFar(contexts[0], logprobs), logprobs)


async def _send_whole(
    exchange: Exchange,
    contexts: Sequence[RequestContext],
    pipeline: Pipeline,
    wish: LogprobsWish | None,
    *,
    is_list: bool,
    prompt_only: bool,
) -> None:
    async with Running(exchange, pipeline, contexts) as runs:
        answers: list[Generated] = []
        stint = pipeline.heavy.stint(exchange.tenant)
        for context, whole in zip(contexts, await collect(runs), strict=True):
            assert whole.finish is not None, "a run ends with a finish or an error"
            if prompt_only:
                none = replace(whole.finish.usage, completion_tokens=0)
                whole = Delta(Output(), [], Finish(FinishReason.LENGTH, none))
            answer = _generated(context, whole.output.text, whole.token_ids, whole.finish)
            if wish is not None:
                client = pipeline.tokenizers.of(context.model).client
                await tell(answer.meta_info, context, whole.token_ids, wish, client, stint)
            answers.append(answer)
        body = msgspec.json.encode(answers if is_list else answers[0])
        await exchange.send_body(200, body, told_headers(exchange.workers, contexts))


class _TextSoFar:
    """Implements :class:`Events`: each event has the whole text so far, as SGLang sends it."""

    def __init__(self, context: RequestContext, logprobs: StreamedLogprobs | None) -> None:
        self._context = context
        self._logprobs = logprobs
        self._text = ""
        self._ids: list[int] = []

    def begin(self) -> bytes:
        return b""

    def more(self, delta: Delta) -> bytes:
        self._text += delta.output.text
        self._ids += delta.token_ids
        if delta.finish is not None or not delta.token_ids:  # the last event comes with the finish
            return b""
        return self._event(None)

    def end(self, finish: Finish, resumptions: int) -> Iterable[bytes]:
        return (with_resumptions(self._event(finish), resumptions) + _DONE,)

    def _event(self, finish: Finish | None) -> bytes:
        answer = _generated(self._context, self._text, self._ids, finish)
        if self._logprobs is not None:
            self._logprobs.tell(answer.meta_info)
        return b"data: %b\n\n" % msgspec.json.encode(answer)


def _generated(context: RequestContext, text: str, token_ids: list[int], finish: Finish | None) -> Generated:
    return Generated(
        text,
        token_ids,
        MetaInfo(
            id=context.request_id,
            finish_reason=None if finish is None else _reason(finish, token_ids),
            prompt_tokens=len(context.token_ids),
            completion_tokens=len(token_ids) if finish is None else finish.usage.completion_tokens,
            cached_tokens=context.cached_tokens,
            e2e_latency=time.perf_counter() - context.started,
            weight_version=context.weight_versions[-1][1] if context.weight_versions else msgspec.UNSET,
            weight_versions=context.weight_versions if len(context.weight_versions) > 1 else msgspec.UNSET,
        ),
    )


def _reason(finish: Finish, token_ids: list[int]) -> dict[str, Any]:
    """Why it ended; where it did so by itself, with the stop string or the token that it ended at."""
    if finish.reason is FinishReason.LENGTH:
        return {"type": "length", "length": finish.usage.completion_tokens}
    if finish.reason is FinishReason.ABORT:
        return {"type": "abort", "message": "the request was aborted"}
    matched = finish.stop_match if finish.stop_match is not None else next(reversed(token_ids), None)
    return {"type": "stop", "matched": matched}
