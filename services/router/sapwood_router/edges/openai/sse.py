"""Server-sent events of OpenAI's API. All that stays the same over a stream is encoded once; a delta costs one join."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import msgspec

from sapwood_router.edges.openai.annotate import Annotator
from sapwood_router.edges.openai.answer import finish_reason, usage_object
from sapwood_router.edges.openai.parameters import StreamWish
from sapwood_router.edges.openai.types import UsageObject, stop_reason
from sapwood_router.edges.sending import with_resumptions
from sapwood_router.request.context import Delta, Finish, RequestContext, Usage
from sapwood_router.request.output import Output, ToolCallDelta

DONE = b"data: [DONE]\n\n"

NULL = b"null"
_NO_USAGE = b',"usage":null}\n\n'

_encode = msgspec.json.encode


class CompletionChunks:
    """The events of a streamed completion.

    Args:
        answer_id: ``id`` of all chunks.
        contexts: The request of each choice.
        wish: Whether a last chunk carries the usage (then the others say ``"usage":null``), or every chunk.
        annotator: Has read each delta that it is to annotate.
        continuations: How many of the requests have one prompt.
    """

    _OBJECT = "text_completion"
    _BEFORE_TEXT = b',"text":'
    _AFTER_TEXT = b',"logprobs":'

    def __init__(
        self,
        answer_id: str,
        contexts: Sequence[RequestContext],
        wish: StreamWish,
        annotator: Annotator,
        continuations: int,
    ) -> None:
        self._fixed = {"id": answer_id, "object": self._OBJECT, "created": int(time.time())}
        self._contexts = contexts
        self._annotator = annotator
        self._continuations = continuations
        self._include_usage = wish in (StreamWish.WITH_USAGE, StreamWish.WITH_USAGE_SO_FAR)
        self._usage_in_all = wish is StreamWish.WITH_USAGE_SO_FAR
        self._opened: set[int] = set()
        self._called: set[int] = set()
        """Choices that have a tool call."""
        self._usages = [Usage(0, 0, 0)] * len(contexts)
        self._finished = 0
        self._sent = [0] * len(contexts)
        """Tokens sent of each choice; counted only where every chunk tells the usage so far."""

    def begin(self) -> bytes:
        fixed = _encode({**self._fixed, "model": self._contexts[0].public_model})
        self._head = b"data: " + fixed[:-1] + b',"choices":['
        self._tail = b"}]" + (_NO_USAGE if self._include_usage else b"}\n\n")
        self._usual_head = self._head + b'{"index":0' + self._BEFORE_TEXT
        self._usual_tail = self._AFTER_TEXT + b'null,"finish_reason":null' + self._tail
        return b""

    def more(self, delta: Delta) -> bytes:
        index, annotator = delta.index, self._annotator
        if annotator.note is None and delta.finish is None and index in self._opened and not self._usage_in_all:
            if delta.output.tool_calls:
                self._called.add(index)
            return self._output(index, delta, NULL)
        events, logprobs = b"", NULL
        if annotator.note is not None:
            logprobs, annotator.note = annotator.note, None
        if index not in self._opened:
            self._opened.add(index)
            events = self._opening(index, annotator.prompt_note or b"")
        if delta.output.tool_calls:
            self._called.add(index)
        if delta.finish is None:
            events += self._output(index, delta, logprobs)
        else:
            events += self._last(index, delta, finish_reason(delta.finish, index in self._called), logprobs)
            self._usages[index] = delta.finish.usage
            self._finished += 1
            if self._finished == len(self._contexts):
                events = with_resumptions(events, sum(context.resumptions for context in self._contexts))
        if self._usage_in_all:
            self._sent[index] += len(delta.token_ids)
            # JSON escapes quotes in texts, so no text is taken for the end of an event.
            return events.replace(_NO_USAGE, b',"usage":' + _encode(self._usage_so_far()) + b"}\n\n")
        return events

    def end(self, finish: Finish, resumptions: int) -> Iterable[bytes]:
        if not self._include_usage:
            return (DONE,)
        usage = _encode(usage_object(self._usages, self._continuations))
        return (self._head + b'],"usage":' + usage + b"}\n\n" + DONE,)

    def _usage_so_far(self) -> UsageObject:
        usages = [
            Usage(len(context.token_ids), tokens, context.cached_tokens)
            for context, tokens in zip(self._contexts, self._sent, strict=True)
        ]
        return usage_object(usages, self._continuations)

    def _opening(self, index: int, prompt_logprobs: bytes) -> bytes:
        """The chunk before a choice's first text: it has the ``prompt_logprobs`` in JSON, if they are wanted."""
        if not prompt_logprobs:
            return b""
        written = self._written(index, Delta(Output(), []))
        return self._chunk(index, b'%b,"prompt_logprobs":%b' % (written, prompt_logprobs), NULL, NULL)

    def _output(self, index: int, delta: Delta, logprobs: bytes) -> bytes:
        """New output of a choice, with its ``logprobs`` in JSON; nothing if it is empty."""
        if not delta.output.text and logprobs is NULL:
            return b""
        return self._chunk(index, self._written(index, delta), NULL, logprobs)

    def _last(self, index: int, delta: Delta, reason: str, logprobs: bytes) -> bytes:
        """The last output of a choice and why it ended."""
        return self._chunk(index, self._written(index, delta), _ending(delta, reason), logprobs)

    def _written(self, index: int, delta: Delta) -> bytes:
        """A delta's text in JSON; subclasses add the fields that follow it."""
        return _encode(delta.output.text)

    def _chunk(self, index: int, text: bytes, reason: bytes, logprobs: bytes) -> bytes:
        if index == 0 and reason is NULL and logprobs is NULL:
            return b"".join((self._usual_head, text, self._usual_tail))
        return b"".join(
            (
                self._head,
                b'{"index":',
                str(index).encode(),
                self._BEFORE_TEXT,
                text,
                self._AFTER_TEXT,
                logprobs,
                b',"finish_reason":',
                reason,
                self._tail,
            )
        )


