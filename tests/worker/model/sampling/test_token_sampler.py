"""Penalties, biases, minimum lengths and log probabilities: plain formulas, transformers, and independence of the batch."""

from __future__ import annotations

import random
from array import array

import msgspec
import numpy as np
import pytest
import torch

from sapwood_common.contract.sampling import SamplingParams
from sapwood_kernels.ops.factory import device_ops
from sapwood_testing.worker.steps import Part, make_step
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.results import take_tokens
from sapwood_worker.model.runner.model_runner import LaunchedStep
from sapwood_worker.model.sampling.positions import Positions
from sapwood_worker.model.sampling.token_sampler import SampledTokens, TokenSampler
from sapwood_worker.records.step import NOTHING, ModelOutput, Step

VOCAB = 50
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OPS = device_ops(DEVICE)
ENDS = (2,)


class Row:
    """A request in a row of the page table, driven by hand."""

    def __init__(self, slot: int, tokens: list[int], params: SamplingParams, output_tokens: int = 0) -> None:
        self.slot = slot
        self.params = params
        self.tokens = array("I", tokens)
        self.output_start = len(tokens) - output_tokens
        self.entering = True

    def part(self, draft: list[int] | None = None) -> Part:
        entering, self.entering = self.entering, False
        return Part(
            row=self.slot,
            token_ids=[self.tokens[-1], *(draft or [])],
            start=len(self.tokens) - 1,
            samples=1 + len(draft or []),
            sampling=self.params,
            enters=entering,
            history=self.tokens,
            output_start=self.output_start,
        )


def logits_for(row: Row, ahead: int = 0) -> torch.Tensor:
    """A function of the position alone: what differs between two runs is the sampling."""
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(len(row.tokens) + ahead)) * 2


def step(sampler: TokenSampler, rows: list[Row], logits: torch.Tensor | None = None):
    if logits is None:
        logits = torch.stack([logits_for(row) for row in rows])
    planned = make_step(0, np.zeros((max(row.slot for row in rows) + 1, 1), np.int32), [row.part() for row in rows])
    sampled = sample(sampler, planned, logits)
    tokens = sampled.tokens.tolist()
    for row, token in zip(rows, tokens, strict=True):
        row.tokens.append(max(token, 0))
    return tokens, answer_of(planned, sampled).logprobs


def sample(sampler: TokenSampler, planned: Step, logits: torch.Tensor) -> SampledTokens:
    for entry in planned.entries:
        sampler.enter(entry)
    return sampler.sample(logits.to(DEVICE, copy=True), planned, Positions.of(planned))


def answer_of(planned: Step, sampled: SampledTokens) -> ModelOutput:
    """What the runner gives the sampler."""
    return LaunchedStep(planned, Positions.of(planned), sampled, {}, lambda: NOTHING, OPS).result()


def new_sampler(rows: int = 8) -> TokenSampler:
    return TokenSampler(rows, VOCAB, ENDS, OPS)


def adjusted(logits: torch.Tensor, row: Row) -> torch.Tensor:
    """The plain formula, token by token."""
    params, output = row.params, list(row.tokens)[row.output_start :]
    result = logits.double().clone()
    for token in range(VOCAB):
        if token in row.tokens:
            result[token] *= 1 / params.repetition_penalty if result[token] > 0 else params.repetition_penalty
        result[token] -= params.frequency_penalty * output.count(token)
        result[token] -= params.presence_penalty * (token in output)
        result[token] += params.logit_bias.get(token, 0.0)
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else ENDS)}
        if len(output) < params.min_tokens and token in ends:
            result[token] = -torch.inf
        if params.allowed_token_ids and token not in params.allowed_token_ids:
            result[token] = -torch.inf
        for *before, last in params.bad_words_ids:
            if token == last and output[len(output) - len(before) :] == before:
                result[token] = -torch.inf
    return result


SETTINGS = [
    {"frequency_penalty": 1.5},
    {"frequency_penalty": -0.7, "presence_penalty": 0.3},
    {"presence_penalty": 2.0},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "logit_bias": {0: -100.0, 7: 3.5, 49: 1.0}},
    {"logit_bias": {3: 100.0}},
    {"min_tokens": 6, "stop_token_ids": (3, 4, 5)},
    {"min_tokens": 3, "stop_token_ids": (3,), "ignore_eos": True, "logit_bias": {3: 50.0, 2: 60.0}},
    {"allowed_token_ids": (1, 2, 9, 31, 32, 49), "logit_bias": {3: 100.0, 9: 1.0}},
    {"allowed_token_ids": (7, 8, 9), "bad_words_ids": ((7, 8), (8, 9), (9, 7, 9), (8, 8, 8))},
    {"bad_words_ids": ((0,), (49,), (5, 3))},
    {"bad_words_ids": ((2,),), "presence_penalty": 0.4, "min_tokens": 3},
    {},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_greedy_choices_follow_the_plain_formula(setting):
    sampler = new_sampler()
    row = Row(3, [5, 6, 7, 5], SamplingParams(temperature=0.0, **setting))
    for _ in range(40):
        expected = int(adjusted(logits_for(row), row).argmax())
        assert step(sampler, [row])[0] == [expected]


