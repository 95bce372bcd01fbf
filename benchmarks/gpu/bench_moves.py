"""What experts that move between ranks cost and gain: decodes with --redundant-experts and tokens spread unevenly over experts.

First decodes with the experts where they begin; then with moves as a worker chooses them; then, in turns of some steps, without
moves and with two experts that change places before every step, the most that a step can have. Prints milliseconds between
tokens, median and 99th percentile, and how even the ranks' load was. One JSON object a line.

    python benchmarks/gpu/bench_moves.py --model benchmarks/gpu/configs/qwen3-30b-a3b --ranks 4
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from bench_engine import Engine, TimedRunner
from commit import measured_commit
from ranks import Split, leave

from sapwood_worker.core.expert_balancing import ExpertBalancer, ExpertWatch, balance, rank_loads
from sapwood_worker.records.expert_load import ExpertMove, home_slots, moved
from sapwood_worker.records.step import LaunchedStep, Step

STEP_TOKENS = 8192
TURN = 40
"""Steps of a turn without moves, and of one with them."""


class MovingRunner(TimedRunner):
    """Has experts move with the steps that it launches.

    Attributes:
        choose: Gives what moves.
        placed: The expert in each slot of each layer.
        moves: Experts that were copied so far.
    """

    def __init__(self, runner: TimedRunner, layers: int, experts: int, ranks: int, redundant: int) -> None:
        super().__init__(runner)  # type: ignore[arg-type]
        self.choose: Callable[[], Sequence[ExpertMove]] = tuple
        self.placed = [home_slots(experts, ranks, redundant) for _ in range(layers)]
        self.ranks, self.moves = ranks, 0

    def launch(self, planned: Step) -> LaunchedStep:
        planned.moves = tuple(self.choose())
        for layer in {move.layer for move in planned.moves}:
            self.placed[layer] = moved(self.placed[layer], [each for each in planned.moves if each.layer == layer])
        self.moves += sum(move.source >= 0 for move in planned.moves)
        return super().launch(planned)

    def counts(self) -> np.ndarray:
        """Tokens of each layer's experts so far."""
        assert self.experts is not None
        return np.array(self.experts()(), np.float64)

    def rank_balance(self, tokens: np.ndarray) -> float:
        """How even what ranks have got of so many tokens would be where the experts are now; the mean of the layers."""
        found = []
        for loads, slots in zip(tokens, self.placed, strict=True):
            places = np.zeros((len(loads), self.ranks), np.bool_)
            for slot, expert in enumerate(slots):
                if expert >= 0:
                    places[expert, slot * self.ranks // len(slots)] = True
            found.append(balance(rank_loads(loads, places)))
        return float(np.mean(found))


class Swaps:
    """Two experts of two ranks that change places, in another layer each time. Args: runner: Knows where they are."""

    def __init__(self, runner: MovingRunner) -> None:
        self._runner, self._draw, self._count = runner, random.Random(0), 0

    def __call__(self) -> Sequence[ExpertMove]:
        self._count += 1
        layer = self._count % len(self._runner.placed)
        slots = self._runner.placed[layer]
        each = len(slots) // self._runner.ranks
        one, other = self._draw.sample(range(self._runner.ranks), 2)
        pairs = [
            (a, b)
            for a in range(one * each, one * each + each)
            for b in range(other * each, other * each + each)
            if slots[a] >= 0 and slots[b] >= 0
            and slots[a] not in slots[other * each : other * each + each]
            and slots[b] not in slots[one * each : one * each + each]
        ]  # fmt: skip
        a, b = self._draw.choice(pairs)
        return ExpertMove(layer, a, b), ExpertMove(layer, b, a)


class Report:
    """Prints figures. Args: variant: What is measured; where: the device and the commit."""

    def __init__(self, variant: str, where: dict[str, str]) -> None:
        self._variant, self._where = variant, where

    def __call__(self, what: str, value: float, unit: str) -> None:
        row = {"what": f"{self._variant} {what}", "value": round(value, 4), "unit": unit, "engine": "sapwood"}
        print(json.dumps(row | self._where), flush=True)

    def times(self, what: str, milliseconds: list[float]) -> tuple[float, float]:
        """The median and the 99th percentile, printed, too."""
        middle, late = np.percentile(milliseconds, [50, 99])
        self(f"{what} p50", float(middle), "ms")
        self(f"{what} p99", float(late), "ms")
        return float(middle), float(late)


def timed(step: Callable[[], None], steps: int) -> list[float]:
    """Milliseconds of each of some steps."""
    found = []
    for _ in range(steps):
        started = time.perf_counter()
        step()
        found.append((time.perf_counter() - started) * 1000)
    return found


def measure(engine: Engine, runner: MovingRunner, report: Report, batch: int, steps: int, redundant: int) -> None:
    """Does all of it, of so many requests."""
    balancer = ExpertBalancer(runner.ranks, redundant)
    assert runner.experts is not None
    watch = ExpertWatch(runner.experts, balancer=balancer)

    def watched() -> Sequence[ExpertMove]:
        watch.take(idle=False)
        return watch.moves()

    with engine.decoding(batch, length=60 + 4 * steps + 4 * TURN) as step:
        before = runner.counts()
        report.times("still, as at the start", timed(step, steps))
        tokens = runner.counts() - before
        report("rank balance as at the start", runner.rank_balance(tokens), "mean of ranks / the busiest")
        runner.choose = watched
        report.times("moves as a worker chooses them", timed(step, steps))
        runner.choose = tuple
        report("moves that a worker chose", runner.moves, "experts")
        report("rank balance after them", runner.rank_balance(tokens), "mean of ranks / the busiest")
        moves, swaps = runner.moves, Swaps(runner)
        still: list[float] = []
        moving: list[float] = []
        while len(moving) < steps:
            for choose, times in ((tuple, still), (swaps, moving)):
                runner.choose = choose
                times += timed(step, TURN)
        runner.choose = tuple
        middle, late = report.times("still, in turns", still)
        moving_middle, moving_late = report.times("moves before every step", moving)
        report("moves before every step", (runner.moves - moves) / len(moving), "experts a step")
        report("moves before every step p50 / still", moving_middle / middle, "ratio")
        report("moves before every step p99 / still", moving_late / late, "ratio")
        report("moves before every step p99 / still p50", moving_late / middle, "ratio")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Folder with a config.json.")
    parser.add_argument("--ranks", type=int, default=4, help="GPUs (default: 4).")
    parser.add_argument("--redundant-experts", type=int, default=16, help="Slots beyond one for each (default: 16).")
    parser.add_argument(
        "--skew", type=float, default=1.0, help="Standard deviation of experts' logarithms (default: 1)."
    )
    parser.add_argument("--batch", type=int, default=64, help="Requests (default: 64).")
    parser.add_argument("--steps", type=int, default=400, help="Timed of each kind (default: 400).")
    parser.add_argument("--data-parallel-attention", action="store_true", help="Ranks have requests of their own.")
    parser.add_argument("--kv-gb", type=float, default=8.0, help="Of each rank's cache (default: 8).")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to try it.")
    given = parser.parse_args()
    on_gpus = given.device == "cuda"
    split = Split(
        whole_experts=True,
        own_requests=given.data_parallel_attention,
        redundant_experts=given.redundant_experts,
        uniform_tokens=STEP_TOKENS * given.ranks if on_gpus else 0,
        skew=given.skew,
    )
    engine = Engine(
        given.model, max_running=given.batch, max_step_tokens=STEP_TOKENS, kv_gb=given.kv_gb, ranks=given.ranks, split=split,
        device=given.device, attention_backend="triton" if on_gpus else "auto",
    )  # fmt: skip
    assert engine.runner.experts is not None
    layers = engine.runner.experts()()
    runner = MovingRunner(engine.runner, len(layers), len(layers[0]), given.ranks, given.redundant_experts)
    engine.runner = runner
    device = torch.cuda.get_device_name() if on_gpus else "cpu"
    variant = (
        f"{given.model.name}+tp{given.ranks}+ep{'+dp-attention' * given.data_parallel_attention} decode {given.batch}"
    )
    report = Report(variant, {"device": device, "commit": measured_commit()})
    measure(engine, runner, report, given.batch, given.steps, given.redundant_experts)
    engine.close()


if __name__ == "__main__":
    leave(main)
