"""One request inside the scheduler."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from sapwood_common.contract.sampling import SamplingParams
from sapwood_worker.core.cache.page_key import PictureName, PictureNames
from sapwood_worker.core.scheduler.score_walk import Branch, ScoreWalk
from sapwood_worker.records.continuations import Continuation, longest
from sapwood_worker.records.grammar_state import GrammarState
from sapwood_worker.records.handoff import HandoffTicket
from sapwood_worker.records.output import Pooling, TokenLogprobs
from sapwood_worker.records.pictures import Picture, Pictured

# The states of a request and the ways between them.


class RequestState(Enum):
    """Where a request is."""

    WAITING = "waiting"
    """In the queue: it has no row and no pages."""
    RUNNING = "running"
    """It has a row in the page table; each step computes some of its tokens."""
    FINISHED = "finished"
    """The request has ended, for any reason; only its pages in the prefix cache remain."""


_ALLOWED = {
    RequestState.WAITING: {RequestState.RUNNING, RequestState.FINISHED},
    RequestState.RUNNING: {RequestState.WAITING, RequestState.FINISHED},
    RequestState.FINISHED: set[RequestState](),
}


class IllegalTransitionError(AssertionError):
    """A request was about to make a state transition that is not allowed: a bug in Sapwood."""


def check_transition(request_id: str, old: RequestState, new: RequestState) -> None:
    """Raises IllegalTransitionError unless a request may go from ``old`` to ``new``."""
    if new not in _ALLOWED[old]:
        raise IllegalTransitionError(f"request {request_id}: {old.value} -> {new.value}")


# The drafts of one request: its drafter, and how often its draft tokens were right.


_FAST, _SLOW = 0.15, 0.015
"""How much one token changes the fast rate, for text whose nature changes, and the slow rate, for steady text."""
_NEARER = 0.01
"""In a step that teaches nothing about a request's rate, the rate moves this share of the way to the other requests' rate."""
_MEMORY = 0.99
"""Each token multiplies the evidence about which rate is better by this factor."""
_CLEARLY = -1.0
"""The fast rate is used only if the slow rate was this much worse in squared errors: the fast one may merely be lucky."""


def learned(rate: float, right: int, wrong: int, weight: float) -> float:
    """A rate, updated by ``right`` foreseen and ``wrong`` unforeseen tokens."""
    return (1 - (1 - rate) * (1 - weight) ** right) * (1 - weight) ** wrong


class RowDrafter(Protocol):
    """Guesses the next tokens of one request."""

    def follow(self) -> tuple[int, int]:
        """Reads the request's tokens since the last call; returns how many of them it foresaw and how many it got wrong.

        Tokens without a guess count as neither. A guess counts whether or not it was drafted.
        """
        ...

    def propose(self, unknown: int, most: int) -> list[int]:
        """The draft tokens, at most ``most``, after the request's tokens and ``unknown`` further ones; -1 for a token that
        would have to be computed."""
        ...


class RequestDrafts:
    """What is known of one request's drafts.

    Args:
        drafter: The attribute.
        rate: What to begin with.

    Attributes:
        drafter: Makes them.
        drafted: Tokens drafted so far.
        accepted: How many of these became output.
        patience: Tokens after which its drafter is tried again; grows with each failed trial.
        tried_again: The request's length, in tokens, at which its drafter is tried again.
    """

    __slots__ = ("_fast", "_known", "_slow", "_slower", "accepted", "drafted", "drafter", "patience", "tried_again")

    def __init__(self, drafter: RowDrafter, rate: float = 0.0) -> None:
        self.drafter = drafter
        self._fast = self._slow = rate
        self._slower = 0.0  # squared errors of the fast rate minus those of the slow one
        self._known = 0
        self.drafted = self.accepted = 0
        self.patience = self.tried_again = 0

    @property
    def rate(self) -> float:
        """The chance that the next token is the foreseen one."""
        return self._slow if self._slower > _CLEARLY else self._fast

    def learn(self, others: float | None = None) -> float:
        """Learns from the tokens since the last call and returns the rate; without new tokens the rate moves towards
        ``others``."""
        right, wrong = self.drafter.follow()
        if others is not None and not right and not wrong:
            self._fast += _NEARER * (others - self._fast)
            self._slow += _NEARER * (others - self._slow)
        for outcome in (1.0,) * right + (0.0,) * wrong:
            fast, slow = outcome - self._fast, outcome - self._slow
            self._slower = _MEMORY * self._slower + fast * fast - slow * slow
            self._known += 1
            self._fast += _FAST * fast
            self._slow += max(_SLOW, 1 / (self._known + 1 / _FAST)) * slow
        return self.rate


class Request:
    """A prompt on its way to its end.

    Prefill, decode and recomputation after a retraction work alike: ``token_ids`` are all known tokens, ``computed`` counts
    those whose KV is in place, and a step that computes the last one samples the next token.

    Attributes:
        serial: Its unique number, never used again.
        request_id: The client's name for it, for messages to people.
        token_ids: Prompt and output so far, uint32.
        prompt_length: Tokens of the prompt.
        sampling: How to sample, and when to end.
        namespace: Requests of different namespaces share no cached pages.
        priority: Higher goes first, where the policy heeds priorities.
        tenant: On whose behalf it runs; tenants get equal shares.
        deadline: When the request is ended even if unfinished, in seconds on the scheduler's clock; None: never.
        pooling: How its hidden states become an embedding, which is then its only output; empty: it generates.
        hands_off: Whether it ends with its first token, and its pages are kept for another worker.
        ticket: The ticket for pages of its prompt that another worker keeps; None: no ticket.
        lora: The number of its adapter; 0: none.
        pictures: Those in its prompt, in order.
        walk: The continuations that it scores; ``token_ids`` end with what is computed of them now. None: it generates.
        lora_slot: The adapter's slot while the request runs, else -1.
        pooled: float32 [hidden_size]: the hidden states of its chunks so far, pooled.
        whole: Whether its prompt must be computed in one step.
        unsplit: Whether each of its pictures must be.
        grammar: What the output must match; kept while the request waits or is retracted, closed when it ends.
        max_length: The request ends when prompt and output have this many tokens; set when it is accepted.
        computed: Leading tokens whose KV is in the request's pages.
        cached: Prompt tokens found in the prefix cache when the request first ran; None before.
        slot: Row in the page table while running, else -1.
        arrival: Order of arrival.
        queued_at: Step at which it was last put into the queue.
        waited: How many steps it waited in the queue before it last started, plus later steps that computed nothing of its
            prompt.
        rank: Its place among running requests, set at admission: the last one is retracted first.
        retractions: How often it was sent back to the queue.
        capacity: Tokens that its pages hold; 0 without a row.
        reach: Tokens that its window pages hold, including freed ones; 0 without a row.
        stops: The tokens that end it; set when it is accepted.
        jumps: Whether tokens that its grammar forces are appended without running the model; set when it is accepted.
        forced_rate: How often tokens that spell text its grammar forces were the model's own choice of late; 0: none is drafted.
        over: Whether it has ended for its client while steps in flight still compute it. It keeps its row until those steps are
            done.
        planned: ``computed`` and the tokens that steps in flight compute.
        in_flight: Steps in flight that compute it.
        unknown: Tokens that steps in flight sample for it; 0 or 1 when a step with it is planned.
        sampled_in: The number of the last step that samples a token for it.
        shared: Whether its pages may stay in the prefix cache when it ends.
        size: The uncached tokens when it was first looked at in the queue; None: not looked at yet.
        held: Whether it waits for pages that are being fetched, or has joined a step; until then it is not admitted.
        prompt_key: What it has in common with requests whose steps it can join (``joining.py``); None: it can join none.
        output_start: Where in ``token_ids`` the output begins: before the prompt's end if the prompt includes output of an
            earlier attempt.
        enters: Whether the request has a row that the runner does not know yet.
        prompt_logprobs: Log probabilities of prompt tokens that have not been sent with an output yet.
        processed: Whether it has logit processors.
        failure: The error of one of its logit processors.
        drafts: The state of its drafts; None: it never had any.

    Args:
        prompt: Token ids, at least one.
        output_tokens: How many of the last tokens of ``prompt`` are output of an earlier attempt.
        continuations: The tree of ``walk``; empty: it generates.
        serial, request_id, sampling, namespace, grammar, priority, tenant, deadline, pooling, hands_off, ticket, lora,
            pictures: The attributes of these names.
    """

    __slots__ = (
        "_keyed",
        "_named",
        "_scored",
        "_state",
        "arrival",
        "cached",
        "capacity",
        "computed",
        "deadline",
        "drafts",
        "enters",
        "failure",
        "forced_rate",
        "grammar",
        "hands_off",
        "held",
        "in_flight",
        "jumps",
        "lora",
        "lora_slot",
        "max_length",
        "namespace",
        "output_start",
        "over",
        "pictures",
        "planned",
        "pooled",
        "pooling",
        "priority",
        "processed",
        "prompt_key",
        "prompt_length",
        "prompt_logprobs",
        "queued_at",
        "rank",
        "reach",
        "request_id",
        "retractions",
        "sampled_in",
        "sampling",
        "serial",
        "shared",
        "size",
        "slot",
        "stops",
        "tenant",
        "ticket",
        "token_ids",
        "unknown",
        "unsplit",
        "waited",
        "walk",
        "whole",
    )

    def __init__(
        self,
        serial: int,
        request_id: str,
        prompt: Sequence[int],
        sampling: SamplingParams,
        namespace: bytes = b"",
        grammar: GrammarState | None = None,
        output_tokens: int = 0,
        *,
        priority: int = 0,
        tenant: str = "",
        deadline: float | None = None,
        pooling: Pooling = "",
        hands_off: bool = False,
        ticket: HandoffTicket | None = None,
        lora: int = 0,
        pictures: tuple[Picture, ...] = (),
        continuations: Sequence[Continuation] = (),
    ) -> None:
        self.serial = serial
        self.request_id = request_id
        self.token_ids = array("I", prompt)
        self.prompt_length = len(prompt)
        self.sampling = sampling
        self.namespace = namespace
        self.grammar = grammar
        self.max_length = len(prompt) + sampling.max_tokens
        self.walk: ScoreWalk | None = None
        if continuations:
            self.walk = ScoreWalk(len(prompt), continuations)
            self.max_length = len(prompt) + longest(continuations)
            self.token_ids.extend(self.walk.branch.tokens)
        self.computed = 0
        self.cached: int | None = None
        self.slot = -1
        self.arrival = 0
        self.queued_at = 0
        self.waited = 0
        self.rank = (0, 0)
        self.priority = priority
        self.tenant = tenant
        self.deadline = deadline
        self.pooling: Pooling = pooling
        self.hands_off = hands_off
        self.ticket = ticket
        self.lora = lora
        self.pictures = pictures
        self._named: list[PictureName] = []
        self._keyed = self.token_ids
        self.lora_slot = -1
        self.pooled: npt.NDArray[np.float32] | None = None
        self.whole = self.unsplit = False
        self.retractions = 0
        self.over = False
        self.planned = 0
        self.in_flight = 0
        self.unknown = 0
        self.sampled_in = -1
        self.shared = True
        self.size: int | None = None
        self.held = False
        self.prompt_key: tuple[int, bytes] | None = None
        self.output_start = len(prompt) - output_tokens
        self.enters = False
        self.capacity = self.reach = 0
        self.jumps = False
        self.forced_rate = 0.0
        self.stops: frozenset[int] = frozenset()
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.drafts: RequestDrafts | None = None
        self.processed = bool(sampling.logit_processors)
        self.failure = ""
        self._scored = sampling.prompt_logprobs_start
        self._state = RequestState.WAITING

    @property
    def state(self) -> RequestState:
        """Where the request is."""
        return self._state

    @property
    def remaining(self) -> int:
        """Tokens that no step computes yet; 1 while the request decodes."""
        return len(self.token_ids) + self.unknown - self.planned

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        """How many alternatives are wanted for each prompt token, while prompt tokens without log probabilities remain."""
        return self.sampling.prompt_logprobs if self._scored < self.prompt_length - 1 else None

    @property
    def first_scored(self) -> int | None:
        """The position from which on each token costs the logits of the whole vocabulary; None: there is none."""
        if self.walk is not None:
            return self.prompt_length - 1
        return self.sampling.prompt_logprobs_start if self.wanted_prompt_logprobs is not None else None

    @property
    def reusable(self) -> array[int]:
        """The tokens that may come from the prefix cache, and one more token. Tokens whose log probabilities or pooled states
        are wanted must be computed."""
        if self.pooling in ("mean", "cls"):
            return self.keyed[:1]
        if self.walk is not None:
            return self.keyed[: self.prompt_length]
        return self.keyed if self.wanted_prompt_logprobs is None else self.keyed[: self._scored + 1]

    def name_pictures(self, names: PictureNames) -> None:
        """Gives the pictures their numbers in keys; called once, before the request is looked up in the cache."""
        keyed = self.token_ids[:]
        for each in self.pictures:
            token = keyed[each.offset]
            name = names.name(each.digest, token)
            self._named.append(name)  # which the names remember as long as the request does
            for place in range(each.offset, each.end):
                if keyed[place] == token:
                    keyed[place] = name.number
        self._keyed = keyed

    def enter_branch(self, branch: Branch) -> None:
        """Goes back to where a branch of the walk begins, and on with its tokens. No step in flight may compute the request."""
        assert not self.in_flight
        for tokens in (self.token_ids, self._keyed):  # the same object, unless there are pictures
            del tokens[branch.start :]
        self.token_ids.extend(branch.tokens)
        self.computed = self.planned = min(self.computed, branch.start)

    def chunk_end(self, start: int, end: int) -> int:
        """Where a chunk from ``start`` ends that is to end at ``end``: not within a picture that must not be cut, but before it,
        or after it if the chunk begins with it."""
        if self.unsplit:
            for each in self.pictures:
                if each.offset < end < each.end:
                    return each.offset if each.offset > start else each.end
        return end

    @property
    def keyed(self) -> array[int]:
        """The tokens as the cache knows them: those of pictures are the pictures' numbers. Not to be changed."""
        if self._keyed is not self.token_ids:
            self._keyed.extend(self.token_ids[len(self._keyed) :])
        return self._keyed

    def pictured(self) -> Pictured | None:
        """What the runner needs of the pictures from the next token on; without the pixels of those before."""
        if not self.pictures:
            return None
        pictures = tuple(
            each if each.end > self.computed else msgspec.structs.replace(each, pixels=b"") for each in self.pictures
        )
        return Pictured(self.token_ids[: pictures[-1].end].tobytes(), pictures)

    def add_pooled(self, start: int, chunk: npt.NDArray[np.float32]) -> None:
        """Adds the pooled hidden states, float32 [hidden_size], of the chunk from ``start`` on to those before it."""
        if self.pooled is None or start == 0 or self.pooling in ("last", "labels"):
            self.pooled = chunk
        elif self.pooling == "mean":
            self.pooled = self.pooled + chunk

    @property
    def embedding(self) -> bytes:
        """The embedding as native float32; all of its chunks must have been added."""
        assert self.pooled is not None
        return (self.pooled / (self.prompt_length if self.pooling == "mean" else 1)).astype(np.float32).tobytes()

    def add_prompt_logprobs(self, start: int, logprobs: list[TokenLogprobs]) -> None:
        """Adds log probabilities of the prompt tokens after ``start``; skips tokens that have them already, from before a
        retraction. The runner leaves out those before ``prompt_logprobs_start``."""
        new = logprobs[self._scored - max(start, self.sampling.prompt_logprobs_start) :]
        self._scored += len(new)
        self.prompt_logprobs += new

    @property
    def generated(self) -> int:
        """Tokens of output."""
        return len(self.token_ids) - self.prompt_length

    def become(self, state: RequestState) -> None:
        """Changes the state; an illegal transition raises IllegalTransitionError."""
        check_transition(self.request_id, self._state, state)
        self._state = state
