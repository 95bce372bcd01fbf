"""A runner without a model, for tests of everything around it: any error in the handling of pages shows as a wrong token.

It ships with the protocol it imitates and is also what ``sapwood_testing.worker.fake_worker`` serves.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.errors import InvalidArgumentError, UnimplementedError
from sapwood_common.grammar.vocabulary import TokenVocabulary
from sapwood_testing.worker.fake_transfer import FakeTransfer
from sapwood_worker.model.pools.host_pool import HostPool
from sapwood_worker.records.kv_layout import WindowGroup
from sapwood_worker.records.lora import Lora, LoraFacts
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.output import Pooling, TokenLogprobs
from sapwood_worker.records.step import NOTHING, Entry, ModelOutput, Step
from sapwood_worker.records.weights import Memory, TrainerGroup, WeightBucket, WeightsFacts

_MASK = (1 << 62) - 1
_STATES = 997
"""Hidden states are one number below this, so that sums of them are exact in float32."""


def _mix(chain: int, token: int, position: int) -> int:
    value = (chain * 6364136223846793005 + token * 1442695040888963407 + position + 1) & _MASK
    return value ^ (value >> 29)


def fake_lora(folder: Path, content: str, rank: int = 8) -> Path:
    """Writes an adapter that :class:`FakeRunner` reads; ``content`` makes its weights. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank}))
    (folder / "adapter_model.safetensors").write_bytes(content.encode())
    return folder


def fake_digest(folder: Path) -> bytes:
    """What :class:`FakeRunner` says of an adapter's content."""
    files = ("adapter_config.json", "adapter_model.safetensors")
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in files)).digest()


def fake_weights(content: bytes) -> bytes:
    """What stands for weights of this content in :class:`FakeRunner`: the ``digest`` of :func:`continuation`."""
    return hashlib.sha256(content).digest()[:16]


def _lora_seed(digest: bytes) -> int:
    return int.from_bytes(digest[:7], "little")


def continuation(
    prompt: Sequence[int], sampling: SamplingParams, vocab_size: int, digest: bytes = b""
) -> Iterator[int]:
    """The tokens that :class:`FakeRunner` samples after a prompt, without end, computed without pages or batches.

    Args:
        prompt: Its tokens.
        sampling: How to sample.
        vocab_size: Every token is below it.
        digest: That of the adapter (:func:`fake_digest`) or the weights (:func:`fake_weights`) that compute it; empty: those of
            the start do.
    """
    chain = total = 0
    tokens, seed = list(prompt), _lora_seed(digest)
    for position, token in enumerate(tokens):
        chain = _mix(chain, token + seed, position)
        total += chain
        if position == len(tokens) - 1:
            sampled = _sample(total, position + 1, sampling, vocab_size)
            tokens.append(sampled)
            yield sampled


def random_windows(chance: random.Random, page_size: int, num_pages: int) -> tuple[WindowGroup, ...]:
    """No window, one or two, of random reach; their pages do for little more than one request, or for more."""
    windows = []
    for _ in range(chance.choice([0, 1, 1, 2])):
        reach = chance.choice([0, 1, page_size, chance.randint(1, 6 * page_size)])
        least = WindowGroup(reach, 0).least(page_size)
        windows.append(WindowGroup(reach, chance.choice([least, chance.randint(least, max(least, num_pages))])))
    return tuple(windows)


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


@dataclass(slots=True)
class _Part:
    """What a step computes of one request, with its pages, the masks of what it may sample, how many of its tokens are only there
    for the state, and the snapshots that are taken: after how many tokens, and where."""

    entry: Entry
    token_ids: list[int]
    start: int
    samples: int
    pages: npt.NDArray[np.int32]
    masks: list[npt.NDArray[np.int32] | None]
    windows: npt.NDArray[np.int32]
    again: int = 0
    saves: dict[int, int] = field(default_factory=dict)

    @property
    def prompt(self) -> array[int]:
        return array("I", self.entry.tokens)[: self.entry.prompt_length]


