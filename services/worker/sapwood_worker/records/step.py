"""The input and output of one step of the runner: flat arrays and small records, no live objects.

The runner gets a request's facts once, in an :class:`Entry`, when the request gets a row of the page table. From then on a step
names the row, and which tokens to compute. ``step_wire.py`` writes a step into one buffer and reads it in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from sapwood_common.contract.sampling import SamplingParams
from sapwood_worker.records.expert_load import ExpertMove
from sapwood_worker.records.lora import LoraLoad
from sapwood_worker.records.output import Pooling, TokenLogprobs
from sapwood_worker.records.pictures import Pictured

# Copies of pages between device and host, as the scheduler asks for them and the runner reports them.


PageIds = npt.NDArray[np.int32]
NOT_REPORTED = -1
"""The number of a copy whose end is not reported: a load."""


@dataclass(frozen=True, slots=True)
class PageCopy:
    """One batch of pages.

    Attributes:
        number: The batch's number in reports, or ``NOT_REPORTED``.
        device: int32 [n]: page ids of the device pool.
        host: int32 [n]: page ids of the host pool; page ``host[i]`` is the copy of ``device[i]``.
        windows: For each further group of the layout's components, page ids like ``device``; -1: nothing is copied.
    """

    number: int
    device: PageIds
    host: PageIds
    windows: tuple[PageIds, ...] = ()

    def of(self, group: int) -> tuple[PageIds, PageIds]:
        """The pages of a group, and their host pages."""
        if not group:
            return self.device, self.host
        there = self.windows[group - 1] >= 0
        return self.windows[group - 1][there], self.host[there]


@dataclass(frozen=True, slots=True)
class CacheLoad:
    """The pages that a request starting with a step gets from the tiers below the device, for metrics and traces.

    Attributes:
        serial: The request.
        pages: Pages that the step loads for it.
        fetched: How many pages were read from the third tier for it before.
        began: When that read began, in seconds on the storage tier's clock.
        ended: When the last of them had come, on the same clock.
    """

    serial: int
    pages: int
    fetched: int = 0
    began: float = 0.0
    ended: float = 0.0


class LatePages(Protocol):
    """Pages that a step fills. They are chosen after the device has begun to compute the step, so that the device need not wait
    for the choice.

    Attributes:
        chosen: The chosen pages; None: not chosen yet, or there was no room.
    """

    chosen: PageCopy | None

    def take(self) -> PageCopy | None:
        """Chooses the pages at the first call, and returns them; None: there is no room for any."""
        ...


@dataclass(frozen=True, slots=True)
class Copies:
    """The copies of a step: before it computes first the stores, then the loads; while it computes, the pages that it fills.

    Stores may continue while the step computes, as long as ``fence`` is not set; a load must be in place where the step reads it.

    Attributes:
        store: Device to host; None: nothing.
        load: Host to device; None: nothing.
        fence: Neither load nor computation may begin before every store, this one and earlier ones, is done: pages that
            are being stored are about to be overwritten.
        loads: What each starting request gets by the load.
        during: Device to host, pages that the step fills, each group of layers as soon as it is computed; None: nothing. The
            next step waits for this copy. It fails if the computation fails. The step's launcher chooses the pages.
    """

    store: PageCopy | None = None
    load: PageCopy | None = None
    fence: bool = False
    loads: tuple[CacheLoad, ...] = ()
    during: LatePages | None = None


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What has ended since the last report.

    Attributes:
        done: Numbers of stores that have ended well.
        failed: Numbers of stores that have left their host pages undefined.
        store_seconds: Seconds that stores took.
        load_seconds: Seconds that loads took.
    """

    done: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    store_seconds: float = 0.0
    load_seconds: float = 0.0


NOTHING = CopyReport()


IntArray = npt.NDArray[np.int64]
Masks = npt.NDArray[np.int32]

_NONE: IntArray = np.zeros(0, np.int64)
_NO_SAVES: IntArray = np.zeros((0, 3), np.int64)
_NO_JOINS: IntArray = np.zeros((0, 2), np.int64)