def _ending(delta: Delta, reason: str) -> bytes:
    """Why a choice ended, and the field that follows: at what."""
    stop = None if delta.finish is None else stop_reason(delta.finish)
    return b'%b,"stop_reason":%b' % (_encode(reason), _encode(stop))


class TokenChunks(CompletionChunks):
    """The events of a streamed completion with its tokens.

    Args:
        answer_id, contexts, wish, annotator, continuations: As for CompletionChunks.
        shows_prompt: Whether each choice's first chunk has its prompt's tokens, too.
    """

    def __init__(
        self,
        answer_id: str,
        contexts: Sequence[RequestContext],
        wish: StreamWish,
        annotator: Annotator,
        continuations: int,
        *,
        shows_prompt: bool,
    ) -> None:
        super().__init__(answer_id, contexts, wish, annotator, continuations)
        self._untold = set(range(len(contexts))) if shows_prompt else set[int]()
        """Choices whose prompt is to be sent."""

    def _output(self, index: int, delta: Delta, logprobs: bytes) -> bytes:
        """The chunk of a delta; tokens that come without text have one too."""
        if delta.token_ids and not (
            delta.output.text or logprobs is not NULL or index or self._untold
        ):  # the usual case
            return b'%b"","token_ids":%b%b' % (self._usual_head, _encode(delta.token_ids), self._usual_tail)
        if not (delta.token_ids or delta.output.text or logprobs is not NULL):
            return b""
        return self._chunk(index, self._written(index, delta), NULL, logprobs)

    def _written(self, index: int, delta: Delta) -> bytes:
        made = b'%b,"token_ids":%b' % (_encode(delta.output.text), _encode(delta.token_ids))
        if index in self._untold:
            self._untold.discard(index)
            made += b',"prompt_token_ids":' + _encode(list(self._contexts[index].token_ids))
        return made


