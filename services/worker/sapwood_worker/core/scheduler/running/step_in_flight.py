"""One step from its plan to its tokens: what each request computes in it, and what the runner is told. O(requests)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sapwood_common.contract.sampling import SamplingParams
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.running.running_batch import RunningBatch
from sapwood_worker.records.grammar_state import GrammarState, MaskFiller
from sapwood_worker.records.page_copies import Copies
from sapwood_worker.records.step import Entry, IntArray, Step

Chunk = tuple[Request, int]
"""A request and how many of its next tokens are computed."""


class StepInFlight:
    """A step on its way; constructing it notes on each of its requests what the step computes.

    Args:
        number: The step's.
        decodes: Requests whose last known token, one of output, the step computes, to sample the next.
        chunks: Everything else: parts of prompts, whether or not they reach the end.
        running: Holds their rows and pages.
        copies: What is copied before the step.
        filler: Fills grammar masks, beginning now; None: no request has a grammar.
        drafts: For each of ``decodes`` the tokens that are expected after the next one; empty: none. Only where there are no
            chunks.

    Attributes:
        decodes, chunks, drafts: The arguments.
        samples: For each chunk whether it samples.
        plan: What the runner is told, decodes first.
        written: A handle of the last page that each part writes, made when the step is planned.
        awaits_tokens: Whether its tokens must be known before the next step is planned: for a grammar or a logit processor, or to
            know how much of a draft was right.
    """

    __slots__ = ("_filled", "awaits_tokens", "chunks", "decodes", "drafts", "plan", "samples", "written")

    def __init__(
        self,
        number: int,
        decodes: list[Request],
        chunks: list[Chunk],
        running: RunningBatch,
        copies: Copies | None,
        filler: MaskFiller | None,
        drafts: Sequence[list[int]] = (),
    ) -> None:
        assert not (chunks and drafts)
        self.decodes = decodes
        self.chunks = chunks
        self.drafts = drafts
        rows: list[int] = []
        starts: list[int] = []
        tokens: list[int] = []
        grammars: list[GrammarState] = []
        masked: list[int] = []
        processed = False
        for request in decodes:
            start = request.planned
            known = request.token_ids
            rows.append(request.slot)
            starts.append(start)
            tokens.append(known[start] if start < len(known) else -1)
            request.planned = start + 1
            request.in_flight += 1
            request.unknown += 1
            request.sampled_in = number
            if request.grammar is not None:
                masked.append(len(rows) - 1)
                grammars.append(request.grammar)
            processed = processed or request.processed
        self.samples: list[bool] = []
        entries: tuple[Entry, ...] = ()
        if chunks:
            sampling = len(decodes)
            counts = [1] * sampling
            known_tokens = [np.array(tokens, np.int64)]
            for request, count in chunks:
                start = request.planned
                rows.append(request.slot)
                starts.append(start)
                counts.append(count)
                samples = start + count == len(request.token_ids) + request.unknown and not request.pooling
                self.samples.append(samples)
                known_tokens.append(_tokens(request, start, count))
                request.planned = start + count
                request.in_flight += 1
                if samples:
                    request.unknown += 1
                    request.sampled_in = number
                processed = processed or (samples and request.processed)
                if samples and request.grammar is not None:
                    masked.append(sampling)
                    grammars.append(request.grammar)
                sampling += samples
            computed = np.concatenate(known_tokens)
            each = np.array(counts, np.int64)
            sampled = np.array([1] * len(decodes) + self.samples, np.int64)
            entries = tuple(_enter(request) for request, _ in chunks if request.enters)
        elif drafts:
            computed = np.array(
                [one for token, draft in zip(tokens, drafts, strict=True) for one in (token, *draft)], np.int64
            )
            each = sampled = np.array([1 + len(draft) for draft in drafts], np.int64)
            firsts = np.cumsum(each) - each
            masked = [int(firsts[part]) + place for part in masked for place in range(int(each[part]))]
        else:
            computed = np.array(tokens, np.int64)
            each = sampled = np.array([1] * len(decodes), np.int64)
        slots, begins = np.array(rows, np.int64), np.array(starts, np.int64)
        pages, self.written = running.pages_of(slots, begins + each)
        self.plan = plan = Step(number, slots, begins, each, sampled, computed, pages, entries, copies=copies)
        self._filled = None
        if grammars:
            assert filler is not None, "a request has a grammar, but nothing fills masks"
            drafted = [draft for request, draft in zip(decodes, drafts, strict=False) if request.grammar is not None]
            self._filled = plan.masks = filler.start(grammars, drafted)
            plan.masked = np.array(masked, np.int64)
        self.awaits_tokens = bool(grammars or drafts) or processed

    def __len__(self) -> int:
        return len(self.plan.rows)

    @property
    def requests(self) -> Sequence[Request]:
        """Every request that is part of the step."""
        return [*self.decodes, *(request for request, _ in self.chunks)]

    def release_grammars(self) -> None:
        """Returns once nothing fills the step's masks any more, so that its grammars may go on or be closed."""
        if self._filled is not None:
            self._filled.exception()


def _tokens(request: Request, start: int, count: int) -> IntArray:
    """A request's next tokens; -1 for the last of them if a step in flight samples it."""
    tokens = np.full(count, -1, np.int64)
    known = min(count, len(request.token_ids) - start)
    tokens[:known] = np.frombuffer(request.token_ids, np.uint32, known, start * request.token_ids.itemsize)
    return tokens


def _enter(request: Request) -> Entry:
    """What the runner must know of a request that has just got a row."""
    request.enters = False
    scored = request.wanted_prompt_logprobs
    return Entry(
        request.slot,
        request.serial,
        request.sampling,
        request.output_start,
        request.token_ids.tobytes() if scored is not None or looks_back(request.sampling) else b"",
        request.prompt_length,
        scored,
        request.pooling,
    )


def looks_back(sampling: SamplingParams) -> bool:
    """Whether sampling a token takes more of those before it than their logits."""
    penalties = sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty
    return penalties != (0.0, 0.0, 1.0) or bool(sampling.bad_words_ids or sampling.logit_processors)