class Entry(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A request that gets a row of the page table. The entry is valid until the row's next entry.

    Attributes:
        row: The row.
        serial: The request's.
        sampling: How to sample its tokens.
        output_start: How many of its tokens come before its output; the last of them may be output of an earlier attempt.
        tokens: Native uint32: prompt and output so far; empty if neither sampling nor ``prompt_logprobs`` needs them.
        prompt_length: Tokens of the prompt that ``prompt_logprobs`` is about.
        prompt_logprobs: Whether log probabilities of the prompt's tokens are wanted, and how many alternatives.
        pooling: How its hidden states are to be pooled; empty: it generates.
        lora_slot: The slot of its adapter, which does not change as long as it has the row; -1: it has none.
        snapshot: The snapshot of the state that it continues from; -1: it begins without one.
        pictured: What it has of pictures; None: nothing.
    """

    row: int
    serial: int
    sampling: SamplingParams
    output_start: int = 0
    tokens: bytes = b""
    prompt_length: int = 0
    prompt_logprobs: int | None = None
    pooling: Pooling = ""
    lora_slot: int = -1
    snapshot: int = -1
    pictured: Pictured | None = None


class LateMasks(Protocol):
    """Grammar masks that may still be being filled. A ``concurrent.futures.Future`` is one."""

    def result(self) -> Masks:
        """Waits for the masks, int32 [G, W]: bit ``i % 32`` of word ``i // 32`` says whether token i may come.

        A runner calls it once a step: in a group of ranks each call sends or receives them.
        """
        ...


LATE = -3
"""In a step, ``LATE - i`` stands for the device's i-th draft token until the host knows it."""


class LateTokens(Protocol):
    """Drafted tokens that a device knows before the host."""

    def wait(self) -> IntArray:
        """Waits for the tokens, in the order of their numbers."""
        ...

    def seconds(self) -> float:
        """How long the device took to make them; :meth:`wait` must have returned."""
        ...


def settled(token_ids: IntArray, late: LateTokens) -> IntArray:
    """The token ids, with late tokens in place of their placeholders. Waits for the tokens."""
    return np.where(token_ids > LATE, token_ids, late.wait()[np.maximum(LATE - token_ids, 0)])


@dataclass(slots=True)
class Step:
    """One step's batch: P parts, each the next tokens of one request, prefill and decodes mixed in any order.

    A part whose last tokens are a draft samples after several of them, to see which draft tokens the model would have chosen.

    Attributes:
        number: Counts up from 0.
        rows: int64 [P]: each part's row of the page table, at most once in a step.
        starts: int64 [P]: how many tokens of the request have their KV in the cache already.
        counts: int64 [P]: how many tokens to compute, at positions ``starts`` and up; at least one.
        samples: int64 [P]: the number of last tokens after which to sample: 0 for all chunks of a prompt except the last. The
            token at position p is a function of the logits before it, the seed and p.
        token_ids: int64 [T]: the tokens, part after part; -1 for one that an unfinished step samples, which the host does not
            know yet; ``LATE`` or less for one of ``late``. With the sampled positions of all parts, in order, that makes R.
        pages: int32 [P, W]: page ids of each part's request in order; entry i holds positions ``i * page_size`` ..
            ``(i + 1) * page_size - 1``. Entries beyond the last page that the part needs are undefined. A model with windows
            (:class:`~sapwood_worker.records.model_info.ModelInfo`) has a table for each of them too, side by side, equally wide.
        entries: The requests that got a row since the last step.
        masked: int64 [G]: which of the R sampled positions have a grammar.
        masks: The tokens allowed there; None if ``masked`` is empty.
        copies: Pages to copy before the step is computed; None: none, and no report is expected. A step may have copies only.
        moves: Experts that move between ranks before the step is computed.
        lora_loads: Adapters to put into slots before the step is computed. A step may have loads only.
        rank_tokens: int64: with data-parallel attention, how many tokens each rank computes in this step; this is one rank's
            part of the step. Empty: all ranks compute the same, or there is only one.
        decodes: Whether ``rank_tokens`` counts only decodes, one token each.
        parts: With data-parallel attention, each rank's part; such a step has only number, moves and parts.
        late: Drafted tokens that the host does not know yet; None: there are none.
        again: int64 [P]: how many of each part's tokens, the first ones, have their keys and values in the cache already, and are
            computed again for the states of layers that keep one; their keys and values are not written. Empty: none.
        scored: int64 [K, 3]: log probabilities that are wanted: of a part, after which of its tokens in the step, and the token.
        page_copies: int64 [C, 3]: pages that are copied on the device after ``copies`` and before the step computes: a group of
            the layout's components, the page, and the page that it is copied to. A step may have these only.
        saves: int64 [S, 3]: snapshots of states that are taken: a part, after how many of its tokens, and the snapshot's slot.
        joins: int64 [J, 2]: further requests that sample after the last token of a part, which is the end of their prompt too:
            their row, which no part has, and the part. Their sampled positions come after those of the parts. No part of such a
            step has a draft.
    """

    number: int
    rows: IntArray = field(default_factory=lambda: _NONE)
    starts: IntArray = field(default_factory=lambda: _NONE)
    counts: IntArray = field(default_factory=lambda: _NONE)
    samples: IntArray = field(default_factory=lambda: _NONE)
    token_ids: IntArray = field(default_factory=lambda: _NONE)
    pages: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    entries: tuple[Entry, ...] = ()
    masked: IntArray = field(default_factory=lambda: _NONE)
    masks: LateMasks | None = None
    copies: Copies | None = None
    moves: tuple[ExpertMove, ...] = ()
    lora_loads: tuple[LoraLoad, ...] = ()
    rank_tokens: IntArray = field(default_factory=lambda: _NONE)
    decodes: bool = False
    parts: tuple[Step, ...] = ()
    late: LateTokens | None = None
    again: IntArray = field(default_factory=lambda: _NONE)
    scored: IntArray = field(default_factory=lambda: _NO_SAVES)
    saves: IntArray = field(default_factory=lambda: _NO_SAVES)
    page_copies: IntArray = field(default_factory=lambda: _NO_SAVES)
    joins: IntArray = field(default_factory=lambda: _NO_JOINS)

    def settle(self) -> None:
        """Waits for late tokens and fills them in, for code that must know them."""
        if self.late is not None:
            self.token_ids, self.late = settled(self.token_ids, self.late), None

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        copies = self.copies is not None or bool(len(self.page_copies))
        return bool(len(self.rows)) or copies or bool(self.lora_loads) or any(self.parts)

    def sampled(self) -> IntArray:
        """int64 [R]: after which of the T tokens to sample. O(parts)."""
        ends = np.cumsum(self.counts)
        places = _last_of_each(ends, self.samples)
        return np.concatenate((places, ends[self.joins[:, 1]] - 1)) if len(self.joins) else places

    def sampled_positions(self) -> IntArray:
        """int64 [R]: the positions of the sampled tokens. O(parts)."""
        ends = self.starts + self.counts
        positions = _last_of_each(ends + 1, self.samples)
        return np.concatenate((positions, ends[self.joins[:, 1]])) if len(self.joins) else positions


def _last_of_each(ends: IntArray, counts: IntArray) -> IntArray:
    """The ``counts[i]`` numbers before ``ends[i]``, for one i after another."""
    return np.arange(int(counts.sum())) + np.repeat(ends - np.cumsum(counts), counts)


@dataclass(slots=True)
class ModelOutput:
    """The sampled tokens of a step.

    Attributes:
        step: The step it answers.
        token_ids: For each part, the tokens that it sampled, up to the first that differs from the draft: the same tokens as
            separate steps would sample. The last is -1 if the model's logits were not finite numbers there. Then the token of
            each of the step's ``joins``, which counts as a further part in ``logprobs`` and ``failures``.
        copied: Stores that have ended since the last report, of any step.
        logprobs: The log probabilities of ``token_ids`` (none for -1), by the part's index, if they were asked for.
        failures: By a part's index, the error of a logit processor that made its token -1.
        spared_tokens: Cached tokens that each layer did not read, as another request of the step that has them too did.
        scored: One log probability for each of the step's ``scored``.
        seen: With data-parallel attention, a digest of the rows that all ranks compute together; 0: there were none.
        parts: The answers to the step's parts, of a step that has parts.
        prompt_logprobs: For each prompt token that the step computed, those of the token after it; by the same index. None for
            tokens before the request's ``prompt_logprobs_start``.
        pooled: For each chunk that is to be pooled, float32 [hidden_size]: the sum of its tokens' hidden states, the last, or
            the first.
    """

    step: int
    token_ids: list[list[int]]
    copied: CopyReport = NOTHING
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    pooled: dict[int, npt.NDArray[np.float32]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    spared_tokens: int = 0
    seen: int = 0
    parts: tuple[ModelOutput, ...] = ()
    scored: list[float] = field(default_factory=list)


class LaunchedStep(Protocol):
    """A step that is being computed."""

    def result(self) -> ModelOutput:
        """Waits for the step and returns its output; call it once. Raises the step's error."""
        ...

    def check(self) -> None:
        """Raises the device's error, if the step is already known to have failed; does not wait."""
        ...


class ReadyMasks:
    """:class:`LateMasks` that are there.

    Args:
        masks: The masks.
    """

    def __init__(self, masks: Masks) -> None:
        self._masks = masks

    def result(self) -> Masks:
        return self._masks


class CompletedStep:
    """A :class:`LaunchedStep` that is complete from the start.

    Args:
        answer: The step's answer.
    """

    def __init__(self, answer: ModelOutput) -> None:
        self._answer = answer

    def result(self) -> ModelOutput:
        return self._answer

    def check(self) -> None:
        """Nothing can fail any more."""


class DeferredStep:
    """A :class:`LaunchedStep` whose last part is computed when it is asked for: what follows the last stage of a pipeline.

    Args:
        compute: Computes it; called once.
    """

    def __init__(self, compute: Callable[[], LaunchedStep]) -> None:
        self._compute = compute
        self._launched: LaunchedStep | None = None

    @property
    def finished(self) -> bool:
        """Whether it has been computed."""
        return self._launched is not None

    def finish(self) -> LaunchedStep:
        """Computes the step, unless it has been computed. Raises the step's error."""
        if self._launched is None:
            self._launched = self._compute()
        return self._launched

    def result(self) -> ModelOutput:
        return self.finish().result()

    def check(self) -> None:
        if self._launched is not None:
            self._launched.check()


class RankLostError(Exception):
    """A rank has failed or computes something else than the others, so that no rank can continue."""


class RankGoneError(RankLostError):
    """A rank has ended; that rank has reported the reason itself."""


class Runner(Protocol):
    """Runs the model on a step's batch.

    Attributes:
        asynchronous: Whether it computes while its caller continues.
    """

    asynchronous: bool

    def launch(self, step: Step) -> LaunchedStep:
        """Begins a step, which is computed after those launched before. At most one other step may be unfinished, or the number
        of the model's micro_batches.

        A request that an unfinished step samples for may be in this one too: its token, which the host does not know yet, is
        then -1. Reads no array of ``step`` after it has returned. Mutates as :meth:`execute` does. It and the step's result may
        raise :class:`RankLostError`, after which no step can be run.
        """
        ...

    def execute(self, step: Step) -> ModelOutput:
        """Starts the step's copies, computes the KV of every scheduled token, writes it into the page pool in place, and samples.

        Mutates only the pages of the scheduled positions and those that the copies write. The result is valid when it returns;
        a failure of the computation leaves the copies as they are.
        """
        ...
