"""Greedy output through the router is transformers' greedy output of the same float32 weights.

The proof is by induction over positions: one forward pass of transformers over prompt and answer gives, for each position of
the answer, the logits that greedy decoding would see there; the answer's token must be the largest. Two engines round
differently, so a token may fall behind the largest logit by a rounding error: the gap is printed.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import Any, NamedTuple

import grpc
import pytest
import torch

from sapwood.client import Client
from sapwood.v1 import tokenizer_pb2, tokenizer_pb2_grpc, worker_pb2, worker_pb2_grpc

TOKENS = 64
TIE = 1e-3  # logits here are around 20, where float32 resolves 2e-6; a sum of 640 to 2048 terms loses some of it

_LONG = " ".join(f"Item {number} of the list costs {number * 7 % 23} coins." for number in range(1, 61))

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "List of the planets of the solar system:\n1.",
    "La capitale de l'Allemagne est",
    "Die Hauptstadt von Italien heißt",
    "日本の首都は",
    "Москва — это",
    "Roses are red, violets are blue,",
    '{"name": "Ada", "age": 36, "languages": [',
    "Q: What is 12 times 12?\nA:",
    "The three laws of motion were formulated by",
    "SELECT name, price FROM products WHERE",
    "😀 😃 😄",
    "To be, or not to be, that is the question:",
    "<html>\n<head>\n<title>",
    "A list of fruits: apple, banana, cherry, apple, banana, cherry, apple, banana,",
    f"{_LONG} The cheapest of them is item",  # longer than the sliding window of 512 tokens and than a prefill chunk
    f"Notes. {_LONG[:1200]} In short:",
]


class Answer(NamedTuple):
    token_ids: tuple[int, ...]
    cached_tokens: int


def _generate(client: Client, prompt: str, detokenize: bool, tokens: int) -> Answer:
    token_ids: list[int] = []
    cached = -1
    for delta in client.generate(prompt, max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=detokenize):
        assert detokenize or not delta.text
        token_ids += delta.token_ids
        if delta.usage is not None:
            cached = delta.usage.cached_tokens
    assert len(token_ids) == tokens
    return Answer(tuple(token_ids), cached)


def _alone(client: Client, prompts: list[str], detokenize: bool, tokens: int = TOKENS) -> list[Answer]:
    return [_generate(client, prompt, detokenize, tokens) for prompt in prompts]


def _concurrently(client: Client, prompts: list[str], detokenize: bool = True, tokens: int = TOKENS) -> list[Answer]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: _generate(client, prompt, detokenize, tokens), prompts))


def _flush(workers: list[str]) -> None:
    for address in workers:
        with grpc.insecure_channel(address) as channel:
            worker_pb2_grpc.WorkerStub(channel).FlushCache(worker_pb2.FlushCacheRequest(), timeout=60)


def _encode(tokenizer: str, prompts: list[str]) -> list[list[int]]:
    with grpc.insecure_channel(tokenizer) as channel:
        stub = tokenizer_pb2_grpc.TokenizerStub(channel)
        answer = stub.Tokenize(tokenizer_pb2.TokenizeRequest(texts=prompts), timeout=60)
    return [list(sequence.ids) for sequence in answer.sequences]


def _largest_gap(model: Any, prompt: list[int], answer: tuple[int, ...]) -> float:
    """How far the answer's tokens fall behind the largest logit, at worst."""
    with torch.inference_mode():
        sequence = torch.tensor([[*prompt, *answer[:-1]]])
        logits = model(sequence, logits_to_keep=len(answer)).logits[0]
    chosen = logits[torch.arange(len(answer)), torch.tensor(answer)]
    return float((logits.max(dim=-1).values - chosen).max())


def _check(cluster: Any, model: Any, prompts: list[str], answers: dict[str, list[Answer]]) -> None:
    for index, (prompt, ids) in enumerate(zip(prompts, _encode(cluster.tokenizer, prompts), strict=True)):
        for tokens in {answers[how][index].token_ids for how in answers}:
            gap = _largest_gap(model, ids, tokens)
            print(f"{prompt[:40]!r:44} prompt of {len(ids):4} tokens: largest logit gap {gap:.2e}")
            assert gap <= TIE, (prompt, tokens)