def test_draws_with_penalties_follow_the_plain_formula():
    params = SamplingParams(
        temperature=0.9, frequency_penalty=0.4, presence_penalty=0.5, repetition_penalty=1.3, logit_bias={9: 1.0}
    )
    tokens = [5, 6, 7, 5, 8, 8, 8, 9]
    draws = 20_000
    sampler = new_sampler(draws)
    rows = [Row(slot, tokens, msgspec.structs.replace(params, seed=slot), output_tokens=5) for slot in range(draws)]
    logits = logits_for(rows[0])
    expected = (adjusted(logits, rows[0]) / params.temperature).softmax(-1).numpy() * draws
    counts = np.bincount(step(sampler, rows, logits.expand(draws, VOCAB))[0], minlength=VOCAB)
    big = expected >= 5
    statistic = ((counts - expected)[big] ** 2 / expected[big]).sum()
    freedom = int(big.sum()) - 1
    # Exceeded by chance once in a million (Wilson and Hilferty's approximation).
    assert statistic <= freedom * (1 - 2 / (9 * freedom) + 4.75 * (2 / (9 * freedom)) ** 0.5) ** 3


def test_repetition_penalty_and_minimum_length_equal_transformers():
    from transformers import MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

    params = SamplingParams(temperature=0.0, repetition_penalty=1.4, min_tokens=5)
    sampler = new_sampler()
    row = Row(0, [5, 6, 7, 2], params)
    repetition = RepetitionPenaltyLogitsProcessor(1.4)
    minimum = MinNewTokensLengthLogitsProcessor(4, 5, list(ENDS), device="cpu")
    for _ in range(20):
        logits = logits_for(row)
        logits[2] += 6  # an end is tempting
        ids = torch.tensor([list(row.tokens)])
        expected = int(minimum(ids, repetition(ids, logits[None].clone())).argmax())
        assert step(sampler, [row], logits[None])[0] == [expected]
    assert 2 not in row.tokens[4:9]
    assert 2 in row.tokens[9:]


def test_bans_equal_transformers():
    from transformers import NoBadWordsLogitsProcessor

    banned = ((7, 8), (8, 9), (9, 7, 9), (8, 8, 8), (9,) * 32)
    params = SamplingParams(temperature=0.0, allowed_token_ids=(7, 8, 9), bad_words_ids=banned)
    oracle = NoBadWordsLogitsProcessor([list(sequence) for sequence in banned], list(ENDS))
    sampler, free, hits = new_sampler(), [token for token in range(VOCAB) if token not in (7, 8, 9)], 0
    row = Row(0, [5, 6], params)
    for _ in range(60):
        logits = logits_for(row)
        logits[9] += 1  # so that the longest comes about
        masked = logits.clone()
        masked[free] = -torch.inf
        expected = int(oracle(torch.tensor([list(row.tokens)]), masked[None].clone()).argmax())
        hits += expected != int(masked.argmax())
        assert step(sampler, [row], logits[None])[0] == [expected]
    assert hits > 5


def test_bans_look_at_the_output_only():
    params = SamplingParams(temperature=0.0, allowed_token_ids=(7, 8), bad_words_ids=((7, 8), (8, 8)))
    likes_8 = torch.zeros(1, VOCAB)
    likes_8[0, 8] = 1
    row, sampler = Row(0, [7], params), new_sampler()
    assert [step(sampler, [row], likes_8)[0][0] for _ in range(4)] == [8, 7, 7, 7]


def test_a_row_whose_tokens_are_all_forbidden_gets_none_and_says_why():
    params = SamplingParams(temperature=0.0, allowed_token_ids=(7,), bad_words_ids=((7,),))
    rows = [Row(0, [5], params), Row(1, [5], SamplingParams(temperature=0.0))]
    logits = torch.stack([logits_for(row) for row in rows])
    tokens, _ = step(new_sampler(), rows, logits)
    assert tokens == [-1, int(logits[1].argmax())]
    output = take_tokens(Request(0, "r", [5], params), [-1])
    assert (output.finish_reason, "allowed_token_ids" in output.error) == ("error", True)


def test_a_row_gets_the_same_tokens_alone_in_any_batch_in_a_used_row_and_resumed():
    settings = [
        SamplingParams(**(setting | {"temperature": 1.0 * (index % 3 > 0), "seed": index, "top_p": 0.9}))
        for index, setting in enumerate(SETTINGS)
    ]
    alone = []
    for params in settings:
        row, sampler = Row(0, [5, 6, 7], params), new_sampler()
        alone.append([step(sampler, [row])[0][0] for _ in range(20)])
    sampler = new_sampler(len(settings))
    for turn in range(2):  # the second time in rows that others have left
        rows = [Row((slot + 3 * turn) % len(settings), [5, 6, 7], params) for slot, params in enumerate(settings)]
        for count in range(20):
            step(sampler, rows if count % 2 else rows[::-1])
        assert [list(row.tokens[3:]) for row in rows] == alone
    for cut in (1, 7):
        resumed = [
            Row(slot, [5, 6, 7, *alone[slot][:cut]], params, output_tokens=cut) for slot, params in enumerate(settings)
        ]
        for _ in range(20 - cut):
            step(sampler, resumed)
        assert [list(row.tokens[3:]) for row in resumed] == alone


