"""Cosines of embeddings."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from operator import mul

from sapwood_common.contract.limits import MOST_EMBEDDED
from sapwood_common.errors import InvalidArgumentError
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.openai.types import AnyRequest
from sapwood_router.flow.generation import Pipeline
from sapwood_router.request.caller import Caller
from sapwood_router.request.embed_request import Embeddings, EmbedRequest

_AT_ONCE = 64
"""Cosines between two looks at what else there is to do."""


async def embed_all(
    exchange: Exchange,
    pipeline: Pipeline,
    request: AnyRequest,
    named: Sequence[tuple[str, str]],
    caller: Caller,
    deadline: float,
) -> Embeddings:
    """The vectors of texts, each of which comes with the client's name of it.

    Raises:
        SapwoodError: A text is empty or too long, there are too many, or the model makes no embeddings, or it failed.
    """
    if len(named) > MOST_EMBEDDED:
        raise InvalidArgumentError(f"at most {MOST_EMBEDDED} texts, got {len(named)}", field=named[-1][0])
    exchange.on_disconnect(lambda: None)
    wanted = EmbedRequest(
        request_id=exchange.request_id,
        inputs=[text for _, text in named],
        names=[name for name, _ in named],
        model=request.model,
        normalize=True,
        max_tokens=request.truncate_prompt_tokens,
        deadline=deadline,
        caller=caller,
    )
    return await pipeline.embedder.embed(wanted)


async def cosines(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> list[float]:
    """How alike the vectors of each pair are, -1 to 1; a vector of zeros is like none."""
    found = []
    for index, (one, other) in enumerate(pairs):
        if index % _AT_ONCE == _AT_ONCE - 1:
            await asyncio.sleep(0)
        lengths = math.hypot(*one) * math.hypot(*other)
        found.append(sum(map(mul, one, other)) / lengths if lengths else 0.0)
    return found
