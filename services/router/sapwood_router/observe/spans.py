"""The spans of OpenTelemetry's semantic conventions for generative AI: the router is the client of a model that a worker runs."""

from __future__ import annotations

from sapwood_common.contract.sampling import AS_MANY_AS_FIT
from sapwood_common.telemetry.tracing import Attribute
from sapwood_router.request.context import ChatPrompt, RequestContext
from sapwood_router.request.embed_request import Embeddings, EmbedRequest

_SIGN = 1 << 63
"""Turns an unsigned 64-bit seed into the signed number of the same bits, which is what attributes can hold."""

PROVIDER = "sapwood"


def operation_of(context: RequestContext) -> str:
    """``gen_ai.operation.name`` of a generation."""
    return "chat" if isinstance(context.prompt, ChatPrompt) else "text_completion"


def span_name(operation: str, model: str | None) -> str:
    """The name of an operation's span; None or empty: its model is not known yet."""
    return operation if not model else f"{operation} {model}"


def asked(context: RequestContext) -> dict[str, Attribute]:
    """The attributes of a request; none tells what the prompt says."""
    sampling = context.sampling
    given: dict[str, Attribute | None] = {
        "gen_ai.operation.name": operation_of(context),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": context.model,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k or None,
        "gen_ai.request.max_tokens": None if sampling.max_tokens == AS_MANY_AS_FIT else sampling.max_tokens,
        "gen_ai.request.seed": (sampling.seed ^ _SIGN) - _SIGN,
        "gen_ai.request.stop_sequences": list(context.output.stop) or None,
        "sapwood.request_id": context.request_id,
    }
    return {name: value for name, value in given.items() if value is not None}


def answered(context: RequestContext, code: str) -> dict[str, Attribute]:
    """The attributes of a generation's end. ``code``: the name of its gRPC status."""
    generated, asked_tokens = context.token_counts
    attributes: dict[str, Attribute] = {
        "gen_ai.response.model": context.model or "-",
        "gen_ai.usage.input_tokens": asked_tokens,
        "gen_ai.usage.output_tokens": max(generated, len(context.output_ids)),
        "gen_ai.usage.cache_read.input_tokens": context.cached_tokens,
        "sapwood.worker": context.worker,
        "sapwood.selection_reason": context.reason,
        "sapwood.status": code,
        "sapwood.resumptions": context.resumptions,
        "sapwood.accepted_tokens": context.accepted_prediction_tokens,
        "sapwood.drafted_tokens": context.accepted_prediction_tokens + context.rejected_prediction_tokens,
    }
    if context.worker_finish is not None:
        attributes["gen_ai.response.finish_reasons"] = [context.worker_finish.value]
    if code != "OK":
        attributes["error.type"] = code
    return attributes


EMBEDDINGS = "embeddings"
CLASSIFICATION = "classification"


def asked_to_embed(request: EmbedRequest) -> dict[str, Attribute]:
    """The attributes of an embedding request: how much is to be embedded, not what."""
    given: dict[str, Attribute | None] = {
        "gen_ai.operation.name": CLASSIFICATION if request.classifies else EMBEDDINGS,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": request.model,
        "gen_ai.embeddings.dimension.count": request.dimensions,
        "sapwood.request_id": request.request_id,
        "sapwood.inputs": len(request.inputs),
    }
    return {name: value for name, value in given.items() if value is not None}


def embedded(found: Embeddings) -> dict[str, Attribute]:
    """The attributes of an embedding request's answer."""
    return {
        "gen_ai.response.model": found.model,
        "gen_ai.usage.input_tokens": found.prompt_tokens,
        "gen_ai.embeddings.dimension.count": len(found.vectors[0]) if found.vectors else 0,
    }
