"""``POST /v2/embed``."""

from __future__ import annotations

from typing import Any

import msgspec

from sapwood_common.errors import InvalidArgumentError
from sapwood_router.edges.cohere.types import CohereEmbeddings, CohereEmbedRequest
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.json_body import Neutral, convert, decode_object
from sapwood_router.edges.openai.embeddings import base64_of
from sapwood_router.flow.generation import Pipeline
from sapwood_router.request.embed_request import EmbedRequest

NEUTRAL: Neutral = {"images": ([],)}
IGNORED = frozenset({"priority"})
_TYPES = ("float", "base64")


async def embed(exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
    """Answers with the vectors of texts. ``input_type`` is not shown to the model: a prefix is the client's to write.

    Raises:
        SapwoodError: It is wrong, or it failed.
    """
    given = decode_object(body)
    await exchange.breathe()
    request = convert(given, CohereEmbedRequest, NEUTRAL, IGNORED, left_out=exchange.left_out)
    exchange.accept_body_id(request)
    if request.truncate == "START":
        raise InvalidArgumentError("inputs to embed are cut at their end", field="truncate")
    kinds = request.embedding_types or ["float"]
    if unknown := next((kind for kind in kinds if kind not in _TYPES), None):
        raise InvalidArgumentError(f"embeddings of type {unknown!r} are not made", field="embedding_types")
    texts, names = _texts(request)
    whole = request.truncate == "NONE"
    wanted = EmbedRequest(
        request_id=exchange.request_id,
        inputs=texts,
        names=names,
        model=request.model,
        normalize=True,
        dimensions=request.output_dimension,
        max_tokens=None if whole else request.max_tokens or -1,
        deadline=exchange.sooner(deadline),
        caller=exchange.caller(request, given),
    )
    exchange.on_disconnect(lambda: None)
    found = await pipeline.embedder.embed(wanted)
    made: dict[str, list[Any]] = {}
    for kind in dict.fromkeys(kinds):
        made[kind] = [base64_of(vector) if kind == "base64" else list(vector) for vector in found.vectors]
    counts = {"input_tokens": found.prompt_tokens}
    answer = CohereEmbeddings(
        id=exchange.request_id,
        embeddings=made,
        texts=texts,
        meta={"api_version": {"version": "2"}, "billed_units": counts, "tokens": counts},
    )
    await exchange.send_body(200, msgspec.json.encode(answer))


def _texts(request: CohereEmbedRequest) -> tuple[list[str], list[str]]:
    """The texts, and the client's name of each."""
    if request.texts:
        return request.texts, [f"texts[{index}]" for index in range(len(request.texts))]
    texts: list[str] = []
    for index, item in enumerate(request.inputs or ()):
        for number, part in enumerate(item.get("content") or ()):
            if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                raise InvalidArgumentError("only text is embedded", field=f"inputs[{index}].content[{number}]")
        texts.append("\n".join(part["text"] for part in item.get("content") or ()))
    if not texts:
        raise InvalidArgumentError("texts is required", field="texts")
    return texts, [f"inputs[{index}]" for index in range(len(texts))]
