"""What one tenant's long prompts do to the first tokens of another, to running streams and to throughput.

    python benchmarks/gpu/bench_tenants.py --model benchmarks/gpu/configs/qwen3-0.6b
    python benchmarks/gpu/bench_tenants.py --url http://127.0.0.1:8000 --vocabulary 262144 --long-tokens 8000

The first form starts router, tokenizer and worker with dummy weights, the second asks what `sapwood up` has started. Prompts
are random token ids, greedy, end tokens ignored, streamed over HTTP. Tenants are named by `x-tenant`, or by their keys (`--keys
A,B,C`).

calm    short prompts of Bob (11 tokens), one after the other, on an idle server
one     the same, with Carol's streams running, while one long prompt of Alice's is computed
many    the same with `--long` prompts of Alice's at once
mixed   `--requests` of three tenants, `--clients` at a time: four of five prompts have 16 to 256 tokens, the others up to
        `--long-tokens`; outputs of 16 to 64 tokens

Prints one JSON object a line: times to first tokens and gaps between tokens in ms, and prompt and output tokens a second.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import shlex
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from commit import measured_commit
from serving_load.services import Services
from serving_load.stream import percentile
from serving_load.synthetic_model import write_model

SHORT = 11
TENANTS = ("alice", "bob", "carol")


@dataclass
class Answer:
    """What a client saw of one request."""

    prompt: int
    began: float
    arrivals: list[float] = field(default_factory=list)

    @property
    def first(self) -> float:
        return self.arrivals[0] - self.began

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


class Server:
    """Asks a server as one of three tenants.

    Args:
        url: The server's.
        keys: A key for each tenant; empty: tenants are named by a header.
        vocabulary: Token ids are below it.
    """

    def __init__(self, url: str, keys: list[str], vocabulary: int) -> None:
        parts = urllib.parse.urlsplit(url)
        self._address = parts.hostname or "127.0.0.1", parts.port or 80
        self._keys = keys
        self._vocabulary = vocabulary
        request = urllib.request.Request(f"{url}/v1/models", headers=self._headers(1))
        self._model = json.load(urllib.request.urlopen(request))["data"][0]["id"]

    def prompt(self, draw: random.Random, tokens: int) -> list[int]:
        return [draw.randint(10, min(99_999, self._vocabulary - 1)) for _ in range(tokens)]

    def ask(self, tenant: int, prompt: list[int], outputs: int, ended: Callable[[], bool] = lambda: False) -> Answer:
        """Streams an answer; hangs up once `ended` says so."""
        connection = http.client.HTTPConnection(*self._address, timeout=600)
        body = {"model": self._model, "prompt": prompt, "max_tokens": outputs, "temperature": 0, "ignore_eos": True}
        answer = Answer(len(prompt), time.monotonic())
        headers = {"Content-Type": "application/json", **self._headers(tenant)}
        connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True, "n": 1}), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"{response.status}: {response.read().decode()}")
        for line in response:
            if line.startswith(b"data: {"):
                answer.arrivals.append(time.monotonic())
            if ended():
                break
        connection.close()
        return answer

    def _headers(self, tenant: int) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._keys[tenant]}"} if self._keys else {"x-tenant": TENANTS[tenant]}


class Bench:
    """The workloads."""

    def __init__(self, server: Server, options: argparse.Namespace) -> None:
        self._server = server
        self._options = options
        self._draw = random.Random(1)

    def report(self, what: str, **figures: float) -> None:
        rounded = {name: round(value, 1) for name, value in figures.items()}
        print(json.dumps({"what": what, **rounded, "commit": measured_commit()}), flush=True)

    def calm(self) -> None:
        firsts = [self._short().first for _ in range(10)]
        self.report("calm", bob_p50_ms=1e3 * percentile(firsts, 0.5), bob_max_ms=1e3 * max(firsts))

    def behind(self, what: str, count: int) -> None:
        """Bob's short prompts and Carol's streams while so many long prompts of Alice's are computed."""
        over = threading.Event()
        server, draw, options = self._server, self._draw, self._options
        with ThreadPoolExecutor(64) as pool:
            streams = [
                pool.submit(server.ask, 2, server.prompt(draw, SHORT), 100_000, over.is_set)
                for _ in range(options.streams)
            ]
            time.sleep(1.0)
            prompts = [server.prompt(draw, options.long_tokens) for _ in range(count)]
            began = time.monotonic()
            longs = [pool.submit(server.ask, 0, prompt, 8) for prompt in prompts]
            time.sleep(options.every)
            shorts: list[Answer] = []
            while not all(each.done() for each in longs):
                shorts.append(self._short())
                time.sleep(options.every)
            seconds = time.monotonic() - began
            over.set()
            found = [each.result() for each in longs]
            running = [each.result() for each in streams]
        gaps = [
            later - earlier
            for stream in running
            for earlier, later in zip(stream.arrivals, stream.arrivals[1:], strict=False)
            if later > began
        ]
        firsts = [each.first for each in shorts] or [0.0]
        tokens = sum(each.prompt + len(each.arrivals) for each in [*found, *shorts]) + len(gaps)
        self.report(
            what,
            bob_p50_ms=1e3 * percentile(firsts, 0.5),
            bob_p99_ms=1e3 * percentile(firsts, 0.99),
            bob_first_ms=1e3 * firsts[0],
            bob_asked=len(shorts),
            gap_p50_ms=1e3 * percentile(gaps, 0.5),
            gap_p99_ms=1e3 * percentile(gaps, 0.99),
            gap_max_ms=1e3 * max(gaps, default=0.0),
            alice_last_first_token_ms=1e3 * max(each.first for each in found),
            seconds=seconds,
            tokens_a_second=tokens / seconds,
        )

    def mixed(self) -> None:
        draw, options = random.Random(2), self._options
        plans = []
        for _ in range(options.requests):
            long = draw.random() < 0.2
            length = draw.randint(256, options.long_tokens) if long else draw.randint(16, 256)
            plans.append((draw.randrange(3), self._server.prompt(draw, length), draw.randint(16, 64)))
        began = time.monotonic()
        with ThreadPoolExecutor(options.clients) as pool:
            found = list(pool.map(lambda plan: self._server.ask(*plan), plans))
        seconds = time.monotonic() - began
        firsts = [each.first for each in found]
        shorts = [each.first for each in found if each.prompt <= 256]
        gaps = [gap for each in found for gap in each.gaps]
        self.report(
            "mixed",
            first_p50_ms=1e3 * percentile(firsts, 0.5),
            first_p99_ms=1e3 * percentile(firsts, 0.99),
            short_first_p50_ms=1e3 * percentile(shorts, 0.5),
            short_first_p99_ms=1e3 * percentile(shorts, 0.99),
            gap_p50_ms=1e3 * percentile(gaps, 0.5),
            gap_p99_ms=1e3 * percentile(gaps, 0.99),
            gap_max_ms=1e3 * max(gaps),
            seconds=seconds,
            tokens_a_second=sum(each.prompt + len(each.arrivals) for each in found) / seconds,
        )

    def _short(self) -> Answer:
        return self._server.ask(1, self._server.prompt(self._draw, SHORT), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Folder with a config.json; services are started for it.")
    parser.add_argument("--url", help="A server that runs already.")
    parser.add_argument("--vocabulary", type=int, default=32_000, help="Of a server that runs already.")
    parser.add_argument("--keys", default="", help="API keys of three tenants, separated by commas.")
    parser.add_argument("--only", default="calm,one,many,mixed", help="Which workloads (default: all).")
    parser.add_argument("--long", type=int, default=4, help="Long prompts in many (default: 4).")
    parser.add_argument("--long-tokens", type=int, default=8000, help="Tokens of a long prompt (default: 8000).")
    parser.add_argument("--streams", type=int, default=2, help="Streams that run meanwhile (default: 2).")
    parser.add_argument("--every", type=float, default=0.3, help="Seconds between short prompts (default: 0.3).")
    parser.add_argument("--requests", type=int, default=200, help="How many in mixed (default: 200).")
    parser.add_argument("--clients", type=int, default=16, help="How many at a time in mixed (default: 16).")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="The worker's (default: cuda).")
    parser.add_argument("--worker-flags", default="", help="More flags of the worker, in one argument.")
    options = parser.parse_args()
    keys = options.keys.split(",") if options.keys else []
    with ExitStack() as stack:
        if options.url is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-tenants-")))
            model = folder / options.model.name
            model.mkdir()
            write_model(options.model, model)
            flags = ["--load-format", "dummy", "--device", options.device, *shlex.split(options.worker_flags)]
            services = Services(model, "sapwood_worker", flags, (), folder)
            stack.enter_context(services)
            options.url = f"http://{services.http}"
            options.vocabulary = json.loads((options.model / "config.json").read_text())["vocab_size"]
        bench = Bench(Server(options.url, keys, options.vocabulary), options)
        bench.calm()  # also warms up
        for name in options.only.split(","):
            match name:
                case "calm":
                    bench.calm()
                case "one":
                    bench.behind("one", 1)
                case "many":
                    bench.behind("many", options.long)
                case "mixed":
                    bench.mixed()


if __name__ == "__main__":
    main()