def _beginning_in_common(one: list[int], other: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _check_cache(how: str, ids: list[list[int]], answers: list[Answer]) -> None:
    """A cold cache gives at most what another prompt begins with; a warm one gives all full pages of a long prompt.

    A short prompt, of a page or two, the router may send to the other worker for the sake of balance.
    """
    for prompt, answer in zip(ids, answers, strict=True):
        if how.startswith("cold"):
            shared = max(_beginning_in_common(prompt, other) for other in ids if other is not prompt)
            assert answer.cached_tokens <= shared, "more than another prompt begins with"
        elif len(prompt) > 256:
            assert answer.cached_tokens >= (len(prompt) - 1) // 16 * 16, (how, len(prompt))
    print(f"{how}: {sum(answer.cached_tokens for answer in answers)} of {sum(map(len, ids))} prompt tokens were cached")


def test_the_known_prompt_has_the_known_ids(cluster: Any) -> None:
    assert _encode(cluster.tokenizer, ["The capital of France is"]) == [[2, 818, 5279, 529, 7001, 563]]


def test_a_few_requests_are_greedy_cold_and_concurrent_and_warm_and_alone(cluster: Any, demo_oracle: Any) -> None:
    """Cold and alone, warm and concurrent, and longer answers: below."""
    prompts = PROMPTS[-3:-1]
    ids = _encode(cluster.tokenizer, prompts)
    assert max(map(len, ids)) > 512
    answers = {}
    with Client(cluster.grpc, timeout=600) as client:
        _flush(cluster.workers)
        answers["cold, concurrent"] = _concurrently(client, prompts, tokens=12)
        answers["warm, alone, ids alone"] = _alone(client, prompts, detokenize=False, tokens=12)
    for how, given in answers.items():
        _check_cache(how, ids, given)
    _check(cluster, demo_oracle, prompts, answers)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_concurrent_requests_are_greedy_cold_and_warm(cluster: Any, demo_oracle: Any) -> None:
    prompts = PROMPTS
    ids = _encode(cluster.tokenizer, prompts)
    assert len(set(PROMPTS)) == 20
    answers = {}
    with Client(cluster.grpc, timeout=600) as client:
        _flush(cluster.workers)
        for how in ("cold, concurrent", "warm, concurrent, ids alone"):
            answers[how] = _concurrently(client, prompts, detokenize="ids alone" not in how)
            _check_cache(how, ids, answers[how])
    _check(cluster, demo_oracle, prompts, answers)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_requests_each_alone_are_greedy_cold_and_warm(cluster: Any, demo_oracle: Any) -> None:
    prompts = PROMPTS[::2]
    ids = _encode(cluster.tokenizer, prompts)
    answers = {}
    with Client(cluster.grpc, timeout=600) as client:
        _flush(cluster.workers)
        for how in ("cold, alone", "warm, alone, ids alone"):
            answers[how] = _alone(client, prompts, detokenize="ids alone" not in how)
            _check_cache(how, ids, answers[how])
    _check(cluster, demo_oracle, prompts, answers)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_transformers_own_generate_gives_the_same_tokens(cluster: Any, demo_oracle: Any) -> None:
    """The induction above, checked against the loop that it stands for."""
    prompts = PROMPTS[:6]
    with Client(cluster.grpc, timeout=600) as client:
        answers = _concurrently(client, prompts)
    for prompt, ids, answer in zip(prompts, _encode(cluster.tokenizer, prompts), answers, strict=True):
        with torch.inference_mode():
            whole = demo_oracle.generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=-1)
        expected = whole[0, len(ids) :].tolist()
        if list(answer.token_ids) != expected:
            assert _largest_gap(demo_oracle, ids, answer.token_ids) <= TIE, prompt
            assert _largest_gap(demo_oracle, ids, tuple(expected)) <= TIE, prompt
