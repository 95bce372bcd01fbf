"""The options of a generation and its answer, as plain Python values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from sapwood.v1 import common_pb2, router_pb2, worker_pb2

FinishReason = Literal["stop", "length"]
"""Why a generation ended: an end token or stop string, or max_tokens or the end of the context."""

_FINISH_REASONS: dict[int, FinishReason] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}


class Options(TypedDict, total=False):
    """Keyword arguments of ``generate``; what is left out takes the server's default (protos/sapwood/v1/common.proto).

    Attributes:
        model: The model's name; the only one there is if left out.
        temperature: 0 is greedy; at least 0.
        top_k: Keep only the k most likely tokens; at least 1.
        top_p: Keep the smallest set of tokens whose probability reaches this, in (0, 1].
        min_p: Drop tokens less likely than this times the likeliest, in [0, 1].
        seed: The same seed gives the same tokens.
        max_tokens: The most tokens to generate; at least 1.
        stop_token_ids: Generation ends at any of these.
        ignore_eos: Whether generation continues past the model's own end tokens.
        stop: Text ends before the first of these; at most 16.
        skip_special_tokens: Whether special tokens are left out of the text.
        token_healing: Whether the prompt's last tokens are taken back where a longer token could begin with their text.
        include_stop: Whether the stop string, or the end token's text, is part of the text.
        detokenize: False gives token ids and no text, without using the tokenizer. Not with ``stop`` or ``tools``.
        request_id: 1 to 128 plain characters by which logs and answers name the request.
        frequency_penalty: Taken off a token's logit for each time it was generated, in [-2, 2].
        presence_penalty: Taken off a token's logit once it was generated, in [-2, 2].
        repetition_penalty: Divides the logits of tokens in prompt and answer; over 0.
        logit_bias: Token id to what is added to its logit, in [-100, 100].
        min_tokens: Generation does not end before this many tokens.
        n: The number of continuations of the prompt; each delta has the ``index`` of its continuation.
        logprobs: Each token comes with its log probability and this many alternatives; 0 to 20.
        prompt_logprobs: The same for the prompt's tokens.
        prompt_logprobs_start: The place of the prompt's token after which these begin; what is before may come from the cache.
        allowed_token_ids: The only tokens that are generated.
        bad_words: Words that the answer does not hold.
        bad_words_ids: The same as sequences of token ids.
        speculate: False: the worker drafts no tokens for it; they are the same in any case.
        logit_processors: Logit processors that are installed at the worker, in order: {"name": ..., "parameters": {...}} each.
        session: The id of a session that the text or tokens continue with; see ``Client.open_session``.
        tools: The tools on offer, in the form of OpenAI's API. With messages only.
        tool_choice: "auto" (the default), "none", or "required": calls and nothing else.
        tool_choice_function: The one tool that is called, once.
        parallel_tool_calls: Whether there may be several calls; True if left out.
        template_variables: Further variables for the model's chat template, such as {"enable_thinking": False}. With messages
            only.
        add_generation_prompt: Whether the prompt ends with the opening of the assistant's turn. With messages only.
        continue_final_message: The answer continues with the last message. With messages only.
        truncate_prompt_tokens: A longer prompt is cut to this many tokens, the last ones; -1: to as many as leave room for the
            answer.
        truncate_right: Whether the first tokens are kept instead.
        add_special_tokens: Whether the model's own special tokens, such as BOS, come before the text. With text only.
        suffix: The text after the answer; the answer fills the gap between the prompt and this. Only with text, and models that
            can.
        whole: The answer comes as one delta for each continuation, which costs less than a stream. Default False.
        json_schema: The text is JSON that matches this schema (a mapping, or JSON text).
        regex: The text matches this expression.
        ebnf: The text matches these rules; ``root`` is the first.
        structural_tag: Free text with structured parts; see protos/sapwood/v1/common.proto.
    """

    model: str
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    max_tokens: int
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    stop: str | Sequence[str]
    skip_special_tokens: bool
    token_healing: bool
    include_stop: bool
    detokenize: bool
    request_id: str
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    min_tokens: int
    n: int
    logprobs: int
    prompt_logprobs: int
    prompt_logprobs_start: int
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    bad_words_ids: Sequence[Sequence[int]]
    speculate: bool
    logit_processors: Sequence[Mapping[str, Any]]
    session: str
    tools: Iterable[Mapping[str, Any]]
    tool_choice: Literal["auto", "none", "required"]
    tool_choice_function: str
    parallel_tool_calls: bool
    template_variables: Mapping[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool
    truncate_prompt_tokens: int
    truncate_right: bool
    add_special_tokens: bool
    suffix: str
    whole: bool
    json_schema: Mapping[str, Any] | str
    regex: str
    ebnf: str
    structural_tag: Mapping[str, Any] | str


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request; ``cached_tokens`` of its prompt tokens were found in the prefix cache.

    Some of the tokens that the worker drafted became output (accepted), the others did not (rejected). Some of the output
    is reasoning.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of a tool call: ``index`` counts the calls of one answer; the first delta of each has its id and name."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool; ``arguments`` is JSON as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's log probability, and the likeliest tokens in its place as (id, log probability)."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """One piece of an answer. The last one carries ``finish_reason`` and ``usage``.

    Attributes:
        text: New text; may be empty while a character or a possible stop string is incomplete.
        token_ids: New tokens.
        finish_reason: None but on the last piece.
        usage: None but on the last piece.
        stop_match: On the last: the stop string that ended the text, if one did.
        reasoning: New text of the reasoning before the answer.
        tool_calls: More of the calls.
        index: The number of the continuation, of ``n``; each has its own last delta.
        logprobs: One for each of ``token_ids``, if asked for.
        prompt_logprobs: On the first piece of index 0, if asked for: one for each token of the prompt after
            ``prompt_logprobs_start``.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    stop_match: str | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    index: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer.

    Attributes:
        text: The text.
        reasoning: The reasoning before it.
        tool_calls: The calls.
        token_ids: All tokens.
        finish_reason: None where the answer was cut off.
        usage: None where the answer was cut off.
        stop_match: The stop string that ended the text.
        logprobs: One for each token, where asked for.
        prompt_logprobs: One for each token of the prompt after ``prompt_logprobs_start``, where asked for.
    """

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    usage: Usage | None
    stop_match: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's turn, for the next request's ``messages``."""
        turn: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            turn["reasoning"] = self.reasoning
        if self.tool_calls:
            turn["content"] = self.text or None
            turn["tool_calls"] = [
                {"id": call.id, "name": call.name, "arguments": call.arguments} for call in self.tool_calls
            ]
        return turn


