"""A runner without a model, for tests of everything around it: any error in the handling of pages shows as a wrong token.

It ships beside the protocol it imitates and is also what ``sapwood_testing.worker.fake_worker`` serves.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.grammar.vocabulary import TokenVocabulary
from sapwood_testing.worker.fake_transfer import FakeTransfer
from sapwood_worker.model.pools.host_pool import HostPool
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.output import Pooling, TokenLogprobs
from sapwood_worker.records.page_copies import NOTHING
from sapwood_worker.records.step import ModelOutput, ScheduledRequest, SchedulerOutput

_MASK = (1 << 62) - 1
_STATES = 997
"""Hidden states are one number below this, so that sums of them are exact in float32."""


def _mix(chain: int, token: int, position: int) -> int:
    value = (chain * 6364136223846793005 + token * 1442695040888963407 + position + 1) & _MASK
    return value ^ (value >> 29)


def continuation(prompt: Sequence[int], sampling: SamplingParams, vocab_size: int) -> Iterator[int]:
    """The tokens that :class:`FakeRunner` samples after a prompt, without end, computed without pages or batches."""
    chain = total = 0
    tokens = list(prompt)
    for position, token in enumerate(tokens):
        chain = _mix(chain, token, position)
        total += chain
        if position == len(tokens) - 1:
            sampled = _sample(total, position + 1, sampling, vocab_size)
            tokens.append(sampled)
            yield sampled


def pooled_prompt(prompt: Sequence[int], pooling: Pooling) -> float:
    """What :class:`FakeRunner`'s hidden states of a prompt come to, computed without pages or chunks; ``mean`` as the sum."""
    chain = 0
    states: list[float] = []
    for position, token in enumerate(prompt):
        chain = _mix(chain, token, position)
        states.append(float(chain % _STATES))
    return _pool(states, pooling)


def _pool(states: Sequence[float], pooling: Pooling) -> float:
    return {"mean": sum(states), "last": states[-1], "cls": states[0]}[pooling]


def _sample(total: int, position: int, sampling: SamplingParams, vocab_size: int) -> int:
    return _mix(total & _MASK, sampling.seed & _MASK, position) % vocab_size


def _logprobs(token: int, alternatives: int, vocab_size: int) -> TokenLogprobs:
    """Token t is given 1 / (t + 2); the likeliest are then the first of the vocabulary."""
    top = range(min(alternatives, vocab_size))
    return TokenLogprobs(-math.log(token + 2), list(top), [-math.log(each + 2) for each in top])


class FakeStep:
    """A step of :class:`FakeRunner`.

    Args:
        output: A copy of the step.
        run: Computes it.
        at: When its result may be taken, on ``time.monotonic``'s clock.
    """

    def __init__(self, output: SchedulerOutput, run: Callable[[FakeStep], None], at: float) -> None:
        self.output = output
        self.answer: ModelOutput | None = None
        self.error: RuntimeError | None = None
        self._run = run
        self._at = at

    @property
    def done(self) -> bool:
        """Whether it has been computed."""
        return self.answer is not None or self.error is not None

    def result(self) -> ModelOutput:
        if (seconds := self._at - time.monotonic()) > 0:
            time.sleep(seconds)
        self._run(self)
        if self.error is not None:
            raise self.error
        assert self.answer is not None
        return self.answer


