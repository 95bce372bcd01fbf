"""What it costs to hand a prompt over: a prefill worker on one GPU, a decode worker on another, and this client alone.

    python benchmarks/gpu/bench_handoff.py --model benchmarks/gpu/configs/llama-3.1-8b

For each length of prompt (random tokens, dummy weights), medians over ``--repeats``, in turns: of the prefill worker when it does
all, and of the other, the time to the first token; of that other the time between tokens; of a pair, the time to the prefill
worker's first token, which a router passes on at once, from there to the ticket, and from the ticket to the decode worker's first
token, which is the answer's second. ``added_first_ms`` is how much longer a pair takes to the first token than its prefill worker
alone, ``added_ms`` how much longer to the second, ``cached_first_ms`` how long the decode worker takes to a token after a prompt
that it has, ``same_answers`` how many were what the prefill worker generates itself, ``same_pages`` how many of some pages of the
last prompt are the same in both, byte by byte, ``pull...`` what the decode worker counted, and with ``--stages`` ``stages`` when
KV transfers come to which stage. Prints one JSON object a line. Without GPUs: ``--device cpu`` and a small model, or
``--worker-module sapwood_testing.worker.fake_worker``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import queue
import random
import re
import shlex
import socket
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import grpc
from commit import measured_commit
from serving_load.services import Service, gpus_of_pair
from serving_load.synthetic_model import write_model

from sapwood.v1 import worker_pb2, worker_pb2_grpc
from sapwood_worker.core.cache.transfer.tcp import TcpBackend
from sapwood_worker.model.pools.host_pool import HEADER_BYTES
from sapwood_worker.records.handoff import HandoffTicket

_COMPARED = 64
_LEASES_END_SECONDS = 2.0
_REST_SECONDS = 0.1
"""Between requests: copies of pages that continue after an answer are not measured with the next."""
REAL_WORKER = "sapwood_worker"


class Answer(NamedTuple):
    """When the first token, the second and the ticket came, in seconds from the request on; 0: never."""

    first: float
    second: float
    ticket_at: float
    tokens: list[int]
    ticket: worker_pb2.HandoffTicket | None


def ask(
    stub: Any, prompt: Sequence[int], announced: Callable[[worker_pb2.HandoffTicket], object] = id, **fields: Any
) -> Answer:
    """Has a worker generate; ``announced`` is called with what can be read before the ticket."""
    request = worker_pb2.WorkerGenerateRequest(request_id=f"bench-{time.perf_counter_ns()}", token_ids=prompt, **fields)
    request.sampling.temperature, request.sampling.max_tokens, request.sampling.ignore_eos = 0, 8, True
    begun = time.perf_counter()
    times: list[float] = []
    tokens: list[int] = []
    ticket, ticket_at = None, 0.0
    for response in stub.Generate(request, timeout=120):
        now = time.perf_counter() - begun
        times += [now] * len(response.token_ids)
        tokens += response.token_ids
        if response.HasField("announced"):
            announced(response.announced)
        if response.HasField("ticket"):
            ticket, ticket_at = response.ticket, now
    return Answer(times[0], times[1] if len(times) > 1 else 0.0, ticket_at, tokens, ticket)


class Pair:
    """A prefill worker and a decode worker, which hears of pages as a router tells of them.

    Args:
        prefill, decode: Their stubs.
        stages: Is told when they are asked.
        stack: Ends the call over which the decode worker hears.
    """

    def __init__(self, prefill: Any, decode: Any, stages: Stages, stack: ExitStack) -> None:
        self.prefill, self.decode, self.stages = prefill, decode, stages
        self._said: queue.SimpleQueue[worker_pb2.SessionRequest | None] = queue.SimpleQueue()
        self._said.put(worker_pb2.SessionRequest(heartbeat_ms=1000))
        call = decode.Session(iter(self._said.get, None))

        def hear() -> None:
            with contextlib.suppress(grpc.RpcError):  # the channel is closed in the end
                for _ in call:
                    pass

        threading.Thread(target=hear, daemon=True).start()
        stack.callback(self._said.put, None)

    def ask(self, prompt: Sequence[int]) -> tuple[Answer, Answer]:
        """An answer of both."""
        began = time.monotonic()
        sent_tickets: list[worker_pb2.HandoffTicket] = []

        def tell(ticket: worker_pb2.HandoffTicket) -> None:
            ticket.source = "127.0.0.1" + ticket.source
            pages = worker_pb2.HandoffAnnouncement(ticket=ticket, token_ids=() if sent_tickets else prompt)
            sent_tickets.append(ticket)
            self._said.put(worker_pb2.SessionRequest(announced_handoffs=[pages]))

        one = ask(self.prefill, prompt, tell, hand_off=True)
        assert one.ticket is not None
        one.ticket.source = "127.0.0.1" + one.ticket.source
        other = ask(self.decode, [*prompt, *one.tokens], output_tokens=1, ticket=one.ticket)
        self.stages.between(began, began + one.ticket_at + other.first)
        return one, other


def same_pages(prefill: Any, decode: Any, prompt: Sequence[int], page_bytes: int) -> str:
    """How many of some pages of a prompt are the same, byte by byte, in the host memory of the worker that has computed them and
    in that of the one that has pulled them, where they come from its GPU; of how many that both still have."""
    time.sleep(_LEASES_END_SECONDS)
    decode.SetRole(worker_pb2.SetRoleRequest(role=worker_pb2.WORKER_ROLE_PREFILL), timeout=60)
    tickets = []
    for stub in (prefill, decode):
        said = ask(stub, prompt, hand_off=True).ticket
        assert said is not None
        places = list(zip(said.places, said.place_epochs, strict=True))
        known = said.transfer_id, "127.0.0.1" + said.source, said.epoch, said.fingerprint
        tickets.append(HandoffTicket(*known, list(said.page_hashes), places, said.lease_ms))
    count = min(len(ticket.places) for ticket in tickets)
    indices = range(0, count, max(1, count // _COMPARED))
    contents: list[list[bytes]] = []
    for ticket in tickets:
        buffers = [memoryview(bytearray(HEADER_BYTES + page_bytes)) for _ in indices]
        had = TcpBackend().read(ticket, indices, buffers)
        contents.append(
            [bytes(buffer[HEADER_BYTES:]) if there else b"" for there, buffer in zip(had, buffers, strict=True)]
        )
    decode.SetRole(worker_pb2.SetRoleRequest(role=worker_pb2.WORKER_ROLE_DECODE), timeout=60)
    same = sum(one == two != b"" for one, two in zip(*contents, strict=True))
    return f"{same} of {len(indices)}, of {count} pages"


_STAGE = re.compile(r"handoff stage (.+) at ([0-9.]+)$", re.MULTILINE)


class Stages:
    """When KV transfers come to their stages, as the workers' logs say it.

    Args:
        logs: Each worker's log, by its role.
    """

    def __init__(self, logs: dict[str, Path]) -> None:
        self._logs = logs
        self._begun: list[tuple[float, float]] = []

    def between(self, began: float, ended: float) -> None:
        """There was a KV transfer then, on the monotonic clock."""
        self._begun.append((began, ended))

    def gaps(self, role: str, name: str, began: float) -> list[float]:
        """Seconds between the times when a worker has come to a stage since then."""
        time.sleep(0.2)
        found = [float(at) for stage, at in _STAGE.findall(self._logs[role].read_text()) if stage == name]
        times = sorted(at for at in found if at >= began)
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    def take(self) -> dict[str, float]:
        """For each stage the median of the milliseconds from the request on, of those since the last call; of one that comes more
        than once in a KV transfer the first and the last."""
        time.sleep(0.2)  # the logs are written by another thread
        found: dict[str, list[float]] = {}
        for role, log in self._logs.items():
            lines = [(name, float(at)) for name, at in _STAGE.findall(log.read_text())]
            for began, ended in self._begun:
                its: dict[str, list[float]] = {}
                for name, at in lines:
                    if began <= at <= ended:
                        its.setdefault(f"{role}: {name}", []).append(1000 * (at - began))
                for name, times in its.items():
                    found.setdefault(name, []).append(times[0])
                    if len(times) > 1:
                        found.setdefault(f"{name} ({len(times)}th)", []).append(times[-1])
        self._begun = []
        return dict(
            sorted(((name, round(median(times), 2)) for name, times in found.items()), key=lambda each: each[1])
        )


class Counters:
    """What a worker counts, by its metrics page.

    Args:
        port: Where that is.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._before: dict[str, float] = {}

    def since(self) -> dict[str, int]:
        """What was counted of reads since the last call."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=10) as page:
            text = page.read().decode()
        now = {
            name: float(value)
            for name, value in re.findall(r"^sapwood_worker_(kv_transfer_\w+)_total (\S+)$", text, re.M)
        }
        before, self._before = self._before, now
        return {name: int(value - before.get(name, 0)) for name, value in now.items()}


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


def measure(
    prefill: str, decode: str, metrics: int, vocabulary: int, stages: Stages, options: argparse.Namespace
) -> Iterator[dict[str, object]]:
    """Figures for each length of prompt.

    Args:
        prefill, decode: The workers' addresses.
        metrics: The port of the decode worker's metrics.
        vocabulary: Prompts are of ids below.
        stages: Of the workers, where they log them.
        options: ``lengths`` and ``repeats``.
    """
    chance = random.Random(1)

    def prompts_of(length: int, count: int) -> list[list[int]]:
        return [[chance.randrange(vocabulary) for _ in range(length)] for _ in range(count)]

    with ExitStack() as stack:
        one, other = (
            worker_pb2_grpc.WorkerStub(stack.enter_context(grpc.insecure_channel(each))) for each in (prefill, decode)
        )
        both, counters = Pair(one, other, stages, stack), Counters(metrics)
        for length in map(int, options.lengths.split(",")):
            for prompt, alike in zip(prompts_of(length, 2), prompts_of(length, 2), strict=True):
                both.ask(prompt)  # kernels are compiled, pages of memory touched
                ask(other, alike)
            counters.since()
            stages.take()
            alone: list[Answer] = []
            beside: list[Answer] = []
            pairs: list[tuple[Answer, Answer]] = []
            cached: list[float] = []
            prompts = prompts_of(length, options.repeats)
            for prompt in prompts:
                for stub, answers in ((one, alone), (other, beside)):
                    answers += [ask(stub, each) for each in prompts_of(length, 1)]
                    time.sleep(_REST_SECONDS)
                pairs.append(both.ask(prompt))
                time.sleep(_REST_SECONDS)
                cached.append(ask(other, [*prompt, *pairs[-1][0].tokens], output_tokens=1).first)
                time.sleep(_REST_SECONDS)
            pulled, stage_seconds = counters.since(), stages.take()
            again = [ask(one, prompt).tokens for prompt in prompts]  # of the very pages that were handed over
            answers = [[*first.tokens, *rest.tokens] for first, rest in pairs]
            between = median(each.second - each.first for each in beside)
            seconds = {
                "alone_first_ms": median(each.first for each in alone),
                "other_alone_first_ms": median(each.first for each in beside),
                "alone_between_ms": between,
                "pair_first_ms": median(each.first for each, _ in pairs),
                "to_ticket_ms": median(each.ticket_at - each.first for each, _ in pairs),
                "ticket_to_second_ms": median(rest.first for _, rest in pairs),
                "cached_first_ms": median(cached),
                "added_first_ms": median(each.first for each, _ in pairs) - median(each.first for each in alone),
                "added_ms": median(each.ticket_at + rest.first for each, rest in pairs)
                - median(each.first for each in alone)
                - between,
            }
            yield {
                "prompt_tokens": length,
                "pages": 0 if pairs[-1][0].ticket is None else len(pairs[-1][0].ticket.page_hashes),
                **{name: round(1000 * value, 2) for name, value in seconds.items()},
                "same_answers": sum(one == two[: len(one)] for one, two in zip(again, answers, strict=True)),
                "same_pages": same_pages(
                    one, other, prompts[-1], pulled["kv_transfer_bytes"] // pulled["kv_transfer_pages"]
                ),
                **pulled,
                "stages": stage_seconds,
            }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True, help="A folder with a config.json.")
    parser.add_argument("--lengths", default="1024,8192", help="Tokens of prompts.")
    parser.add_argument("--repeats", type=int, default=5, help="Prompts of each length.")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--kv-gb", type=float, default=12.0, help="KV cache of each worker in GiB.")
    parser.add_argument("--host-gb", type=float, default=12.0, help="Its second tier in GiB.")
    parser.add_argument("--worker-module", default=REAL_WORKER, help="What to start as the worker.")
    parser.add_argument("--logs", type=Path, help="A folder for the workers' logs.")
    parser.add_argument(
        "--stages", action="store_true", help="Tell when each stage is reached; takes some time itself."
    )
    parser.add_argument("--worker-flags", default="", help="More flags of the workers, in one argument.")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-handoff-")))
        write_model(options.model, folder)
        vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
        flags = ["--port", "0", "--max-running", "8", "--max-step-tokens", "8192"]
        flags += ["--host-cache", str(options.host_gb)]
        if options.worker_module == REAL_WORKER:
            flags += ["--model", str(folder), "--load-format", "dummy", "--device", options.device]
            flags += ["--kv-cache-gb", str(options.kv_gb), "--context-length", "16384"]
        else:
            flags += ["--vocab-size", str(vocabulary), "--context-length", "16384", "--num-pages", "4096"]
        flags += shlex.split(options.worker_flags)
        if options.stages:
            flags += ["--log-level", "debug"]
        services, metrics, logs = [], free_port(), options.logs or folder
        for role, gpu in zip(("prefill", "decode"), gpus_of_pair(options.device), strict=True):
            port = str(metrics if role == "decode" else 0)
            its = [*flags, "--role", role, "--metrics-port", port]
            services.append(Service(role, options.worker_module, its, logs, gpu))
            stack.callback(services[-1].stop)
        prefill, decode = (each.address() for each in services)
        stages = Stages({each.name: logs / f"{each.name}.log" for each in services})
        for found in measure(prefill, decode, metrics, vocabulary, stages, options):
            print(json.dumps({"commit": measured_commit(), "model": options.model.name} | found), flush=True)


if __name__ == "__main__":
    main()
