"""`--memory-fraction`: of a GPU's memory the cache gets what the weights, the largest step and other programs leave of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sapwood_common.errors import ConfigError
from sapwood_worker.model.runner.memory import measure_pool_bytes

GIB = 1 << 30
DEVICE = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[[], int]]:
    """Stands for a GPU of 80 GiB on which weights, and what other programs have, take so much; returns a trial."""

    def make(*, weights: int, others: int = 0, step: int, cache: int = GIB) -> Callable[[], int]:
        reserved, peak = weights, weights

        def trial() -> int:
            nonlocal peak
            peak = weights + step + cache
            return cache

        stands_for = {
            "synchronize": lambda device: None,
            "empty_cache": lambda: None,
            "memory_reserved": lambda device: reserved,
            "reset_peak_memory_stats": lambda device: None,
            "max_memory_reserved": lambda device: peak,
            "mem_get_info": lambda device: (80 * GIB - reserved - others, 80 * GIB),
        }
        for name, function in stands_for.items():
            monkeypatch.setattr(torch.cuda, name, function)
        return trial

    return make


@pytest.mark.parametrize(("fraction", "left"), [(0.5, 40 - 16 - 4), (0.9, 72 - 16 - 4), (1.0, 80 - 16 - 4)])
def test_the_cache_gets_what_is_left_of_the_fraction(gpu, fraction: float, left: int) -> None:
    trial = gpu(weights=16 * GIB, step=4 * GIB)
    assert measure_pool_bytes(DEVICE, fraction, trial) == left * GIB


def test_what_other_programs_have_counts_as_used_and_the_trials_own_cache_does_not(gpu) -> None:
    trial = gpu(weights=16 * GIB, others=10 * GIB, step=4 * GIB, cache=7 * GIB)
    assert measure_pool_bytes(DEVICE, 0.5, trial) == (40 - 16 - 10 - 4) * GIB


def test_a_fraction_that_leaves_nothing_is_refused_with_what_takes_it(gpu) -> None:
    trial = gpu(weights=16 * GIB, step=4 * GIB)
    assert measure_pool_bytes(DEVICE, 0.2501, trial) < GIB
    with pytest.raises(
        ConfigError, match=r"--memory-fraction 0\.25: of 80\.0 GiB 16\.0 are used and a step needs 4\.0 more"
    ):
        measure_pool_bytes(DEVICE, 0.25, trial)
