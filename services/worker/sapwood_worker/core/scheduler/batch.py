"""The running requests and their steps: rows and pages, the requests of each step in flight, a step's length and its plan."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sapwood_common.contract.sampling import SamplingParams
from sapwood_worker.core.cache.pages import PageTable
from sapwood_worker.core.cache.prefix import PrefixCache, Written
from sapwood_worker.core.scheduler.joining import Join
from sapwood_worker.core.scheduler.lora_slots import SlotPool
from sapwood_worker.core.scheduler.request import Request, RequestState
from sapwood_worker.records.grammar_state import GrammarState, MaskFiller
from sapwood_worker.records.step import Copies, Entry, IntArray, Step


class RunningBatch:
    """Requests that have a row, by rank: the last one is the first to be retracted.

    Args:
        table: The page table.
        cache: Where pages come from and go to.
        page_size: Tokens in a page.
        loras: Where adapters get their slots.
        rewinds: Whether a request can go back to an earlier token: all its keys and values are kept, and nothing else.
    """

    def __init__(
        self,
        table: PageTable,
        cache: PrefixCache,
        page_size: int,
        loras: SlotPool | None = None,
        *,
        rewinds: bool = True,
    ) -> None:
        self._table = table
        self._cache = cache
        self._loras = SlotPool(0) if loras is None else loras
        self._page_size = page_size
        self.rewinds = rewinds
        self.requests: list[Request] = []

    def __len__(self) -> int:
        return len(self.requests)

    def pages_of(
        self, rows: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int32], Written]:
        """The pages of some rows, up to the page of the last token before ``ends``, and a handle of each row's last page.

        The pages are a copy, int32 [rows, tables * most pages]; entries beyond a row's last page are undefined.
        """
        return self._cache.pages_of(rows, (ends - 1) // self._page_size)

    @property
    def num_free_slots(self) -> int:
        """How many more requests could run."""
        return self._table.num_free

    @property
    def num_rows(self) -> int:
        """How many requests could run at once."""
        return len(self._table.rows)

    @property
    def num_pages(self) -> int:
        """All pages."""
        return self._cache.num_pages

    @property
    def num_available_pages(self) -> int:
        """How many pages could be given to requests now."""
        return self._cache.num_available

    @property
    def spares_prompts(self) -> bool:
        """Whether a request finds all but the last token of a prompt that another one has computed."""
        return self._cache.enabled and self._cache.states is None

    def lend_row(self) -> int:
        """Takes a row without pages for one step; returns its slot. There must be a free one."""
        return self._table.open()

    def take_row(self, slot: int) -> None:
        """Takes a lent row back."""
        self._table.close(slot)

    def has_lora_slot(self, request: Request) -> bool:
        """Whether the request needs no adapter, or there is a slot for it."""
        return self._loras.fits(request.lora)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self._page_size)

    def pages_to_start(self, request: Request) -> int:
        """How many available pages the request would take if it started: new pages, and cached pages that it would lock."""
        found, unlocked = self._cache.probe(request.reusable, request.namespace)
        return self.pages_for(len(request.token_ids)) - found + unlocked

    def tokens_gained(self, request: Request, others: Sequence[Request]) -> int:
        """How many more tokens the request would find in the cache after one of the others has computed its whole prompt; fewer
        than a page's count as none."""
        others = [other for other in others if other.namespace == request.namespace]
        if not self._cache.enabled or not others:
            return 0
        start = self._cache.find(request.reusable, request.namespace)
        states = self._cache.states
        first_page = request.keyed[start : start + self._page_size]
        most = 0
        for other in others:
            limit = min(len(request.reusable) - 1, len(other.token_ids))
            if start >= limit or first_page != other.keyed[start : start + self._page_size]:
                continue
            mine, theirs = (np.frombuffer(tokens, np.uint32, limit) for tokens in (request.keyed, other.keyed))
            differing = mine != theirs
            common = int(differing.argmax()) if differing.any() else limit
            found = common if self._cache.shares_parts else common // self._page_size * self._page_size
            if states is not None:
                # It finds the keys and values, but needs a state as well: where it branches off, if that is not computed yet.
                if found > max(start, other.planned) and found < other.prompt_length:
                    states.want(other.slot, found)
                coming = states.coming(other.slot, other.planned, other.prompt_length)
                found = max((each for each in coming if each <= found), default=0)
            most = max(most, found - start)
        return most

    def enter_state(self, request: Request) -> int:
        """The snapshot from which a request that has just got a row continues; -1: none."""
        return -1 if self._cache.states is None else self._cache.states.enter(request.slot)

    def took_state(self, request: Request, tokens: int) -> None:
        """Takes note that a step has taken a snapshot of a request's state after this many tokens."""
        assert self._cache.states is not None
        self._cache.states.took(request.slot, tokens, request.prompt_length)

    def plan_states(
        self, requests: Sequence[Request], starts: IntArray, counts: IntArray
    ) -> tuple[IntArray, list[tuple[int, int, int]]]:
        """What a step does for layers that keep a state.

        Args:
            requests: Those of its parts.
            starts: int64 [P]: their tokens before the step's.
            counts: int64 [P]: the step's.

        Returns:
            ``Step.again``, and the snapshots: for each a part, after how many of the request's tokens, and its slot.
        """
        states = self._cache.states
        if states is None:
            return np.zeros(0, np.int64), []
        again = np.zeros(len(requests), np.int64)
        saves: list[tuple[int, int, int]] = []
        ranges = zip(requests, starts.tolist(), (starts + counts).tolist(), strict=True)
        for part, (request, start, end) in enumerate(ranges):
            if start >= request.prompt_length and end == start + 1 and end % self._page_size:
                continue
            again[part] = max(0, min(end, self._cache.kept(request.slot)) - start)
            taken = states.plan(request.slot, start, end, request.prompt_length)
            saves += [(part, tokens, snapshot) for tokens, snapshot in taken]
        return again if again.any() else again[:0], saves

    def windows_fit(self, tokens: int) -> bool:
        """Whether every window has pages for one more request of this many tokens, besides the pages that running requests may
        need."""
        return all(each.needed(tokens) + each.outstanding() <= each.num_available for each in self._cache.scarce)

    def start(self, request: Request, expected: int = 0) -> None:
        """Gives a request a row, its cached pages, and pages for the rest of its known tokens.

        There must be a free slot and :meth:`pages_to_start` free pages; :meth:`windows_fit` for ``expected`` tokens, and
        :meth:`has_lora_slot`.
        """
        request.become(RequestState.RUNNING)
        request.slot = self._table.open()
        request.lora_slot = self._loras.take(request.lora, request.tenant)
        request.enters = True
        request.computed = self._cache.open(
            request.slot, request.request_id, request.reusable, request.namespace, expected
        )
        missing = self.pages_for(len(request.token_ids)) - self._table.length(request.slot)
        allocated = self._cache.allocate(request.slot, missing)
        if not allocated:
            self._cache.forgo_part(request.slot)
            allocated = self._cache.allocate(request.slot, missing)
        assert allocated, f"request {request.request_id} was started without pages for it"
        request.computed += self._cache.load(request.slot)
        request.planned = request.computed
        request.capacity = self.capacity(request)
        request.reach = self._cache.reach(request.slot)
        insort(self.requests, request, key=lambda other: other.rank)

    def capacity(self, request: Request) -> int:
        """Tokens that the pages of a running request hold."""
        return self._table.length(request.slot) * self._page_size

    def make_room(self, request: Request, tokens: int) -> bool:
        """Gives a request pages for this many tokens, and window pages for the tokens that it computes next. Returns False if
        there are too few pages."""
        if tokens > request.capacity:
            missing = self.pages_for(tokens) - self._table.length(request.slot)
            if not self._cache.allocate(request.slot, missing):
                return False
            request.capacity += missing * self._page_size
        if request.planned >= request.reach:
            request.reach = self._cache.extend(request.slot, request.planned + 1, request.computed)
        return request.planned < request.reach

    def draftable(self, request: Request, count: int, *, further: bool = False) -> int:
        """Gives a request pages for ``count`` tokens after its next one, as far as there are free pages. Returns for how many it
        has pages.

        Args:
            request: The request.
            count: The tokens.
            further: Also give it pages for a second draft of the same length, unless others may need the pages soon.
        """
        start = request.planned + 1
        self._widen(request, start + count, 0)
        if further:
            self._widen(request, min(start + 2 * count + 2, request.max_length), len(self.requests))
        return max(0, min(self.reachable(request, 1 + count) - 1, request.capacity - start))

    def _widen(self, request: Request, tokens: int, left: int) -> None:
        """Gives a request pages for this many tokens if ``left`` other pages remain free."""
        if tokens > request.capacity:
            missing = self.pages_for(tokens) - self._table.length(request.slot)
            if missing + left <= self._cache.num_available and self._cache.allocate(request.slot, missing):
                request.capacity += missing * self._page_size

    def reachable(self, request: Request, count: int) -> int:
        """Gives a request pages of windows for its next ``count`` tokens; returns for how many of them it then has pages."""
        end = request.planned + count
        if end > request.reach:
            request.reach = self._cache.extend(request.slot, end, request.computed, share=True)
        return min(count, request.reach - request.planned)

    def commit(self, request: Request) -> None:
        """Puts the pages of a request's computed tokens into the prefix cache."""
        # After an abort with steps in flight, more tokens are computed than known.
        known = len(request.token_ids) if request.walk is None else request.prompt_length
        self._cache.commit(request.slot, request.keyed, min(request.computed, known))

    def stop(self, request: Request, state: RequestState, *, keep: bool = True) -> None:
        """Takes the row from a request; its pages stay in the cache, unlocked, unless ``keep`` is false.

        No step in flight may compute it.
        """
        assert not request.in_flight, f"request {request.request_id} is still being computed"
        if keep:
            self.commit(request)
        self._cache.close(request.slot)
        self._table.close(request.slot)
        self._loras.release(request.lora_slot, request.tenant)
        self.requests.remove(request)
        request.slot = request.lora_slot = -1
        request.capacity = request.reach = 0
        request.computed = request.planned = request.unknown = 0
        request.become(state)