class ChatChunks(CompletionChunks):
    """The events of a streamed chat completion.

    Args:
        answer_id, contexts, wish, annotator: As for CompletionChunks.
        hides_reasoning: Whether reasoning is left out.
    """

    _OBJECT = "chat.completion.chunk"
    _BEFORE_TEXT = b',"delta":{"content":'
    _AFTER_TEXT = b'},"logprobs":'

    def __init__(
        self,
        answer_id: str,
        contexts: Sequence[RequestContext],
        wish: StreamWish,
        annotator: Annotator,
        *,
        hides_reasoning: bool,
    ) -> None:
        super().__init__(answer_id, contexts, wish, annotator, len(contexts))
        self._hides_reasoning = hides_reasoning

    def _opening(self, index: int, prompt_logprobs: bytes) -> bytes:
        """A choice's first chunk has the role; the very first also has the data about the prompt."""
        events = self._delta(index, b'{"role":"assistant","content":""}', NULL)
        if len(self._opened) > 1:
            return events
        member = b',"prompt_logprobs":' + prompt_logprobs if prompt_logprobs else b""
        return events.replace(b',"choices":[', member + self._prompt_ids() + b',"choices":[', 1)

    def _prompt_ids(self) -> bytes:
        return b""

    def _output(self, index: int, delta: Delta, logprobs: bytes) -> bytes:
        """A chunk for each kind of what is new: reasoning, text, then calls; the first has the ``logprobs``."""
        output = delta.output
        if self._hides_reasoning:
            output.reasoning = ""
        if not output.reasoning and not output.tool_calls:
            return super()._output(index, delta, logprobs)
        events = b""
        if output.reasoning:
            said = _encode(output.reasoning)
            events = self._delta(index, b'{"reasoning_content":%b,"reasoning":%b}' % (said, said), NULL, logprobs)
            logprobs = NULL
        events += super()._output(index, delta, logprobs)
        for call in output.tool_calls:
            events += self._call(index, call)
        return events

    def _last(self, index: int, delta: Delta, reason: str, logprobs: bytes) -> bytes:
        """The last output, then a chunk with an empty delta and the reason, as OpenAI sends them."""
        return self._output(index, delta, logprobs) + self._delta(index, b"{}", _ending(delta, reason))

    def _call(self, index: int, call: ToolCallDelta) -> bytes:
        """One call a chunk; its id and name come alone, as OpenAI sends them."""
        events = b""
        if call.name:
            function = {"name": call.name, "arguments": ""}
            events = self._part_of_call(
                index, {"index": call.index, "id": call.id, "type": "function", "function": function}
            )
        if call.arguments:
            events += self._part_of_call(index, {"index": call.index, "function": {"arguments": call.arguments}})
        return events

    def _part_of_call(self, index: int, part: dict[str, object]) -> bytes:
        return self._delta(index, _encode({"tool_calls": [part]}), NULL)

    def _delta(self, index: int, delta: bytes, reason: bytes, logprobs: bytes = NULL) -> bytes:
        return b"".join(
            (
                self._head,
                b'{"index":',
                str(index).encode(),
                b',"delta":',
                delta,
                b',"logprobs":',
                logprobs,
                b',"finish_reason":',
                reason,
                self._tail,
            )
        )


class ChatTokenChunks(ChatChunks):
    """The events of a streamed chat completion with its tokens, and with the prompt's in the first chunk."""

    def _prompt_ids(self) -> bytes:
        return b',"prompt_token_ids":' + _encode(list(self._contexts[0].token_ids))

    def _output(self, index: int, delta: Delta, logprobs: bytes) -> bytes:
        """The first of what is new has the tokens; there may be tokens alone."""
        events = super()._output(index, delta, logprobs)
        if not delta.token_ids:
            return events
        # No text can look like the name of a field.
        tokens = b',"token_ids":%b,"finish_reason":' % _encode(delta.token_ids)
        return (events or self._delta(index, b"{}", NULL)).replace(b',"finish_reason":', tokens, 1)