def answer_of(deltas: Iterable[Delta]) -> Answer:
    """Puts the deltas of one continuation together."""
    text: list[str] = []
    reasoning: list[str] = []
    token_ids: list[int] = []
    calls: dict[int, ToolCall] = {}
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    last: Delta | None = None
    for last in deltas:
        text.append(last.text)
        reasoning.append(last.reasoning)
        token_ids += last.token_ids
        logprobs += last.logprobs
        prompt_logprobs += last.prompt_logprobs
        for part in last.tool_calls:
            call = calls.get(part.index, ToolCall("", "", ""))
            calls[part.index] = ToolCall(call.id or part.id, call.name or part.name, call.arguments + part.arguments)
    return Answer(
        text="".join(text),
        reasoning="".join(reasoning),
        tool_calls=tuple(call for _, call in sorted(calls.items())),
        token_ids=tuple(token_ids),
        finish_reason=last.finish_reason if last is not None else None,
        usage=last.usage if last is not None else None,
        stop_match=last.stop_match if last is not None else None,
        logprobs=tuple(logprobs),
        prompt_logprobs=tuple(prompt_logprobs),
    )


@dataclass(frozen=True, slots=True)
class Model:
    """A model that can be asked for; ``workers`` healthy workers serve it."""

    id: str
    context_length: int
    workers: int


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """The router's knowledge of one worker.

    Attributes:
        address: Where it listens.
        healthy: Whether it gets requests.
        model: The model it serves.
        in_flight: Requests this router has running on it.
        running_requests: Requests it reported as running.
        waiting_requests: Requests it reported as waiting.
        used_pages: KV pages held by requests or the prefix cache.
        num_pages: KV pages it has.
        role: Which part of a request it computes: "both", "prefill" or "decode".
    """

    address: str
    healthy: bool
    model: str
    in_flight: int
    running_requests: int
    waiting_requests: int
    used_pages: int
    num_pages: int
    role: str = "both"


def _to_usage(usage: common_pb2.Usage) -> Usage:
    return Usage(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.cached_tokens,
        usage.accepted_prediction_tokens,
        usage.rejected_prediction_tokens,
        usage.reasoning_tokens,
    )


def to_delta(response: router_pb2.RouterGenerateResponse) -> Delta:
    """One streamed message as a :class:`Delta`."""
    usage = response.usage if response.HasField("usage") else None
    return Delta(
        text=response.text,
        token_ids=tuple(response.token_ids),
        finish_reason=_FINISH_REASONS.get(response.finish_reason),
        usage=_to_usage(usage) if usage is not None else None,
        stop_match=response.stop_match if response.HasField("stop_match") else None,
        reasoning=response.reasoning,
        tool_calls=tuple(ToolCallDelta(part.index, part.id, part.name, part.arguments) for part in response.tool_calls),
        index=response.index,
        logprobs=tuple(map(_logprobs, response.logprobs)),
        prompt_logprobs=tuple(map(_logprobs, response.prompt_logprobs)),
    )


def _logprobs(message: worker_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(message.logprob, tuple(zip(message.top_ids, message.top_logprobs, strict=True)))


def to_models(response: router_pb2.ListModelsResponse) -> list[Model]:
    """The models of a ``ListModels`` answer."""
    return [Model(model.id, model.context_length, model.workers) for model in response.models]


def to_workers(response: router_pb2.ListWorkersResponse) -> list[WorkerStatus]:
    """The workers of a ``ListWorkers`` answer."""
    return [
        WorkerStatus(
            address=worker.address,
            healthy=worker.healthy,
            model=worker.model,
            in_flight=worker.in_flight,
            running_requests=worker.load.running_requests,
            waiting_requests=worker.load.waiting_requests,
            used_pages=worker.load.used_pages,
            num_pages=worker.load.num_pages,
            role=role_name(worker.role),
        )
        for worker in response.workers
    ]


def role_name(role: worker_pb2.WorkerRole) -> str:
    """A worker's role in one word; one that says none does all."""
    return {worker_pb2.WORKER_ROLE_PREFILL: "prefill", worker_pb2.WORKER_ROLE_DECODE: "decode"}.get(role, "both")
