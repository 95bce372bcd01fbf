"""The sampling kernel against the plain formula and the worker's sampler on the CPU: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from sapwood_kernels.sampling.cpu_sampling import PLACES, SamplingBatch, levels

pytest.importorskip("triton", reason="Triton is not installed")
triton_sampling = pytest.importorskip("sapwood_kernels.sampling.triton_sampling")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)[:, None]


def draw(logits: Tensor, uniform: Sequence[float], rows: Tensor | None = None, **settings: float) -> list[int]:
    """Each row with one random number at all levels."""
    count = len(uniform)
    batch = SamplingBatch(
        rows=rows,
        count=count,
        temperature=column([settings.get("temperature", 1.0)] * count),
        top_k=column([settings.get("top_k", logits.shape[1])] * count, torch.int64),
        top_p=column([settings.get("top_p", 1.0)] * count, torch.float64),
        min_p=column([settings.get("min_p", 0.0)] * count),
        uniform=column(list(uniform), torch.float64).repeat(1, levels(logits.shape[1])),
        most_k=0,
        any_top_p=False,
    )
    tokens: Tensor = triton_sampling.sample_rows(logits, logits, batch)
    return tokens.tolist()


def expected(logits: Tensor, uniform: float, **settings: float) -> int:
    """Token by token, in float64."""
    weights = ((logits.double() - logits.max()) / settings.get("temperature", 1.0)).exp()
    least = 0.0
    if "top_k" in settings:
        least = float(weights.sort(descending=True).values[int(settings["top_k"]) - 1])
    if "top_p" in settings:
        ordered = weights[weights >= least].sort(descending=True).values
        reached = ordered.cumsum(0)
        least = float(ordered[int((reached < settings["top_p"] * reached[-1]).sum())])
    weights[weights < max(least, settings.get("min_p", 0.0))] = 0.0
    numbered = [(int(at) % PLACES, int(at) // PLACES, float(weights[at])) for at in weights.nonzero()]
    place, block = descend([(place, weight) for place, _, weight in numbered], uniform, 4), 0
    inside = [(block, weight) for at, block, weight in numbered if at == place]
    block = descend(inside, uniform, levels(len(logits)) - 4)
    return place + PLACES * block


def descend(weights: list[tuple[int, float]], uniform: float, digits: int) -> int:
    """A number of ``digits`` digits to base 8, each chosen by the weights of the numbers that begin so."""
    found = 0
    for digit in reversed(range(digits)):
        child = [0.0] * 8
        for number, weight in weights:
            if number >> 3 * (digit + 1) == found:
                child[number >> 3 * digit & 7] += weight
        target, reached, chosen = uniform * math.fsum(child), 0.0, -1
        while reached <= target and any(child[chosen + 1 :]):
            chosen += 1
            reached += child[chosen]
        found = found * 8 + chosen
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.3},
        {"top_k": 1},
        {"top_k": 7, "temperature": 2.0},
        {"top_p": 0.5},
        {"top_p": 1e-6},
        {"min_p": 0.1},
        {"top_k": 50, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("width", [97, pytest.param(5000, marks=pytest.mark.slow)])
def test_draws_equal_the_plain_formula(width: int, settings: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(width)
    logits = (torch.randn(6, width, generator=generator) * 2).to(DEVICE)
    uniform = [0.0, 0.1, 0.37, 0.5, 0.93, 1.0 - 2.0**-53]
    tokens = draw(logits, uniform, **settings)
    wanted = [expected(row, number, **settings) for row, number in zip(logits, uniform, strict=True)]
    assert tokens[:-1] == wanted[:-1]
    # The very end of the distribution may round to either side; it is never a token without a weight.
    weights = ((logits[-1].double() - logits[-1].max()) / settings.get("temperature", 1.0)).exp()
    assert float(weights[tokens[-1]]) > 0.0


def test_what_does_not_fit_into_one_block_is_drawn_too() -> None:
    logits = (torch.randn(2, 5000, generator=torch.Generator().manual_seed(0)) * 2).to(DEVICE)
    tokens = draw(logits, [0.4, 0.99], min_p=0.01)
    assert tokens == [expected(logits[0], 0.4, min_p=0.01), expected(logits[1], 0.99, min_p=0.01)]
    assert max(tokens) > 4096


def test_some_rows_are_drawn_and_the_logits_stay() -> None:
    logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    before = logits.clone()
    rows = torch.tensor([6, 1, 3], device=DEVICE)
    some = draw(logits, [0.2, 0.4, 0.6], rows=rows, top_p=0.9)
    assert some == draw(logits[rows].contiguous(), [0.2, 0.4, 0.6], top_p=0.9)
    assert torch.equal(logits, before)


def test_forbidden_tokens_are_never_drawn_and_ties_are_kept() -> None:
    logits = torch.full((6, 97), -math.inf, device=DEVICE)
    logits[:, [5, 50, 96]] = 1.0
    uniform = [i / 6 for i in range(6)]
    assert set(draw(logits, uniform, top_k=1)) == {5, 50, 96}
    assert set(draw(logits, uniform, top_p=0.2)) == {5, 50, 96}


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_row_of_no_numbers_gives_some_token_of_the_vocabulary(bad: float) -> None:
    logits = torch.full((2, 300), bad, device=DEVICE)
    logits[1] = 0.0
    tokens = draw(logits, [0.5, 0.5], top_k=5, top_p=0.5)
    assert 0 <= tokens[0] < 300
    assert 0 <= tokens[1] < 300
