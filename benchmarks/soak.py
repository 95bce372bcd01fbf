"""Serves requests of ever other lengths for a long time and shows the private memory of each process over time.

    python benchmarks/soak.py --minutes 40 --every 30 --out soak.json

Private memory is what a process alone holds and has written (``Private_Dirty`` of ``/proc/PID/smaps_rollup``). The slope is that
of a straight line through the second half of the time: at first caches fill. ONEDNN_PRIMITIVE_CACHE_CAPACITY=1024
LRU_CACHE_CAPACITY=1024 before the command shows how it was without our bound of torch's caches.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

import sapwood

_DIRTY = re.compile(r"Private_Dirty:\s+(\d+) kB")
_WORDS = (
    "river",
    "stone",
    "winter",
    "letter",
    "engine",
    "garden",
    "silver",
    "quiet",
    "harbour",
    "ninety",
    "paper",
    "bridge",
)


@dataclass
class Memory:
    """A process's memory over time: seconds and MB."""

    name: str
    at: list[tuple[float, float]] = field(default_factory=list)

    @property
    def slope(self) -> float:
        """MB an hour, in the second half."""
        points = self.at[len(self.at) // 2 :]
        if len(points) < 3:
            return 0.0
        mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
        spread = sum((x - mean_x) ** 2 for x, _ in points)
        return 3600 * sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def children_of(parent: int) -> list[int]:
    """All processes below one."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found, order = [], [parent]
    for each in order:  # grows meanwhile
        below = [child for child, above in parents.items() if above == each]
        found += below
        order += below
    return found


def name_of(pid: int) -> str:
    """What a process is: the module that it runs."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    module = next((word for word in words if word.startswith("sapwood")), words[0])
    return f"{module} {pid}"


def dirty_mb(pid: int) -> float:
    """MB that a process alone holds."""
    found = _DIRTY.search(Path(f"/proc/{pid}/smaps_rollup").read_text())
    return int(found[1]) / 1024 if found else 0.0


async def soak(args: argparse.Namespace) -> dict[int, Memory]:
    """Runs requests and takes samples."""
    memory: dict[int, Memory] = {}
    rng, began = random.Random(args.seed), time.monotonic()
    end, done = began + 60 * args.minutes, 0

    async def client(engine: sapwood.AsyncEngine) -> None:
        nonlocal done
        while time.monotonic() < end:
            words = rng.choices(_WORDS, k=rng.choice((3, 30, 300)) + rng.randrange(60))
            await engine.generate(" ".join(words), max_tokens=rng.randrange(1, 48), temperature=rng.choice((0.0, 0.8)))
            done += 1

    async def sample() -> None:
        while time.monotonic() < end:
            for pid in children_of(args.pid):
                try:
                    memory.setdefault(pid, Memory(name_of(pid))).at.append((time.monotonic() - began, dirty_mb(pid)))
                except OSError:
                    continue
            shown = ", ".join(f"{each.name} {each.at[-1][1]:.0f}" for each in memory.values())
            print(f"{(time.monotonic() - began) / 60:6.1f} min, {done} requests: MB: {shown}", flush=True)
            await asyncio.sleep(args.every)

    async with sapwood.AsyncEngine(args.model, num_pages=args.pages) as engine:
        await asyncio.gather(sample(), *(client(engine) for _ in range(args.clients)))
    return memory


def main() -> None:
    """Prints each process's memory at the beginning, in the middle and at the end, and its slope."""
    import os

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo-base")
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--every", type=float, default=30.0, help="seconds between samples")
    parser.add_argument("--clients", type=int, default=6, help="requests at a time")
    parser.add_argument("--pages", type=int, default=512, help="of the KV cache, which fills at first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="all samples, as JSON")
    args = parser.parse_args()
    args.pid = os.getpid()
    memory = asyncio.run(soak(args))
    for each in memory.values():
        first, middle, last = (each.at[index][1] for index in (0, len(each.at) // 2, -1))
        print(
            f"{each.name}: {first:.0f} MB, {middle:.0f} in the middle, {last:.0f} at the end; {each.slope:+.0f} MB an hour"
        )
    if args.out is not None:
        args.out.write_text(json.dumps({each.name: each.at for each in memory.values()}))


if __name__ == "__main__":
    main()