class FakeStep:
    """A step of :class:`FakeRunner`.

    Args:
        step: The step.
        run: Computes it.
        at: When its result may be taken, on ``time.monotonic``'s clock.
        loras: What the adapters that it loads add to tokens, by slot.
    """

    def __init__(self, step: Step, run: Callable[[FakeStep], None], at: float, loras: dict[int, int]) -> None:
        self.step = step
        self.loras = loras
        self.answer: ModelOutput | None = None
        self.error: RuntimeError | None = None
        self._run = run
        self._at = at

    @property
    def done(self) -> bool:
        """Whether it has been computed."""
        return self.answer is not None or self.error is not None

    def check(self) -> None:
        """It fails when it is asked for its result, and not before."""

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
    early, reused, or never written changes the token. If the model keeps states, the chain goes on from the row's state instead
    of the link before, so a state of other tokens changes the token as well. An adapter goes into every link that it computes:
    so does what its slot holds, if that is another adapter.

    Args:
        info: What model to claim to be.
        step_seconds: How long a step takes.
        poison: A step that computes a prompt beginning with this token fails with RuntimeError and leaves wrong KV behind.
        vocabulary: What grammars are masked with; a row with a grammar takes one of the tokens that its mask allows.
        host_pool: The second tier's memory, of pages of ``page_size * 8`` bytes for the page table and for each window.
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
        self.experts = None
        self.sums = self.check_pictures = self.picture_use = None
        self.draft = None
        self.asynchronous = True
        self._step_seconds = step_seconds
        self._busy_until = 0.0
        self._chance = chance
        self._launched: deque[FakeStep] = deque()
        # By row of the page table: its request, and what the latest step sampled.
        self._entries: dict[int, Entry] = {}
        self._last_tokens: dict[int, int] = {}
        self._poison = poison
        self._pool = np.full((info.num_pages, info.page_size), -1, dtype=np.int64)
        # Of each window; the last page is the one that freed entries of a row name.
        self._windows = [np.full((each.num_pages + 1, info.page_size), -1, np.int64) for each in info.windows]
        pools = [self._pool, *self._windows]
        self._transfer = None if host_pool is None else FakeTransfer(pools, host_pool, chance, copy_failures)
        # By row its request's state, the tokens that it has seen and their chain, and the snapshots of states.
        self._states: dict[int, tuple[int, int]] = {}
        self._snapshots: dict[int, tuple[int, int]] = {}
        # What adapters add to the tokens of links: by number, and by slot.
        self._loras: dict[int, int] = {}
        self._slots: dict[int, int] = {}
        # The same of the model's own weights, and of updates by number.
        self._base = 0
        self._weights: dict[int, bytes] = {}

    def read_lora(self, lora: Lora) -> LoraFacts:
        """Reads what :func:`fake_lora` has written.

        Raises:
            InvalidArgumentError: It cannot be read, or its rank is too large.
            UnimplementedError: The model has no slots.
        """
        if not self.info.lora_slots:
            raise UnimplementedError("this worker has no slots for adapters")
        try:
            digest = fake_digest(Path(lora.path))
            rank = int(json.loads((Path(lora.path) / "adapter_config.json").read_text())["r"])
        except (OSError, ValueError, KeyError) as error:
            raise InvalidArgumentError(f"adapter {lora.name}: {lora.path} cannot be read: {error}") from error
        if rank > self.info.max_lora_rank:
            raise InvalidArgumentError(f"adapter {lora.name}: its rank {rank} is above {self.info.max_lora_rank}")
        self._loras[lora.number] = _lora_seed(digest)
        return LoraFacts(lora.number, digest, rank, ("self_attn.q_proj",), 1000 * rank)

    def drop_lora(self, number: int) -> None:
        del self._loras[number]

    def stage_weights(self, bucket: WeightBucket) -> WeightsFacts:
        """Reads a file, any one: its content stands for weights (:func:`fake_weights`).

        Raises:
            InvalidArgumentError: It begins with ``bad``.
        """
        content = Path(bucket.path).read_bytes()
        if content.startswith(b"bad"):
            raise InvalidArgumentError("tensor bad is wrong", field="tensors")
        self._weights[bucket.update] = fake_weights(content)
        return WeightsFacts(b"", 1, len(content))

    def ready_weights(self, update: int, *, partial: bool) -> WeightsFacts:
        return WeightsFacts(self._weights[update], 1, 0)

    def exchange_weights(self, update: int, *, keep: bool) -> bytes:
        digest = self._weights.pop(update)
        self._base = _lora_seed(digest)
        return digest

    def join_group(self, group: TrainerGroup) -> None:
        """Raises UnimplementedError: it takes no tensors."""
        raise UnimplementedError("a fake runner joins no group")

    def leave_group(self, name: str) -> bool:
        return False

    def release_memory(self, memory: Sequence[Memory], folder: str) -> int:
        """Spoils what the pages hold."""
        if "kv_cache" in memory:
            self._pool[:] = -1
        return 1000 * len(memory)

    def restore_memory(self, memory: Sequence[Memory], folder: str) -> None:
        """Nothing: weights are but a number."""

    def drop_weights(self, update: int) -> None:
        self._weights.pop(update, None)

    @property
    def loras(self) -> set[int]:
        """The numbers of adapters that were read and not dropped."""
        return set(self._loras)

    def exchanged_bytes(self, tokens: int) -> int:
        return 0

    def cache_identity(self) -> str:
        return "fake"

    def own_pool(self) -> None:
        return None

    @property
    def pages(self) -> npt.NDArray[np.int64]:
        """What the device's pages hold: [num_pages, page_size]."""
        return self._pool

    def execute(self, step: Step) -> ModelOutput:
        """Computes a step as a real runner would.

        Raises:
            RuntimeError: A prompt begins with the poison token.
        """
        return self.launch(step).result()

    def launch(self, step: Step) -> FakeStep:
        self._busy_until = max(self._busy_until, time.monotonic()) + self._step_seconds
        assert all(0 <= load.slot < self.info.lora_slots for load in step.lora_loads), "there is no such slot"
        loras = {load.slot: self._loras[load.number] for load in step.lora_loads}
        launched = FakeStep(step, self._run, self._busy_until, loras)
        self._launched.append(launched)
        if self._chance is None or self._chance.random() < 0.5:
            self._run(launched)
        return launched

    def _run(self, last: FakeStep) -> None:
        """Computes what has been launched, in order, up to a step."""
        while not last.done:
            step = self._launched.popleft()
            try:
                step.answer = self._compute(step.step, step.loras)
            except RuntimeError as error:
                step.error = error

    def _compute(self, step: Step, seeds: dict[int, int]) -> ModelOutput:
        if step.copies is not None:
            assert self._transfer is not None
            self._transfer.start(step.copies)
        pools = [self._pool, *self._windows]
        contents = [pools[group][source].copy() for group, source, _ in step.page_copies.tolist()]
        for (group, _, target), content in zip(step.page_copies.tolist(), contents, strict=True):
            pools[group][target] = content
        self._slots.update(seeds)
        for entry in step.entries:
            self._entries[entry.row] = entry
            self._states[entry.row] = (0, 0) if entry.snapshot < 0 else self._snapshots[entry.snapshot]
        step.settle()
        masks = {} if step.masks is None else dict(zip(step.masked.tolist(), step.masks.result(), strict=True))
        parts = self._parts(step, masks)
        # All KV is written before any is read for sampling: two requests that write the same page show it.
        for part in parts:
            if part.token_ids[0] == -1:
                part.token_ids[0] = self._last_tokens[part.entry.row]
            self._write(part)
        if self._transfer is not None:
            self._transfer.written()
        for part in parts:
            if not self._sees(part):
                self._spoil(part)
        parts += self._joined(step, parts, masks)
        tokens = [self._sampled(part) for part in parts]
        for part, sampled in zip(parts, tokens, strict=True):
            self._last_tokens[part.entry.row] = sampled[-1] if sampled else -1
        logprobs = {
            i: [_logprobs(token, part.entry.sampling.logprobs, self.info.vocab_size) for token in sampled]
            for i, (part, sampled) in enumerate(zip(parts, tokens, strict=True))
            if sampled and part.entry.sampling.logprobs is not None
        }
        prompt_logprobs = {
            i: [
                _logprobs(token, part.entry.prompt_logprobs, self.info.vocab_size)
                for place, token in enumerate(part.prompt[part.start + 1 :][: len(part.token_ids)], part.start)
                if place >= part.entry.sampling.prompt_logprobs_start
            ]
            for i, part in enumerate(parts)
            if part.entry.prompt_logprobs is not None and part.start + 1 < len(part.prompt)
        }
        if any(part.start == 0 and part.token_ids[0] == self._poison for part in parts):
            for part in parts:
                self._spoil(part)
            if self._transfer is not None:
                self._transfer.finish(failed=True)
            raise RuntimeError(f"a prompt begins with token {self._poison}")
        if self._transfer is not None:
            self._transfer.finish()
        copied = NOTHING if self._transfer is None else self._transfer.poll()
        pooled = {i: np.array([self._pooled(part)], np.float32) for i, part in enumerate(parts) if part.entry.pooling}
        return ModelOutput(step.number, tokens, copied, logprobs, prompt_logprobs, pooled)

    def _parts(self, step: Step, masks: dict[int, npt.NDArray[np.int32]]) -> list[_Part]:
        ends = np.cumsum(step.counts)
        parts: list[_Part] = []
        tables = 1 + len(self._windows)
        sampled = 0
        for row, start, count, end, samples, pages in zip(
            *(each.tolist() for each in (step.rows, step.starts, step.counts, ends, step.samples)),
            step.pages.reshape(len(step.rows), tables, step.pages.shape[1] // tables),
            strict=True,
        ):
            assert count, f"nothing to compute for row {row}"
            tokens = step.token_ids[end - count : end].tolist()
            own = [masks.get(place) for place in range(sampled, sampled + samples)]
            parts.append(_Part(self._entries[row], tokens, start, samples, pages[0], own, pages[1:]))
            sampled += samples
        for part, again in zip(parts, step.again.tolist(), strict=False):
            part.again = again
        for at, after, snapshot in step.saves.tolist():
            assert self.info.states is not None and 0 <= snapshot < self.info.states.snapshots
            parts[at].saves[after] = snapshot
        return parts

    def _joined(self, step: Step, parts: list[_Part], masks: dict[int, npt.NDArray[np.int32]]) -> list[_Part]:
        """The requests that sample after a part's last token, as parts that compute what it does."""
        first = int(step.samples.sum())
        joined = []
        for place, (row, at) in enumerate(step.joins.tolist(), first):
            assert row not in step.rows
            joined.append(replace(parts[at], entry=self._entries[row], samples=1, masks=[masks.get(place)]))
        return joined

    def _pooled(self, part: _Part) -> float:
        positions = np.arange(part.start, part.start + len(part.token_ids))
        links = self._pool[part.pages[positions // self.info.page_size], positions % self.info.page_size]
        return _pool((links % _STATES).tolist(), part.entry.pooling)

    def _write(self, part: _Part) -> None:
        size, pages, start, slot = self.info.page_size, part.pages, part.start, part.entry.lora_slot
        seed = self._base if slot < 0 else self._slots[slot]
        chain = int(self._pool[pages[(start - 1) // size], (start - 1) % size]) if start else 0
        if self.info.states is not None:
            seen, chain = self._states[part.entry.row]
            assert seen == start, f"the state has seen {seen} tokens where {start} come before"
        for position, token in enumerate(part.token_ids, start=start):
            chain = _mix(chain, token + seed, position)
            self._states[part.entry.row] = position + 1, chain
            if (snapshot := part.saves.get(position + 1 - start)) is not None:
                self._snapshots[snapshot] = position + 1, chain
            if position < start + part.again:
                continue
            self._pool[pages[position // size], position % size] = chain
            for pool, own in zip(self._windows, part.windows, strict=True):
                assert own[position // size] < len(pool) - 1, "a page that holds nothing is written"
                pool[own[position // size], position % size] = chain

    def _sees(self, part: _Part) -> bool:
        """Whether the part's queries find in each window what they see."""
        size, end = self.info.page_size, part.start + len(part.token_ids)
        for group, pool, own in zip(self.info.windows, self._windows, part.windows, strict=True):
            seen = np.arange(max(0, part.start - group.reach), end)
            there = pool[own[seen // size], seen % size]
            if (there != self._pool[part.pages[seen // size], seen % size]).any():
                return False
        return True

    def _spoil(self, part: _Part) -> None:
        positions = np.arange(part.start + part.again, part.start + len(part.token_ids))
        self._pool[part.pages[positions // self.info.page_size], positions % self.info.page_size] = -1

    def _sampled(self, part: _Part) -> list[int]:
        """Its tokens, up to the first that is not the one computed after it."""
        end = part.start + len(part.token_ids)
        tokens: list[int] = []
        for place, mask in enumerate(part.masks):
            position = end - part.samples + 1 + place
            tokens.append(self._sample(part, position, mask))
            if position < end and tokens[-1] != part.token_ids[position - part.start]:
                break
        return tokens

    def _sample(self, part: _Part, end: int, mask: npt.NDArray[np.int32] | None) -> int:
        links = self._pool[part.pages[: -(-end // self.info.page_size)]].reshape(-1)[:end]
        total, sampling = int(links.sum()), part.entry.sampling
        if mask is None:
            return _sample(total, end, sampling, self.info.vocab_size)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        return int(allowed[_sample(total, end, sampling, len(allowed))]) if len(allowed) else -1
