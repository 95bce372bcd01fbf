"""What one scheduler step hands to the runner and what comes back."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sapwood_common.contract.sampling import SamplingParams
from sapwood_worker.records.grammar_state import GrammarState
from sapwood_worker.records.output import Pooling, TokenLogprobs
from sapwood_worker.records.page_copies import NOTHING, Copies, CopyReport


@dataclass(slots=True)
class ScheduledRequest:
    """The part of one request that a step computes. The scheduler's own: valid until the step's ``update()``.

    Attributes:
        request_id: For error messages and traces.
        slot: The request's row in the page table; stable while the request runs.
        token_ids: The tokens to compute, at positions ``start`` .. ``start + len(token_ids) - 1``. One token for a decode; -1
            if it is the one that the step before samples and the host does not know it yet.
        start: How many tokens before them have their KV in the cache already.
        samples: Whether to sample the token that follows the last of ``token_ids``: false for all but the last chunk of a
            prompt.
        sampling: How to sample it. The sampled token's position, for seeding, is ``start + len(token_ids)``.
        grammar: What that token must match, if the request has a grammar. The runner only fills masks from it; the scheduler
            accepts the token.
        admission: Unique for each time a request is given a row: what the runner notes about the row is good for as long as
            this stays the same. -1: good for this step only.
        history: uint32: prompt and output so far. The scheduler's own array, valid until the next ``update()``.
        output_start: Where in ``history`` the output begins.
        prompt_length: Where in ``history`` the prompt ends that ``prompt_logprobs`` is about.
        prompt_logprobs: Whether log probabilities of the prompt's tokens are wanted, and how many alternatives.
        serial: The request's.
        pooling: How its hidden states are to be pooled; empty: it generates.
    """

    request_id: str
    slot: int
    token_ids: list[int]
    start: int
    samples: bool
    sampling: SamplingParams
    grammar: GrammarState | None = None
    admission: int = -1
    history: array[int] = field(default_factory=lambda: array("I"))
    output_start: int = 0
    prompt_length: int = 0
    prompt_logprobs: int | None = None
    serial: int = -1
    pooling: Pooling = ""


@dataclass(slots=True)
class SchedulerOutput:
    """One step's batch.

    Attributes:
        step: Counts up from 0.
        page_table: int32 [max_running, max_pages]: row ``slot`` holds the page ids of that request in order; entry i holds
            positions ``i * page_size`` .. ``(i + 1) * page_size - 1``. It is the scheduler's own array: valid until the
            next ``schedule()``, never written by the runner. Entries beyond a request's last page are undefined.
        requests: The batch, prefill chunks and decodes mixed in any order; empty when there is nothing to do.
        copies: Pages to copy before it is computed; None: none, and no report is expected. A step may have copies only.
    """

    step: int
    page_table: npt.NDArray[np.int32]
    requests: list[ScheduledRequest] = field(default_factory=list)
    copies: Copies | None = None

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.requests) or self.copies is not None


@dataclass(slots=True)
class ModelOutput:
    """The sampled tokens of a step.

    Attributes:
        step: The step it answers.
        token_ids: One entry for each of ``SchedulerOutput.requests``, in order; -1 where nothing was sampled: because it was
            not asked for, or because the model's logits were not finite numbers.
        copied: Stores that have ended since the last report, whatever step they went with.
        logprobs: Of the sampled tokens, by index into ``SchedulerOutput.requests``, where asked for.
        prompt_logprobs: For each prompt token that the step computed, those of the token after it; by the same index.
        pooled: For each chunk that is to be pooled, float32 [hidden_size]: the sum of its tokens' hidden states, the last, or
            the first.
    """

    step: int
    token_ids: list[int]
    copied: CopyReport = NOTHING
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    pooled: dict[int, npt.NDArray[np.float32]] = field(default_factory=dict)


class LaunchedStep(Protocol):
    """A step that is being computed."""

    def result(self) -> ModelOutput:
        """Waits for the step and returns its answer; to be called once. Raises what the step failed with."""
        ...


class CompletedStep:
    """A :class:`LaunchedStep` that was over at once.

    Args:
        answer: Of the step.
    """

    def __init__(self, answer: ModelOutput) -> None:
        self._answer = answer

    def result(self) -> ModelOutput:
        return self._answer


class Runner(Protocol):
    """Runs the model on a step's batch.

    Attributes:
        asynchronous: Whether it computes while its caller goes on.
    """

    asynchronous: bool

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        """Begins a step, which is computed after those launched before. At most one other may be unfinished.

        A request that an unfinished step samples for may be in this one too: its token, which the host does not know yet, is
        then -1. Copies what it needs of ``output`` before it returns. Mutates as :meth:`execute` does.
        """
        ...

    def execute(self, output: SchedulerOutput) -> ModelOutput:
        """Starts the step's copies, computes the KV of every scheduled token, writes it into the page pool in place, and samples.

        Mutates only the pages of the scheduled positions and those that the copies write. The result is valid when it returns;
        a failure of the computation leaves the copies as they are.
        """
        ...