@pytest.mark.parametrize("settings", [SETTINGS, [{}]], ids=["every setting", "greedy alone"])
def test_a_draft_checked_in_one_step_gives_the_tokens_of_single_steps(settings):
    params = [
        SamplingParams(
            **(setting | {"temperature": 1.0 * (index % 3 > 0), "seed": index, "logprobs": index % 2 or None})
        )
        for index, setting in enumerate(settings)
    ]
    wanted, rows = [[] for _ in params], [Row(slot, [5, 6, 7], each) for slot, each in enumerate(params)]
    sampler = new_sampler(len(rows))
    for _ in range(30):
        tokens, found = step(sampler, rows)
        for slot, token in enumerate(tokens):
            wanted[slot].append((token, found.get(slot, [None])[0]))
    chance = random.Random(1)
    drafted = {"all": 0, "some": 0, "none": 0}
    rows = [Row(slot, [5, 6, 7], each) for slot, each in enumerate(params)]
    got, sampler = [[] for _ in rows], new_sampler(len(rows))
    while running := [row for row in rows if len(got[row.slot]) < 20]:
        drafts = []
        for row in running:
            done = len(got[row.slot])
            draft = [token for token, _ in wanted[row.slot][done : done + chance.randrange(5)]]
            if draft and chance.random() < 0.5:
                draft[chance.randrange(len(draft))] = chance.randrange(VOCAB)
            drafts.append(draft)
        parts = [row.part(draft) for row, draft in zip(running, drafts, strict=True)]
        planned = make_step(0, np.zeros((len(rows), 1), np.int32), parts)
        logits = [
            logits_for(row, at) for row, draft in zip(running, drafts, strict=True) for at in range(len(draft) + 1)
        ]
        answer = answer_of(planned, sample(sampler, planned, torch.stack(logits)))
        for index, (row, draft) in enumerate(zip(running, drafts, strict=True)):
            tokens = answer.token_ids[index]
            drafted["all" if len(tokens) > len(draft) else "some" if len(tokens) > 1 else "none"] += bool(draft)
            row.tokens.extend(tokens)
            got[row.slot] += zip(tokens, answer.logprobs.get(index, [None] * len(tokens)), strict=True)
    for slot, each in enumerate(got):
        for (token, logprob), (expected, its) in zip(each, wanted[slot], strict=False):
            assert token == expected, params[slot]
            assert (logprob is None) == (its is None)
            assert logprob is None or logprob.logprob == pytest.approx(its.logprob, abs=1e-5)
    assert min(drafted.values()) > 0


def test_log_probabilities_are_the_models_own_and_alternatives_the_likeliest():
    sampler = new_sampler()
    wanted = {"logprobs": 3, "frequency_penalty": 2.0, "logit_bias": {4: 20.0}, "temperature": 0.3, "top_k": 2}
    rows = [
        Row(0, [5, 6], SamplingParams(seed=1, **wanted)),
        Row(1, [5, 6], SamplingParams(seed=2)),
        Row(2, [5, 6], SamplingParams(temperature=0.0, logprobs=0)),
        Row(3, [5, 6], SamplingParams(temperature=0.0, logprobs=VOCAB)),
    ]
    for _ in range(10):
        logits = torch.stack([logits_for(row) + row.slot for row in rows])
        expected = logits.double().log_softmax(-1)
        tokens, found = step(sampler, rows, logits)
        assert sorted(found) == [0, 2, 3]
        for index, count in ((0, 3), (2, 0), (3, VOCAB)):
            assert found[index][0].logprob == pytest.approx(float(expected[index, tokens[index]]), abs=1e-5)
            best = expected[index].topk(count)
            assert found[index][0].top_ids == best.indices.tolist()
            assert found[index][0].top_logprobs == pytest.approx(best.values.tolist(), abs=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_or_all_forbidden_gets_no_token_and_harms_no_other(bad):
    for setting in ({"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.5}, {"presence_penalty": 1.0, "logprobs": 2}):
        params = SamplingParams(**setting)
        rows = [Row(slot, [5, 6], params) for slot in range(4)]
        logits = torch.stack([logits_for(row) for row in rows])
        good, _ = step(new_sampler(), rows, logits)
        rows = [Row(slot, [5, 6], params) for slot in range(4)]
        logits[1, 17] = bad
        logits[3] = -torch.inf
        tokens, found = step(new_sampler(), rows, logits)
        assert tokens == [good[0], -1, good[2], -1]
        assert set(found) <= {0, 2}
