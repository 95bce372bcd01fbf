"""How well texts fit each other: by the one label of a model's head where it has one, else by the cosine of their embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sapwood_common.errors import InvalidArgumentError
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.score.likeness import cosines, embed_all
from sapwood_router.edges.score.types import CompareRequest
from sapwood_router.flow.generation import Pipeline
from sapwood_router.request.caller import Caller
from sapwood_router.request.embed_request import EmbedRequest, TextPair


@dataclass(frozen=True, slots=True)
class Compared:
    """A score for each pair, and what they cost."""

    model: str
    scores: list[float]
    prompt_tokens: int


async def compare(
    exchange: Exchange,
    pipeline: Pipeline,
    request: CompareRequest,
    ones: Sequence[tuple[str, str]],
    others: Sequence[tuple[str, str]],
    caller: Caller,
    deadline: float,
) -> Compared:
    """The scores of pairs: of one text with each of the others, or of as many pair by pair.

    Args:
        exchange: Whose answer it is for.
        pipeline: Runs the request.
        request: What the client asked.
        ones: Each text with the client's name of it; one, or as many as ``others``.
        others: The same of the second texts.
        caller: Who asks.
        deadline: On the event loop's clock.

    Raises:
        SapwoodError: A text is empty or too long, there are too many, or the model cannot compare, or it failed.
    """
    labels = pipeline.registry.labels(pipeline.registry.resolve(request.model))
    if labels is None:
        if request.uses_activation is not None:
            name = "activation" if request.use_activation is None else "use_activation"
            raise InvalidArgumentError(f"{name} is for models with a head that classifies", field=name)
        found = await embed_all(exchange, pipeline, request, [*ones, *others], caller, deadline)
        first, second = found.vectors[: len(ones)], found.vectors[len(ones) :]
        if len(first) == 1:
            first *= len(second)
        scores = await cosines(list(zip(first, second, strict=True)))
        return Compared(found.model, scores, found.prompt_tokens)
    if len(labels.names) != 1:
        raise InvalidArgumentError(
            f"the model tells {len(labels.names)} labels: ask /classify; a score needs a model with one", field="model"
        )
    for name, text in (*ones, *others):
        if not text:
            raise InvalidArgumentError("it is empty", field=name)
    exchange.on_disconnect(lambda: None)
    firsts = [text for _, text in ones] * (len(others) if len(ones) == 1 else 1)
    wanted = EmbedRequest(
        request_id=exchange.request_id,
        inputs=[TextPair(one, text) for one, (_, text) in zip(firsts, others, strict=True)],
        names=[name for name, _ in others],
        model=request.model,
        max_tokens=request.truncate_prompt_tokens,
        deadline=deadline,
        caller=caller,
        classifies=True,
    )
    answer = await pipeline.embedder.embed(wanted)
    told = answer.labels if answer.labels is not None and request.uses_activation is not False else None
    scores = [(logits if told is None else told.scores(logits))[0] for logits in answer.vectors]
    return Compared(answer.model, scores, answer.prompt_tokens)
