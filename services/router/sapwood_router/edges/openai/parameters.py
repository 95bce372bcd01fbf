"""The parameters of OpenAI's API that completions and chat share, as the pipeline takes them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Protocol

from msgspec.structs import replace

from sapwood_common.contract.sampling import FIELDS, SamplingParams, read_sampling
from sapwood_common.contract.seeds import RANDOM_SEEDS, Seeds
from sapwood_common.errors import InvalidArgumentError
from sapwood_router.edges.http.json_body import convert, make_whole
from sapwood_router.edges.http.left_out import LeftOut
from sapwood_router.edges.openai.logprobs import TokenName, number_of, text_of
from sapwood_router.edges.openai.other_parameters import IGNORED, STREAM_NEUTRAL, STREAM_SPARED
from sapwood_router.edges.openai.types import AnyRequest, GenerationRequest, StreamOptions
from sapwood_router.request.context import FieldNames, Truncation
from sapwood_router.request.field_names import to_client_field
from sapwood_router.request.output import OutputOptions

SAMPLING = FIELDS
"""Parameters that are sampling settings, by the same names; those that OpenAI lacks are named as in vLLM and SGLang."""

_TRANSLATED = frozenset(("top_k", "top_p", "seed"))
"""Parameters whose values may mean something else than the field of that name in ``common.proto``."""

BESIDE = IGNORED | SAMPLING
"""Parameters that a request may have beside the fields of its type: sampling settings, and those that are ignored."""

TEXT_SAMPLING = SAMPLING - {"max_tokens", "logprobs", "prompt_logprobs", "prompt_logprobs_start"}
"""Sampling settings for APIs that have their own name for the most tokens and no log probabilities."""


def sampling_of(
    given: Mapping[str, Any], fields: FieldNames, seeds: Seeds = RANDOM_SEEDS, **own: int | None
) -> SamplingParams:
    """Sampling settings.

    ``top_k`` of 0 or -1 keeps all, as with vLLM and SGLang. OpenAI's seed is signed: the same bits are meant. A ``top_p`` of 0
    keeps the likeliest token alone.

    Args:
        given: The request as it came.
        fields: How its parameters are called.
        seeds: Draws the seed if the request has none.
        own: Settings that this request's parameters do not say by themselves; None: the usual.

    Raises:
        InvalidArgumentError: One is of the wrong type or out of range.
    """
    values = {name: value for name, value in {**given, **own}.items() if name in SAMPLING and value is not None}
    make_whole(values, SamplingParams)
    if values.keys().isdisjoint(_TRANSLATED):
        return _read(values, fields, seeds)
    keeps_all = values.get("top_k") in (0, -1) and values["top_k"] is not False
    if keeps_all:
        del values["top_k"]
    if values.get("top_p") == 0 and values["top_p"] is not False:
        del values["top_p"]
        values["top_k"] = 1
    seed = values.get("seed")
    if isinstance(seed, int) and -(2**63) <= seed < 0:
        values["seed"] = seed + 2**64
    params = _read(values, fields, seeds)
    return replace(params, usual=(*params.usual, "top_k")) if keeps_all and not params.top_k else params


def _read(values: dict[str, Any], fields: FieldNames, seeds: Seeds) -> SamplingParams:
    try:
        return read_sampling(values, seeds=seeds)
    except InvalidArgumentError as error:
        raise to_client_field(error, fields) from error


def truncation_of(request: AnyRequest) -> Truncation | None:
    """How a long prompt is cut."""
    if request.truncate_prompt_tokens is None:
        return None
    return Truncation(request.truncate_prompt_tokens, keep_first=request.truncation_side == "right")


def output_of(request: GenerationRequest) -> OutputOptions:
    """How tokens become output."""
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or ()
    return OutputOptions(
        stop=tuple(stop),
        skip_special_tokens=request.skip_special_tokens is not False,
        include_stop=bool(request.include_stop_str_in_output or request.no_stop_trim),
    )


def effort_variables(effort: str) -> dict[str, Any]:
    """Variables of chat templates: those of models that reason know ``reasoning_effort``, or one of the others."""
    thinks = effort != "none"
    return {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}


class SaysThinking(Protocol):
    """A request that may say whether the model is to reason."""

    enable_thinking: bool | None
    thinking: Any


def thinking_variables(request: SaysThinking) -> dict[str, Any]:
    """The same of ``enable_thinking`` and ``thinking``, which others take beside the template's variables.

    Raises:
        InvalidArgumentError: ``thinking`` says neither yes nor no.
    """
    thinks = request.enable_thinking
    match request.thinking:
        case None:
            pass
        case bool() as said:
            thinks = said
        case {"type": "enabled" | "adaptive" | "auto"}:
            thinks = True
        case {"type": "disabled"}:
            thinks = False
        case _:
            raise InvalidArgumentError(
                'thinking must be a boolean or {"type": "enabled" or "disabled"}', field="thinking"
            )
    return {} if thinks is None else {"enable_thinking": thinks, "thinking": thinks}


class StreamWish(enum.Enum):
    """How an answer is to be sent."""

    WHOLE = enum.auto()
    """The answer is one JSON body."""
    STREAM = enum.auto()
    """The answer comes as server-sent events."""
    WITH_USAGE = enum.auto()
    """The last event has the token counts."""
    WITH_USAGE_SO_FAR = enum.auto()
    """Each event has the token counts so far."""


def stream_wish(request: GenerationRequest, left_out: LeftOut) -> StreamWish:
    """How the client wants it.

    Raises:
        InvalidArgumentError: Options for a stream, but no stream; or an option that is not supported.
    """
    given = request.stream_options
    if given is None:
        return StreamWish.STREAM if request.stream else StreamWish.WHOLE
    if not request.stream:
        raise InvalidArgumentError("stream_options is only allowed with stream", field="stream_options")
    options = convert(
        given, StreamOptions, STREAM_NEUTRAL, prefix="stream_options.", left_out=left_out, spared=STREAM_SPARED
    )
    if not options.include_usage:
        return StreamWish.STREAM
    return StreamWish.WITH_USAGE_SO_FAR if options.continuous_usage_stats else StreamWish.WITH_USAGE


def token_name(request: GenerationRequest) -> TokenName:
    """How the client wants tokens shown beside their probabilities."""
    return number_of if request.return_tokens_as_token_ids else text_of
