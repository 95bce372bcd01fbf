"""The sampling kernel against the plain formula and the worker's sampler on the CPU: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from sapwood_kernels.sampling import cpu_sampling
from sapwood_kernels.sampling.cpu_sampling import PLACES, SETTINGS, SamplingBatch, levels

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


def settings_of(*rows: tuple[float, int, float, float, int]) -> Tensor:
    """Temperature, top-k, top-p, min-p and seed of each row."""
    found = torch.zeros(len(rows), SETTINGS, dtype=torch.int64)
    floats = found.view(torch.float64)
    for at, (temperature, top_k, top_p, min_p, seed) in enumerate(rows):
        floats[at, 0], floats[at, 2], floats[at, 3] = temperature, top_p, min_p
        found[at, 1], found[at, 4] = top_k, seed
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "width",
    [
        300,
        pytest.param(4200, marks=pytest.mark.slow),
        pytest.param(151936, marks=pytest.mark.skipif(DEVICE == "cpu", reason="takes a GPU")),
    ],
)
def test_rows_are_drawn_by_the_settings_in_their_slots_as_on_a_cpu(width: int, dtype: torch.dtype) -> None:
    plain = width, 1.0, 0.0
    settings = settings_of(
        (1.0, *plain, 1),
        (0.0, *plain, 2),
        (0.6, 20, 0.95, 0.0, -3),  # a seed over 2**63
        (1.0, min(width, 2000) - 1, 1.0, 0.0, 4),  # more than the candidates of a wide row
        (1.0, width, 0.9, 0.0, 5),
        (2.0, width, 0.99, 0.05, 6),
        (0.7, width, 1.0, 0.2, 7),
        (1.5, 70, 0.5, 0.0, 8),
    )
    generator = torch.Generator().manual_seed(width)
    logits = torch.randn(12, width, generator=generator).to(dtype)
    logits[9:] *= 4
    slots = torch.tensor([7, 6, 5, 4, 3, 2, 1, 0, 0, 2, 4, 1])
    positions = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 4095, 10, 1 << 40])
    found = triton_sampling.draw_rows(*(each.to(DEVICE) for each in (logits, settings, slots, positions)))
    wanted = cpu_sampling.draw_rows(logits, settings, slots, positions)
    assert [each.tolist() for each in found] == [each.tolist() for each in wanted]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_without_finite_logits_has_no_token(bad: float) -> None:
    logits = torch.zeros(2, 300)
    logits[0] = bad
    settings, at = settings_of((1.0, 300, 1.0, 0.0, 1), (0.0, 300, 1.0, 0.0, 1)), torch.tensor([0, 1])
    for slots in (at, 1 - at):
        greedy, drawn = triton_sampling.draw_rows(*(each.to(DEVICE) for each in (logits, settings, slots, at)))
        assert greedy.tolist() == [-1, 0]
        assert drawn[0] == -1 and 0 <= drawn[1] < 300
