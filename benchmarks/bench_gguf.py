"""The demo model in its own GGUF types on the CPU: a worker, one with float32 weights, and llama.cpp; same file and threads.

    pip install llama-cpp-python==0.3.36 --no-binary llama-cpp-python    # GGML_NATIVE is its default
    make bench-gguf ARGS='--rounds 3'

1. One request at a time, and eight at once: output tokens/s, prompts of 32 tokens included. Ours through router and worker over
   gRPC; llama.cpp's by its library, eight sequences in one context, as its server batches its slots, without HTTP.
2. A prompt of 512 tokens: tokens/s to the first token.
3. Memory of the worker's two processes: resident, and with what processes share counted once.

The engines take turns, and ratios are taken within a round, since the speed of a shared machine drifts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from report import Figure, Goal, print_figures, print_table

import sapwood
from sapwood.client import AsyncClient
from sapwood_common.models.model_files import packaged_path
from sapwood_kernels.native.products import load_library

BATCH, PROMPT, LONG = 8, 32, 512
KEPT, WIDE, PEER = "sapwood", "sapwood, float32", "llama.cpp"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="interleaved repetitions [default: 3]")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each request [default: 64]")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores, help=f"of each engine [default: all cores, {cores}]")
    parser.add_argument("--without-llama", action="store_true", help="leave llama.cpp out")
    parser.add_argument("--without-float32", action="store_true", help="leave the worker with float32 weights out")
    return parser.parse_args()


def prompts(seed: int, count: int, length: int) -> list[list[int]]:
    """Prompts that no cache has seen."""
    chance = random.Random(seed)
    return [[2, *(chance.randint(1000, 200_000) for _ in range(length - 1))] for _ in range(count)]


class Sapwood:
    """A server with one worker."""

    def __init__(self, threads: int, stored_weights: str) -> None:
        before = set(_workers())
        self._server = sapwood.Server("demo-base", 1, threads=threads, stored_weights=stored_weights).start()
        self._pids = set(_workers()) - before

    def rate(self, batch: list[list[int]], tokens: int) -> float:
        return asyncio.run(self._rate(batch, tokens))

    async def _rate(self, batch: list[list[int]], tokens: int) -> float:
        async def one(prompt: list[int]) -> None:
            stream = client.generate(token_ids=prompt, max_tokens=tokens, temperature=0, ignore_eos=True)
            assert sum([len(delta.token_ids) async for delta in stream]) == tokens

        async with AsyncClient(self._server.grpc_address) as client:
            start = time.perf_counter()
            await asyncio.gather(*map(one, batch))
            return len(batch) * tokens / (time.perf_counter() - start)

    def memory(self) -> tuple[float, float]:
        """Resident bytes, and those with each shared page's share: GiB."""
        found = {"Rss": 0, "Pss": 0}
        for pid in self._pids:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
                name, size = line.split(":")
                if name in found:
                    found[name] += int(size.split()[0])
        return found["Rss"] / (1 << 20), found["Pss"] / (1 << 20)

    def close(self) -> None:
        self._server.close()


class LlamaCpp:
    """llama.cpp's library with a context of eight sequences."""

    def __init__(self, threads: int) -> None:
        import llama_cpp

        self._lib: Any = llama_cpp
        quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        self._quiet = quiet  # kept, since the library calls it
        llama_cpp.llama_log_set(quiet, None)
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(packaged_path("demo-base")).encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 8192, LONG, LONG, BATCH
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._sampler = llama_cpp.llama_sampler_init_greedy()
        self._batch = llama_cpp.llama_batch_init(LONG, 0, BATCH)

    def rate(self, batch: list[list[int]], tokens: int) -> float:
        lib = self._lib
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        start = time.perf_counter()
        rows = [
            (token, at, seq, at == len(prompt) - 1)
            for seq, prompt in enumerate(batch)
            for at, token in enumerate(prompt)
        ]
        for step in range(tokens):
            wanted = self._decode(rows)
            latest = [lib.llama_sampler_sample(self._sampler, self._context, at) for at in wanted]
            rows = [(token, len(batch[seq]) + step, seq, True) for seq, token in enumerate(latest)]
        return len(batch) * tokens / (time.perf_counter() - start)

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, seq, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
        assert self._lib.llama_decode(self._context, batch) == 0
        return [i for i, row in enumerate(rows) if row[3]]


def _workers() -> list[int]:
    """This program's worker processes."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if any(b"sapwood_worker" in word for word in words) and _is_ours(int(folder.name)):
                found.append(int(folder.name))
        except OSError:  # it has ended
            continue
    return found


def _is_ours(pid: int) -> bool:
    while pid > 1 and pid != os.getpid():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid == os.getpid()


def main() -> None:
    arguments = parse_arguments()
    if not arguments.without_llama and find_spec("llama_cpp") is None:
        sys.exit(
            "llama_cpp is not installed: pip install llama-cpp-python==0.3.36 --no-binary llama-cpp-python, or --without-llama"
        )
    if load_library() is None:  # both of ours would be float32
        sys.exit("the kernels are not compiled as the sources are now: python hatch_build.py")
    makers: dict[str, Callable[[], Sapwood | LlamaCpp]] = {KEPT: lambda: Sapwood(arguments.threads, "keep")}
    if not arguments.without_float32:
        makers[WIDE] = lambda: Sapwood(arguments.threads, "widen")
    if not arguments.without_llama:
        makers[PEER] = lambda: LlamaCpp(arguments.threads)
    engines = {name: make() for name, make in makers.items()}
    one, many, prompt = "one request at a time", f"{BATCH} requests at once", f"prompt of {LONG} tokens"
    rates: dict[tuple[str, str], list[float]] = {}
    for number in range(arguments.rounds + 1):
        for name, engine in engines.items():
            measured = {
                one: engine.rate(prompts(3 * number, 1, PROMPT), arguments.tokens),
                many: engine.rate(prompts(3 * number + 1, BATCH, PROMPT), arguments.tokens),
                prompt: LONG * engine.rate(prompts(3 * number + 2, 1, LONG), 1),
            }
            if number:  # the first is for warming up
                for what, rate in measured.items():
                    rates.setdefault((what, name), []).append(rate)
        print(f"round {number} of {arguments.rounds} done", file=sys.stderr)
    figures = [Figure(what, median(found), "tokens/s", name) for (what, name), found in rates.items()]
    for name, engine in engines.items():
        if isinstance(engine, Sapwood):
            resident, proportional = engine.memory()
            figures.append(Figure("memory of a worker, resident", resident, "GiB", name))
            figures.append(Figure("memory of a worker, shared pages by their share", proportional, "GiB", name))
            engine.close()
    goals = []
    if PEER in engines:
        for what, least in ((one, 1.0), (many, 1.5), (prompt, 1.0)):
            pairs = zip(rates[what, KEPT], rates[what, PEER], strict=True)
            goals.append(
                Goal(f"{what}: sapwood / llama.cpp", median(ours / theirs for ours, theirs in pairs), least=least)
            )
    if WIDE in engines:
        for what in (one, many, prompt):
            pairs = zip(rates[what, KEPT], rates[what, WIDE], strict=True)
            goals.append(Goal(f"{what}: as stored / float32", median(a / b for a, b in pairs), least=1.0))
    print_figures(figures)
    print_table(figures, goals)


if __name__ == "__main__":
    main()
