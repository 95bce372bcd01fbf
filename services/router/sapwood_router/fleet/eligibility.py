"""Which workers a request may go to, and why not to the others: decided here for generations, embeddings and explanations."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from sapwood_common.errors import InvalidArgumentError, PromptTooLongError, UnavailableError
from sapwood_router.fleet.registry import RETRY_AFTER
from sapwood_router.fleet.served_model import ServedModel
from sapwood_router.fleet.worker import Worker

_OVERLONG_STEP = 10.0
"""Seconds at one step after which a worker may hang: others are preferred. One that is only slow just gets fewer requests."""


class Demand(msgspec.Struct, frozen=True):
    """What a request asks of a worker.

    Attributes:
        model: Its name.
        tokens: Length of its longest sequence; 0 if that is cut to what a worker takes.
        field: How the client calls that sequence.
        embeds: Whether it wants embeddings, or labels.
        classifies: Whether it wants labels.
        refused_by: Addresses of workers that answered it with an error.
        relayed: Whether it goes to backends, else it goes to none of them.
        lora: The adapter that it names; empty: none.
        pages: The formats of pages that fit, for workers that say their format. Empty: anything.
    """

    model: str
    tokens: int
    field: str
    embeds: bool = False
    classifies: bool = False
    refused_by: Collection[str] = ()
    relayed: bool = False
    pages: Collection[bytes] = ()
    lora: str = ""


class Eligible(msgspec.Struct, frozen=True):
    """The workers to choose from, at least one, and why each of the others is none of them."""

    workers: list[Worker]
    excluded: dict[Worker, str]


def eligible(workers: Iterable[Worker], demand: Demand) -> Eligible:
    """Sorts workers out.

    If every worker that fits is full, the full ones are returned: the request has to wait for one of them.

    Raises:
        UnavailableError: None can be asked now.
        InvalidArgumentError: None of those that can makes embeddings, or labels, or has so long a context.
    """
    excluded: dict[Worker, str] = {}
    chosen: list[Worker] = []
    busy: list[Worker] = []
    misfits: list[ServedModel] = []
    model, tokens, embeds = demand.model, demand.tokens, demand.embeds
    refused_by, relayed, pages = demand.refused_by, demand.relayed, demand.pages
    for worker in workers:  # each request comes here with each worker: properties would cost more than the rest
        served = worker.model
        if (
            (served is None or served.model != model or worker.address in refused_by)
            or not (worker.available and not worker.draining and not worker.leaving)
            or not (worker.breaker.closed or worker.breaker.admits())
            or (worker.backend is None) is relayed
        ):
            excluded[worker] = _obstacle(worker, demand)
        elif (embeds or served.context_length < tokens) and (lack := _lack(served, demand)):
            excluded[worker] = lack
            misfits.append(served)
        elif demand.lora and not served.lora_slots:
            excluded[worker] = "has no slots for adapters"
        elif pages and served.pages and served.pages not in pages:
            excluded[worker] = "its pages do not fit those of the worker next to it"
        elif worker.in_flight < worker.most_requests and worker.step_seconds < _OVERLONG_STEP:
            chosen.append(worker)
        else:
            busy.append(worker)
    if not (chosen or busy):
        if misfits:
            raise _misfit(misfits, demand)
        raise UnavailableError(f"no worker is available for model {model!r}", retry_after=RETRY_AFTER)
    if busy:
        chosen = chosen or [each for each in busy if each.in_flight < each.most_requests]
        chosen = chosen or [each for each in busy if each.step_seconds < _OVERLONG_STEP] or busy
        excluded |= {worker: _passed_over(worker) for worker in busy if worker not in chosen}
    return Eligible(chosen, excluded)


def _obstacle(worker: Worker, demand: Demand) -> str:
    """Why a worker cannot be asked now."""
    served = worker.model
    if served is not None and served.model != demand.model:
        return f"serves {served.model}"
    if served is None or not worker.available:
        return worker.problem or "not available"
    if worker.draining:
        return "drained by an operator"
    if worker.leaving:
        return "no longer named by any source"
    if worker.address in demand.refused_by:
        return "answered this request with an error"
    if (worker.backend is None) is demand.relayed:
        return "is asked over gRPC" if demand.relayed else "is asked over HTTP, with the text"
    return f"circuit breaker {worker.breaker.state.value}"


def _lack(served: ServedModel, demand: Demand) -> str:
    """Why a worker could not do it even if it were asked; empty if it could."""
    if demand.embeds and not _can_embed(served, demand):
        return "classifies nothing" if demand.classifies else "makes no embeddings"
    if served.context_length >= demand.tokens or (demand.embeds and served.embedded_tokens):
        return ""
    return f"its context holds {served.context_length} tokens"


def _can_embed(served: ServedModel, demand: Demand) -> bool:
    return served.labels is not None if demand.classifies else bool(served.embedding_size)


def _misfit(served: list[ServedModel], demand: Demand) -> InvalidArgumentError:
    if demand.embeds:
        served = [each for each in served if _can_embed(each, demand)]
        if not served:
            lack = "has no head that classifies" if demand.classifies else "makes no embeddings"
            return InvalidArgumentError(f"model {demand.model!r} {lack}", field="model")
    longest = max(each.context_length for each in served)
    return PromptTooLongError.of(demand.tokens, longest, field=demand.field)


def _passed_over(worker: Worker) -> str:
    if not worker.room:
        return "has as many requests as it is given"
    return f"has been at one step for {worker.step_seconds:.0f} s"