# How steps that are in flight at once share the running requests.


class MicroBatches:
    """Micro-batches of a pipeline: each step decodes a share of the requests while other stages compute the steps before it.

    Args:
        count: How many steps are in flight at once, each with other requests; 1: one step, or two with the same requests.
        fewest: The least number of running requests that are divided over micro-batches; fewer requests are all in each step.
        chained: Whether the device keeps the tokens that it samples. Then one more step may be in flight, with the requests of
            the oldest, so that no stage waits for the host.

    Attributes:
        count: The argument.
        depth: The most steps in flight with micro-batches; :meth:`most_in_flight` may return fewer.
    """

    def __init__(self, count: int, fewest: int = 1, *, chained: bool = False) -> None:
        self.count = count
        self.depth = count + chained if count > 1 else 1
        self._fewest, self._chained = fewest, chained

    def shares(self, requests: int) -> int:
        """Into how many micro-batches this many running requests are divided."""
        if not self._chained or self.count == 1:
            return self.count
        return max(1, min(self.count, requests)) if requests >= self._fewest else 1

    def most_in_flight(self, requests: int, *, prompts: bool) -> int:
        """How many steps may be in flight with micro-batches.

        For decodes: one step for each share, and one more where the device keeps its tokens. More steps would not help, because
        a request can be in only two steps in flight.

        Args:
            requests: How many run.
            prompts: Whether a step in flight computes a prompt; such steps keep all stages busy.
        """
        return self.depth if prompts else min(self.depth, self.shares(requests) + self._chained)

    def holds_back(self, request: Request, step: int, shares: int) -> bool:
        """True if a request that samples a token in a step in flight is missing from the step being planned.

        Args:
            request: The request.
            step: The number of the step being planned.
            shares: Into how many micro-batches the requests are divided.
        """
        if self.count == 1 or not request.unknown:
            return False
        if not self._chained or request.unknown > 1 or request.grammar is not None or request.processed:
            return True
        return request.sampled_in > step - shares


