"""Pictures of 1080p through the engine alone on one GPU, with random weights of the true shape. Prints one JSON object a line.

``first token``: a prompt of 32 tokens of text and so many pictures, beside a text prompt of as many tokens, and the same pictures
a second time behind other text. ``gap``: the time between tokens of 16 streams of text, with nothing beside them, and while
pictures arrive.

    python benchmarks/gpu/bench_pictures.py --model benchmarks/gpu/configs/qwen2.5-vl-7b
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_engine import STEP_TOKENS, Engine, prompts_of
from commit import measured_commit

from sapwood_common.contract.pictures import picture_digest
from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.models.json_file import read_json_object
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.records.pictures import Picture

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


class Shown:
    """Makes prompts with pictures of one size.

    Args:
        config: The model's ``config.json``.
        height, width: Pixels, before they are rounded to whole blocks.
    """

    def __init__(self, config: dict[str, Any], height: int, width: int) -> None:
        vision = config["vision_config"]
        side = int(vision["patch_size"]) * int(vision["spatial_merge_size"])
        self.height, self.width = round(height / side) * side, round(width / side) * side
        self.tokens = self.height * self.width // side**2
        self._token = int(config["image_token_id"])
        self._made = 0

    def picture(self) -> bytes:
        """Pixels that no other picture has."""
        self._made += 1
        return np.random.default_rng(self._made).integers(0, 256, self.height * self.width * 3, np.uint8).tobytes()

    def prompt(self, pixels: list[bytes], seed: int) -> tuple[list[int], list[Picture]]:
        """32 tokens of text, the pictures, and 8 more tokens."""
        draw = random.Random(seed)
        tokens = [draw.randint(10, 99999) for _ in range(32)]
        pictures = []
        for each in pixels:
            shape = 1, self.height, self.width
            pictures.append(Picture(len(tokens), self.tokens, picture_digest("", shape, (), each), shape, (), each))
            tokens += [self._token] * self.tokens
        return tokens + [draw.randint(10, 99999) for _ in range(8)], pictures


class Bench:
    """Runs the workloads and prints their figures."""

    def __init__(self, engine: Engine, shown: Shown, name: str) -> None:
        self.engine, self._shown, self._name = engine, shown, name
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        self._where = {"engine": "sapwood", "device": device, "commit": measured_commit()}

    def report(self, what: str, value: float, unit: str) -> None:
        """Prints a figure."""
        print(
            json.dumps({"what": f"{self._name} {what}", "value": round(value, 4), "unit": unit, **self._where}),
            flush=True,
        )

    def ask(self, tokens: list[int], pictures: list[Picture], length: int = 1) -> int:
        """Adds a request; its number."""
        engine = self.engine
        engine.count += 1
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=length)
        engine.scheduler.add(Request(engine.count, str(engine.count), tokens, sampling, pictures=tuple(pictures)))
        return engine.count

    def seconds(self, tokens: list[int], pictures: list[Picture]) -> float:
        """Seconds to the first token of a request alone."""
        self.engine.wait()
        started = time.perf_counter()
        self.ask(tokens, pictures)
        for _ in self.engine.steps():
            pass
        self.engine.wait()
        return time.perf_counter() - started

    def first_token(self, count: int, repeats: int) -> None:
        """New pictures, text of as many tokens, and pictures that were seen."""
        new, text, again, cached = [], [], [], []
        for turn in range(repeats + 1):  # the first one warms up
            pixels = [self._shown.picture() for _ in range(count)]
            tokens, pictures = self._shown.prompt(pixels, seed=turn)
            self.engine.scheduler.flush_cache()
            new.append(self.seconds(tokens, pictures))
            # Other text before them: pages do not match, encodings do.
            other, same = self._shown.prompt(pixels, seed=1000 + turn)
            again.append(self.seconds(other, same))
            plain = prompts_of(1, len(tokens), seed=turn)[0]
            self.engine.scheduler.flush_cache()
            text.append(self.seconds(plain, []))
            cached.append(self.seconds(prompts_of(1, len(tokens), seed=500 + turn)[0], []))
        best = [min(each[1:]) * 1000 for each in (new, text, again, cached)]
        self.report(f"first token {count} new pictures", best[0], "ms")
        self.report(f"first token {count} pictures as text", best[1], "ms")
        self.report(f"first token {count} pictures again", best[2], "ms")
        self.report(f"first token {count} pictures again ratio", best[2] / best[3], "of text of as many tokens")
        self.report(f"first token {count} new pictures ratio", best[0] / best[1], "of text of as many tokens")

    def gaps(self, rate: float, seconds: float) -> None:
        """Time between tokens of 16 streams, alone and while a picture comes ``rate`` times a second."""
        for pictured in (False, True):
            self.engine.scheduler.flush_cache()
            streams = {self.ask(prompt, [], 20_000) for prompt in prompts_of(16, 512, seed=3)}
            made = [self._shown.prompt([self._shown.picture()], seed=turn) for turn in range(int(rate * seconds) + 1)]
            gaps, last, started, asked = [], 0.0, time.perf_counter(), 0
            for outputs in self.engine.steps():
                now = time.perf_counter()
                if any(output.serial in streams for output in outputs):
                    if last:
                        gaps.append((now - last) * 1000)
                    last = now
                if pictured and now - started > asked / rate and asked < len(made):
                    self.ask(*made[asked], 4)
                    asked += 1
                if now - started > seconds:
                    for serial in streams:
                        self.engine.scheduler.abort(serial)
                    streams = set()
            way = f"while {rate:g} pictures a second arrive" if pictured else "alone"
            for part in (50, 99):
                self.report(
                    f"gap p{part} of 16 streams {way}", float(np.percentile(gaps[len(gaps) // 10 :], part)), "ms"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Folder with a config.json.")
    parser.add_argument("--counts", default="1,8", help="Pictures of a prompt (default: 1,8).")
    parser.add_argument("--size", default="1080x1920", help="Pixels (default: 1080x1920).")
    parser.add_argument("--rate", type=float, default=4.0, help="Pictures a second beside streams (default: 4).")
    parser.add_argument("--seconds", type=float, default=8.0, help="Of each timing of gaps (default: 8).")
    parser.add_argument("--repeats", type=int, default=3, help="Of each first token; the best counts (default: 3).")
    parser.add_argument("--kv-gb", type=float, default=40.0, help="KV cache in GiB (default: 40).")
    parser.add_argument("--device", default="cuda", help="cpu: only to try it (default: cuda).")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    height, width = map(int, given.size.split("x"))
    shown = Shown(read_json_object(given.model / "config.json"), height, width)
    options: dict[str, Any] = {"most_picture_bytes": 1 << 30, "picture_cache_bytes": 2 << 30, "context_length": 32768}
    if given.device == "cpu":
        options["dtype"] = "float32"
    engine = Engine(given.model, 64, STEP_TOKENS, given.kv_gb, device=given.device, **options)
    bench = Bench(engine, shown, given.model.name)
    bench.report("tokens of a picture", shown.tokens, "tokens")
    bench.report("start", engine.start_seconds, "s")
    for count in map(int, given.counts.split(",")):
        bench.first_token(count, given.repeats)
    bench.gaps(given.rate, given.seconds)
    engine.close()


if __name__ == "__main__":
    main()
