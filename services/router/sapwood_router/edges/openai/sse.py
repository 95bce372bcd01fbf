"""Server-sent events of OpenAI's API. All that stays the same over a stream is encoded once; a delta costs one join."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sapwood_router.edges.openai.parameters import StreamWish
from sapwood_router.edges.openai.types import UsageObject, stop_reason
from sapwood_router.request.context import Delta
from sapwood_router.request.output import Output, ToolCallDelta

DONE = b"data: [DONE]\n\n"

NULL = b"null"
_NO_USAGE = b',"usage":null}\n\n'

_encode = msgspec.json.encode


class CompletionChunks:
    """The events of a streamed completion.

    Args:
        answer_id: ``id`` of all chunks.
        created: Unix time in seconds.
        model: The model's name.
        wish: Whether a last chunk carries the usage (then the others say ``"usage":null``), or every chunk.
    """

    _OBJECT = "text_completion"
    _BEFORE_TEXT = b',"text":'
    _AFTER_TEXT = b',"logprobs":'

    def __init__(self, answer_id: str, created: int, model: str, wish: StreamWish) -> None:
        fixed = _encode({"id": answer_id, "object": self._OBJECT, "created": created, "model": model})
        self._head = b"data: " + fixed[:-1] + b',"choices":['
        self._include_usage = wish in (StreamWish.WITH_USAGE, StreamWish.WITH_USAGE_SO_FAR)
        self.tells_usage_so_far = wish is StreamWish.WITH_USAGE_SO_FAR
        self._tail = b"}]" + (_NO_USAGE if self._include_usage else b"}\n\n")
        self._usual_head = self._head + b'{"index":0' + self._BEFORE_TEXT
        self._usual_tail = self._AFTER_TEXT + b'null,"finish_reason":null' + self._tail

    def opening(self, index: int, prompt_logprobs: bytes = b"") -> bytes:
        """What precedes a choice's first text: a chunk with the ``prompt_logprobs`` in JSON, if they are told."""
        if not prompt_logprobs:
            return b""
        written = self._written(index, Delta(Output(), []))
        return self._chunk(index, b'%b,"prompt_logprobs":%b' % (written, prompt_logprobs), NULL, NULL)

    def output(self, index: int, delta: Delta, logprobs: bytes = NULL) -> bytes:
        """New output of a choice, with its ``logprobs`` in JSON; nothing if it is empty."""
        if not delta.output.text and logprobs is NULL:
            return b""
        return self._chunk(index, self._written(index, delta), NULL, logprobs)

    def around_token(self) -> tuple[bytes, bytes] | None:
        """What stands before and after a new token of the only choice, where there is no text; None: tokens are not told."""
        return None

    def finish(self, index: int, delta: Delta, reason: str, logprobs: bytes = NULL) -> bytes:
        """The last output of a choice and why it ended."""
        return self._chunk(index, self._written(index, delta), _ending(delta, reason), logprobs)

    def closing(self, usage: UsageObject) -> bytes:
        """The end of the stream, with the usage if it was asked for."""
        if not self._include_usage:
            return DONE
        return self._head + b'],"usage":' + _encode(usage) + b"}\n\n" + DONE

    @staticmethod
    def with_usage(events: bytes, usage: UsageObject) -> bytes:
        """The chunks with the usage so far in each. JSON escapes quotes in texts, so no text is taken for the end of an event."""
        return events.replace(_NO_USAGE, b',"usage":' + _encode(usage) + b"}\n\n")

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
        answer_id, created, model, wish: As for CompletionChunks.
        prompts: The prompt of each choice, for its first chunk; empty: it is not told.
    """

    def __init__(
        self, answer_id: str, created: int, model: str, wish: StreamWish, prompts: Sequence[Sequence[int]]
    ) -> None:
        super().__init__(answer_id, created, model, wish)
        self._prompts = dict(enumerate(prompts))

    def output(self, index: int, delta: Delta, logprobs: bytes = NULL) -> bytes:
        """The chunk of a delta; tokens that come without text have one too."""
        if not (delta.token_ids or delta.output.text or logprobs is not NULL):
            return b""
        return self._chunk(index, self._written(index, delta), NULL, logprobs)

    def around_token(self) -> tuple[bytes, bytes] | None:
        return self._usual_head + b'"","token_ids":[', b"]" + self._usual_tail

    def _written(self, index: int, delta: Delta) -> bytes:
        text, ids = delta.output.text, delta.token_ids
        made = b'%b,"token_ids":%b' % (_encode(text), _encode(ids))
        if self._prompts and index in self._prompts:
            made += b',"prompt_token_ids":' + _encode(self._prompts.pop(index))
        return made


class ChatChunks(CompletionChunks):
    """The events of a streamed chat completion.

    Args:
        answer_id, created, model, wish: As for CompletionChunks.
        hides_reasoning: Whether reasoning is left out.
    """

    _OBJECT = "chat.completion.chunk"
    _BEFORE_TEXT = b',"delta":{"content":'
    _AFTER_TEXT = b'},"logprobs":'
    _begun = False

    def __init__(
        self, answer_id: str, created: int, model: str, wish: StreamWish, *, hides_reasoning: bool = False
    ) -> None:
        super().__init__(answer_id, created, model, wish)
        self._hides_reasoning = hides_reasoning

    def opening(self, index: int, prompt_logprobs: bytes = b"") -> bytes:
        """The first chunk says who speaks; the very first has what is told of the prompt."""
        events = self._delta(index, b'{"role":"assistant","content":""}', NULL)
        if self._begun:
            return events
        self._begun = True
        told = b',"prompt_logprobs":' + prompt_logprobs if prompt_logprobs else b""
        return events.replace(b',"choices":[', told + self._prompt_ids() + b',"choices":[', 1)

    def _prompt_ids(self) -> bytes:
        return b""

    def output(self, index: int, delta: Delta, logprobs: bytes = NULL) -> bytes:
        """A chunk for each kind of what is new: reasoning, text, then calls; the first has the ``logprobs``."""
        output = delta.output
        if self._hides_reasoning:
            output.reasoning = ""
        if not output.reasoning and not output.tool_calls:
            return super().output(index, delta, logprobs)
        events = b""
        if output.reasoning:
            said = _encode(output.reasoning)
            events = self._delta(index, b'{"reasoning_content":%b,"reasoning":%b}' % (said, said), NULL, logprobs)
            logprobs = NULL
        events += super().output(index, delta, logprobs)
        for call in output.tool_calls:
            events += self._call(index, call)
        return events

    def finish(self, index: int, delta: Delta, reason: str, logprobs: bytes = NULL) -> bytes:
        """The last output, then a chunk with an empty delta and the reason, as OpenAI sends them."""
        return self.output(index, delta, logprobs) + self._delta(index, b"{}", _ending(delta, reason))

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
    """The events of a streamed chat completion with its tokens.

    Args:
        answer_id, created, model, wish, hides_reasoning: As for ChatChunks.
        prompt: The prompt's tokens, for the first chunk.
    """

    def __init__(
        self,
        answer_id: str,
        created: int,
        model: str,
        wish: StreamWish,
        prompt: Sequence[int],
        *,
        hides_reasoning: bool = False,
    ) -> None:
        super().__init__(answer_id, created, model, wish, hides_reasoning=hides_reasoning)
        self._prompt = prompt

    def _prompt_ids(self) -> bytes:
        return b',"prompt_token_ids":' + _encode(self._prompt)

    def output(self, index: int, delta: Delta, logprobs: bytes = NULL) -> bytes:
        """The first of what is new has the tokens; there may be tokens alone."""
        events = super().output(index, delta, logprobs)
        if not delta.token_ids:
            return events
        # No text can look like the name of a field.
        tokens = b',"token_ids":%b,"finish_reason":' % _encode(delta.token_ids)
        return (events or self._delta(index, b"{}", NULL)).replace(b',"finish_reason":', tokens, 1)
