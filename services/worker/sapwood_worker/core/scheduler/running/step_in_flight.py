"""One step from its plan to its tokens: what each request computes in it, and what the runner is told.

Each request has two :class:`ScheduledRequest`, used in turn. A step changes only what differs from the step before: a decode
costs a few assignments, not an object. At most two steps are in flight, so neither object is written while a runner may read
it. O(requests).
"""

from __future__ import annotations

from collections.abc import Sequence

from sapwood_worker.core.cache.prefix_cache import PrefixCache
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.records.step import ScheduledRequest

Chunk = tuple[Request, int]
"""A request and how many of its next tokens are computed."""


class StepInFlight:
    """A step on its way; constructing it notes on each of its requests what the step computes.

    Args:
        decodes: Requests whose last known token, one of output, the step computes, to sample the next.
        chunks: Everything else: parts of prompts, whether or not they reach the end.
        cache: Holds their pages.

    Attributes:
        decodes, chunks: The arguments.
        samples: For each chunk whether it samples.
        parts: What the runner is told, decodes first. The scheduler's own: valid until the step's ``update()``.
        written: A handle of the last page that each part writes, made when the step is planned.
        awaits_grammar: Whether a sampled token must be seen by a grammar before the request's next one is planned.
    """

    __slots__ = ("awaits_grammar", "chunks", "decodes", "parts", "samples", "written")

    def __init__(self, decodes: list[Request], chunks: list[Chunk], cache: PrefixCache) -> None:
        self.decodes = decodes
        self.chunks = chunks
        self.awaits_grammar = False
        parts: list[ScheduledRequest] = []
        self.parts = parts
        for request in decodes:
            start = request.planned
            known = request.token_ids
            part, request.spare = request.spare, request.part
            request.part = part
            part.token_ids = [known[start] if start < len(known) else -1]
            part.start = start
            part.samples = True
            request.planned = start + 1
            request.in_flight += 1
            request.unknown += 1
            if request.grammar is not None:
                self.awaits_grammar = True
            parts.append(part)
        self.samples = [self._add_chunk(request, count) for request, count in chunks]
        self.written = cache.written_by(
            [part.slot for part in parts], [part.start + len(part.token_ids) for part in parts]
        )

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def requests(self) -> Sequence[Request]:
        """Every request that is part of the step."""
        return [*self.decodes, *(request for request, _ in self.chunks)]

    def _add_chunk(self, request: Request, count: int) -> bool:
        start = request.planned
        samples = start + count == len(request.token_ids) + request.unknown and not request.pooling
        part, request.spare = request.spare, request.part
        request.part = part
        part.token_ids = request.token_ids[start : start + count].tolist()
        part.token_ids += [-1] * (count - len(part.token_ids))
        part.start = start
        part.samples = samples
        part.prompt_logprobs = request.wanted_prompt_logprobs
        request.planned = start + count
        request.in_flight += 1
        request.unknown += samples
        self.awaits_grammar |= samples and request.grammar is not None
        self.parts.append(part)
        return samples


def make_part(request: Request) -> ScheduledRequest:
    """What the runner is told of a request that has got a row; each step then changes some fields."""
    return ScheduledRequest(
        request_id=request.request_id,
        slot=request.slot,
        token_ids=[],
        start=0,
        samples=False,
        sampling=request.sampling,
        grammar=request.grammar,
        admission=request.admission,
        history=request.token_ids,
        output_start=request.output_start,
        prompt_length=request.prompt_length,
        serial=request.serial,
        pooling=request.pooling,
    )