# How many prompt tokens a step takes, so that the step lasts about the wanted time. Measured steps decide it.
#
# A step's time is that of its decodes, and a fixed time for each prompt token. Both are measured while steps run, so a CPU
# and a GPU both keep the gap between the tokens of running streams bounded. Prompts get at least twelve times the time
# that the decodes take alone: most of that time is the fixed cost of a step, so more and shorter steps would compute less. Hence
# the gap is at most the wanted time, or thirteen times the time of a step of decodes, if that is longer.
# If nothing decodes, a step may last longer: only requests that arrive during the step wait for it. O(1).


_PROMPTS_ALONE = 4
"""How many times as long a step without decodes may last."""
_TIMES = 12
"""The chunks of prompts get at least this many times the time of the step's decodes."""
_UNKNOWN = 8
"""While no decode was measured, a step takes at least one part in this many of the most prompt tokens: the fixed cost of
a step is unknown, and more steps may be no shorter."""
_LEAST = 16
_WEIGHT, _FULL = 0.3, 32
"""The weight of a new measurement, and the prompt tokens from which on it has that."""
_OUTLIER = 2.0
"""A measurement above this multiple of the usual duration is a disturbance of the machine, and is ignored."""
SCORED, _MOST_SCORED = 4.0, 16.0
"""How many tokens of the budget a token counts as whose log probabilities are wanted, because the whole vocabulary is computed
for it: until that was measured, and at most. Without this, a step of 400 such tokens took 20 s on two busy cores."""
_KEPT = 256
"""Steps after which the time of decodes is measured again, by a step with one token of a prompt if there is none without."""