class FakeRunner:
    """Implements the Runner protocol over an array that stands for the KV pool.

    The "KV" of a position is a link of a hash chain over the tokens up to it; the link before it is read through the page
    table, like real KV. A sampled token is a function of the sum of all links up to it, each read through the page table, and
    of seed and position; a hidden state is a function of its position's link. So a page that was shared wrongly, freed too
    early, reused, or never written changes the token.

    Args:
        info: What model to claim to be.
        step_seconds: How long a step takes.
        poison: A step that computes a prompt beginning with this token fails with RuntimeError and leaves wrong KV behind.
        vocabulary: What grammars are masked with; a row with a grammar takes one of the tokens that its mask allows.
        host_pool: The second tier's memory, of pages of ``page_size * 8`` bytes.
        chance: Makes copies to it late, and steps be computed when they are launched or when their result is taken.
        copy_failures: Share of these that fail.
    """

    def __init__(
        self,
        info: ModelInfo,
        step_seconds: float = 0.0,
        poison: int | None = None,
        vocabulary: TokenVocabulary | None = None,
        host_pool: HostPool | None = None,
        chance: random.Random | None = None,
        copy_failures: float = 0.0,
    ) -> None:
        self.info = info
        self.host_pool = host_pool
        self.vocabulary = vocabulary
        self.asynchronous = True
        self._step_seconds = step_seconds
        self._busy_until = 0.0
        self._chance = chance
        self._launched: deque[FakeStep] = deque()
        # By row of the page table: what the latest step sampled.
        self._last_tokens: dict[int, int] = {}
        self._poison = poison
        self._pool = np.full((info.num_pages, info.page_size), -1, dtype=np.int64)
        self._transfer = None if host_pool is None else FakeTransfer(self._pool, host_pool, chance, copy_failures)

    def cache_identity(self) -> str:
        return "fake"

    def execute(self, output: SchedulerOutput) -> ModelOutput:
        """Computes a step as a real runner would.

        Raises:
            RuntimeError: A prompt begins with the poison token.
        """
        return self.launch(output).result()

    def launch(self, output: SchedulerOutput) -> FakeStep:
        self._busy_until = max(self._busy_until, time.monotonic()) + self._step_seconds
        step = FakeStep(replace(output, page_table=output.page_table.copy()), self._run, self._busy_until)
        self._launched.append(step)
        if self._chance is None or self._chance.random() < 0.5:
            self._run(step)
        return step

    def _run(self, last: FakeStep) -> None:
        """Computes what has been launched, in order, up to a step."""
        while not last.done:
            step = self._launched.popleft()
            try:
                step.answer = self._compute(step.output)
            except RuntimeError as error:
                step.error = error

    def _compute(self, output: SchedulerOutput) -> ModelOutput:
        if output.copies is not None:
            assert self._transfer is not None
            self._transfer.start(output.copies)
        # All KV is written before any is read for sampling: two requests that write the same page show it.
        for request in output.requests:
            assert request.token_ids, f"nothing to compute for {request.request_id}"
            if request.token_ids == [-1]:
                request.token_ids = [self._last_tokens[request.slot]]
            self._write(request, output.page_table[request.slot])
        tokens = [
            self._sampled(request, output.page_table[request.slot]) if request.samples else -1
            for request in output.requests
        ]
        for request, token in zip(output.requests, tokens, strict=True):
            self._last_tokens[request.slot] = token
        logprobs = {
            i: _logprobs(token, request.sampling.logprobs, self.info.vocab_size)
            for i, (request, token) in enumerate(zip(output.requests, tokens, strict=True))
            if token >= 0 and request.sampling.logprobs is not None
        }
        prompt_logprobs = {
            i: [
                _logprobs(token, request.prompt_logprobs, self.info.vocab_size)
                for token in request.history[request.start + 1 : request.prompt_length][: len(request.token_ids)]
            ]
            for i, request in enumerate(output.requests)
            if request.prompt_logprobs is not None
        }
        if any(request.start == 0 and request.token_ids[0] == self._poison for request in output.requests):
            for request in output.requests:
                self._spoil(request, output.page_table[request.slot])
            raise RuntimeError(f"a prompt begins with token {self._poison}")
        copied = NOTHING if self._transfer is None else self._transfer.poll()
        pooled = {
            i: np.array([self._pooled(request, output.page_table[request.slot])], np.float32)
            for i, request in enumerate(output.requests)
            if request.pooling
        }
        return ModelOutput(output.step, tokens, copied, logprobs, prompt_logprobs, pooled)

    def _pooled(self, request: ScheduledRequest, row: np.ndarray[tuple[int], np.dtype[np.int32]]) -> float:
        positions = np.arange(request.start, request.start + len(request.token_ids))
        links = self._pool[row[positions // self.info.page_size], positions % self.info.page_size]
        return _pool((links % _STATES).tolist(), request.pooling)

    def _write(self, request: ScheduledRequest, row: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
        size = self.info.page_size
        start = request.start
        chain = int(self._pool[row[(start - 1) // size], (start - 1) % size]) if start else 0
        for position, token in enumerate(request.token_ids, start=start):
            chain = _mix(chain, token, position)
            self._pool[row[position // size], position % size] = chain

    def _spoil(self, request: ScheduledRequest, row: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
        positions = np.arange(request.start, request.start + len(request.token_ids))
        self._pool[row[positions // self.info.page_size], positions % self.info.page_size] = -1

    def _sampled(self, request: ScheduledRequest, row: np.ndarray[tuple[int], np.dtype[np.int32]]) -> int:
        end = request.start + len(request.token_ids)
        links = self._pool[row[: -(-end // self.info.page_size)]].reshape(-1)[:end]
        total = int(links.sum())
        if request.grammar is None:
            return _sample(total, end, request.sampling, self.info.vocab_size)
        mask = np.zeros(-(-self.info.vocab_size // 32), np.int32)
        request.grammar.fill(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        return int(allowed[_sample(total, end, request.sampling, len(allowed))])
