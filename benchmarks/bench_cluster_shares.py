"""What one tenant's long prompts do to another's first tokens and running streams, on a real ``sapwood up`` cluster with keys.

    python benchmarks/bench_cluster_shares.py [--tree FOLDER] [--words 6000]

Bob asks for the answer to eleven tokens again and again, and has a stream running, while Alice has no, one, then four prompts of
6000 words under way. ``--tree`` runs the code in another checkout, with its stubs generated (``python hatch_build.py`` there).
Prints one JSON object a line, times in ms.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from sapwood_common.tenants.api_keys import hash_key, make_key

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (".", "kernels", "services/common", "services/router", "services/tokenizer", "services/worker")
QUESTION = "The capital of France is a city on the"
WORDS = (
    "river",
    "house",
    "winter",
    "garden",
    "letter",
    "stone",
    "music",
    "harbour",
    "window",
    "bread",
    "cloud",
    "train",
)
CALM, MOST = 10, 40


class Cluster:
    """A running ``sapwood up`` of a checkout's code, with keys of two tenants."""

    def __init__(self, tree: Path) -> None:
        self.keys = {name: make_key() for name in ("alice", "bob")}
        self._folder = tempfile.TemporaryDirectory()
        file = Path(self._folder.name) / "keys"
        file.write_text("".join(f"{name} {hash_key(key)}\n" for name, key in self.keys.items()))
        paths = os.pathsep.join(str(tree / folder) for folder in FOLDERS)
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "sapwood.cli.main", "up", "--ports", "auto", "--workers", "1"),
                *("--router-api-keys", str(file), "--worker-threads", "1", "--router-request-timeout", "900"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": paths},
        )
        self.http = ""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if found := re.search(r"OpenAI API +(https?://\S+)/v1", line):
                self.http = found[1]
            if line.startswith("Ctrl-C stops it"):
                break
        threading.Thread(target=self._process.stdout.read, daemon=True).start()
        if not self.http:
            raise SystemExit("`sapwood up` did not start")

    def times(self, tenant: str, prompt: str, tokens: int, stop: threading.Event | None = None) -> list[float]:
        """When each token of a streamed answer came, in seconds after it was asked for."""
        body = {"prompt": prompt, "max_tokens": tokens, "stream": True, "temperature": 0, "ignore_eos": True}
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        began, found = time.monotonic(), []
        with (
            httpx.Client(trust_env=False, timeout=900) as client,
            client.stream("POST", f"{self.http}/v1/completions", json=body, headers=headers) as answer,
        ):
            if answer.status_code != 200:
                raise SystemExit(answer.read().decode())
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    found.append(time.monotonic() - began)
                if stop is not None and stop.is_set():
                    break
        return found

    def close(self) -> None:
        """Stops it."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()
        self._folder.cleanup()


def measure(cluster: Cluster, long_prompts: int, words: int) -> dict[str, Any]:
    """Bob's first tokens and gaps next to so many long prompts of Alice's."""
    chance, stop, gaps = random.Random(long_prompts), threading.Event(), list[float]()

    def stream() -> None:
        while not stop.is_set():
            times = cluster.times("bob", f"Once upon a time {chance.random()}", 200, stop)
            gaps.extend(after - before for before, after in itertools.pairwise(times))

    prompts = [" ".join(chance.choice(WORDS) for _ in range(words)) for _ in range(long_prompts)]
    spent: list[float] = []
    alices = [
        threading.Thread(target=lambda each=each: spent.append(cluster.times("alice", each, 1)[0])) for each in prompts
    ]
    running = threading.Thread(target=stream)
    running.start()
    time.sleep(2)
    for thread in alices:
        thread.start()
    if alices:
        time.sleep(1)
    firsts: list[float] = []
    while len(firsts) < (MOST if alices else CALM) and (not alices or any(thread.is_alive() for thread in alices)):
        firsts.append(cluster.times("bob", QUESTION, 1)[0])
        time.sleep(0.2)
    for thread in alices:
        thread.join()
    stop.set()
    running.join()
    return {
        "long_prompts": long_prompts,
        "words": words,
        "bobs_first_tokens": len(firsts),
        "first_token_median_ms": round(1000 * statistics.median(firsts)),
        "first_token_worst_ms": round(1000 * max(firsts)),
        "gap_median_ms": round(1000 * statistics.median(gaps)),
        "gap_worst_ms": round(1000 * max(gaps)),
        "alices_first_tokens_s": [round(each, 1) for each in sorted(spent)],
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--words", type=int, default=6000)
    given = parser.parse_args()
    cluster = Cluster(given.tree.resolve())
    try:
        cluster.times("bob", QUESTION, 5)
        for count in (0, 1, 4):
            print(json.dumps({"tree": str(given.tree), **measure(cluster, count, given.words)}), flush=True)
    finally:
        cluster.close()


if __name__ == "__main__":
    main()