class StepPace:
    """The pace of a scheduler's steps.

    Args:
        seconds: How long a step with decodes should last; 0: any time.
        most: Most tokens of a step.
    """

    def __init__(self, seconds: float, most: int) -> None:
        self._seconds = seconds
        self._most = most
        self._steps = 0
        # By the power of two of the decodes: seconds, and the step in which they were measured.
        self._plain: dict[int, tuple[float, int]] = {}
        self._each: float | None = None
        # Seconds that a token takes longer whose log probabilities are wanted.
        self._longer: float | None = None

    @property
    def scored_cost(self) -> float:
        """How many tokens a token counts as whose log probabilities are wanted; at least one."""
        if self._longer is None or not self._each:
            return SCORED
        return min(_MOST_SCORED, 1.0 + self._longer / self._each)

    def tokens(self, decodes: int) -> int:
        """The most prompt tokens that a step with this many decodes takes; at least one."""
        if not self._seconds:
            return self._most
        least = max(_LEAST, self._most // _UNKNOWN)
        if self._each is None:
            return least
        _, measured = self._plain.get(decodes.bit_length(), (0.0, -_KEPT))
        if decodes and self._steps - measured >= _KEPT:
            return 1
        plain = self._usual(decodes)
        wanted = self._seconds if decodes else _PROMPTS_ALONE * self._seconds
        seconds = max(wanted - (plain or 0.0), _TIMES * (plain or 0.0))
        if self._each * self._most <= seconds:
            return self._most
        return max(_LEAST if plain is not None else least, int(seconds / self._each))

    def took(self, decodes: int, prompts: int, seconds: float, scored: int = 0) -> None:
        """Notes the duration of a step, with its numbers of decodes and prompt tokens, and of those whose log probabilities are
        wanted."""
        if not self._seconds or not (decodes or prompts):  # it may only have copied pages
            return
        self._steps += 1
        if prompts <= 1 + decodes // 16 and decodes:
            known = self._plain.get(decodes.bit_length())
            usual = seconds if known is None else _mean(known[0], seconds, _WEIGHT)
            self._plain[decodes.bit_length()] = usual, self._steps
            return
        rest = max(0.0, seconds - (self._usual(decodes) or 0.0))
        if scored and self._each is not None:
            longer = max(0.0, rest - self._each * prompts) / scored
            weight = _WEIGHT * min(1.0, scored / _FULL)
            self._longer = longer if self._longer is None else _mean(self._longer, longer, weight)
            return
        each = rest / prompts
        if self._each is None:
            self._each = each
        else:
            self._each = _mean(self._each, each, _WEIGHT * min(1.0, prompts / _FULL))

    def _usual(self, decodes: int) -> float | None:
        """Seconds of a step with about this many decodes and no prompt; None: no such step was measured. For no decodes: the
        fixed cost of a step."""
        if not self._plain:
            return None
        bucket = max(1, decodes.bit_length())
        return self._plain[min(self._plain, key=lambda known: (abs(known - bucket), known))][0]


def _mean(known: float, new: float, weight: float) -> float:
    return known + weight * (min(new, _OUTLIER * known) - known) if known else new


# One step from its plan to its tokens: what each request computes in it, and the plan for the runner. O(requests).


Chunk = tuple[Request, int]
"""A request and how many of its next tokens are computed."""


class StepInFlight:
    """A step on its way; constructing it notes on each of its requests what the step computes.

    Args:
        number: The step's.
        decodes: Requests whose last known token, one of output, the step computes, to sample the next.
        chunks: Everything else: parts of prompts, whether or not they reach the end.
        running: Holds their rows and pages.
        copies: The page copies that run before the step.
        filler: Fills grammar masks, beginning now; None: no request has a grammar.
        drafts: For each of ``decodes``, the draft tokens after the next one; empty: no draft. Only if there are no chunks.
        forced: Whether the drafts are of text that grammars force.
        joins: The requests that sample after the end of a chunk of another one.

    Attributes:
        decodes, chunks, drafts, forced, joins: The arguments.
        samples: For each chunk whether it samples.
        plan: The plan for the runner, decodes first.
        scored: For each of the plan's scores, whose it is, and which of the request's tokens.
        saved: The snapshots of states that it takes: requests, and after how many tokens.
        written: A handle of the last page that each part writes, made when the step is planned.
        awaits_tokens: Whether the next step can be planned only after this step's tokens are known: a grammar, a logit processor
            or a draft needs them.
    """

    __slots__ = (
        "_filled", "awaits_tokens", "chunks", "decodes", "drafts", "forced", "joins", "plan", "samples", "saved", "scored",
        "written",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        decodes: list[Request],
        chunks: list[Chunk],
        running: RunningBatch,
        copies: Copies | None,
        filler: MaskFiller | None,
        drafts: Sequence[list[int]] = (),
        *,
        forced: bool = False,
        joins: Sequence[Join] = (),
    ) -> None:
        assert not (chunks and drafts)
        self.joins = joins
        self.forced = forced
        self.decodes = decodes
        self.chunks = chunks
        self.drafts = drafts
        rows: list[int] = []
        starts: list[int] = []
        tokens: list[int] = []
        grammars: list[GrammarState] = []
        masked: list[int] = []
        processed = False
        scores: list[tuple[int, int, int]] = []
        self.scored: list[tuple[Request, int]] = []
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
                ends = start + count == len(request.token_ids) + request.unknown
                samples = ends and not request.pooling and request.walk is None
                if request.walk is not None:
                    wanted = request.walk.branch.wanted
                    for position in range(start, start + count) if wanted else ():
                        for token, scored in wanted.get(position, ()):
                            self.scored.append((request, scored))
                            scores.append((len(rows) - 1, position - start, token))
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
            for place, (request, _, _) in enumerate(joins, sampling):
                request.in_flight += 1
                processed = processed or request.processed
                if request.grammar is not None:
                    masked.append(place)
                    grammars.append(request.grammar)
            computed = np.concatenate(known_tokens)
            each = np.array(counts, np.int64)
            sampled = np.array([1] * len(decodes) + self.samples, np.int64)
            entries = (
                *(_enter(request, running) for request, _ in chunks if request.enters),
                *map(_enter_beside, joins),
            )
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
        if scores:
            plan.scored = np.array(scores, np.int64)
        if joins:
            plan.joins = np.array([(join.slot, join.part) for join in joins], np.int64)
        requests = self._computed
        plan.again, saves = running.plan_states(requests, begins, each)
        self.saved = [(requests[part], tokens) for part, tokens, _ in saves]
        if saves:
            plan.saves = np.array([(part, tokens - starts[part], slot) for part, tokens, slot in saves], np.int64)
        self._filled = None
        if grammars:
            assert filler is not None, "a request has a grammar, but nothing fills masks"
            drafted = [draft for request, draft in zip(decodes, drafts, strict=False) if request.grammar is not None]
            self._filled = plan.masks = filler.start(grammars, drafted)
            plan.masked = np.array(masked, np.int64)
        self.awaits_tokens = bool(grammars or drafts) or processed

    def __len__(self) -> int:
        """How many requests are part of the step."""
        return len(self.plan.rows) + len(self.joins)

    @property
    def requests(self) -> Sequence[Request]:
        """Every request that is part of the step, in the order of the answer's tokens."""
        return [*self._computed, *(join.request for join in self.joins)]

    @property
    def _computed(self) -> Sequence[Request]:
        return [*self.decodes, *(request for request, _ in self.chunks)]

    def release_grammars(self) -> None:
        """Waits until the step's masks have been filled, so that its grammars may advance or be closed."""
        if self._filled is not None:
            self._filled.exception()


def _tokens(request: Request, start: int, count: int) -> IntArray:
    """A request's next tokens; -1 for the last of them if a step in flight samples it."""
    tokens = np.full(count, -1, np.int64)
    known = min(count, len(request.token_ids) - start)
    tokens[:known] = np.frombuffer(request.token_ids, np.uint32, known, start * request.token_ids.itemsize)
    return tokens


def _enter(request: Request, running: RunningBatch) -> Entry:
    """The facts for the runner about a request that has just got a row."""
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
        request.lora_slot,
        running.enter_state(request),
        request.pictured(),
    )


def _enter_beside(join: Join) -> Entry:
    """The facts for the runner about a request that has joined a step."""
    request, sampling = join.request, join.request.sampling
    tokens = request.token_ids.tobytes() if looks_back(sampling) else b""
    return Entry(join.slot, request.serial, sampling, request.output_start, tokens, request.prompt_length)


def looks_back(sampling: SamplingParams) -> bool:
    """Whether sampling a token needs the earlier tokens themselves, not just logits."""
    penalties = sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty
    return penalties != (0.0, 0.0, 1.0) or bool(sampling.bad_words_ids or sampling.logit_processors)
