"""A GPU's operations against those that any device has: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sapwood_kernels.kv_destination import KVDestination
from sapwood_kernels.ops.device import DeviceOps
from sapwood_kernels.rotary_pairs import RotaryPairs
from sapwood_kernels.sampling.cpu_sampling import SamplingBatch

pytest.importorskip("triton", reason="Triton is not installed")
cuda = pytest.importorskip("sapwood_kernels.ops.cuda")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FAST, PLAIN = cuda.CudaOps(DEVICE), DeviceOps(DEVICE)


def both(name: str, *args: object, **options: object) -> list[tuple[Tensor, Tensor]]:
    """The results of an operation, ours and the reference's, pair by pair."""
    results = [getattr(ops, name)(*args, **options) for ops in (FAST, PLAIN)]
    ours, plain = ([each] if isinstance(each, Tensor) else list(each) for each in results)
    return [(x[: len(y)].float(), y.float()) for x, y in zip(ours, plain, strict=True)]


@pytest.mark.parametrize("norm", [False, True])
def test_heads_are_normed_rotated_and_stored_alike(norm: bool):
    qkv, cos, sin = torch.randn(3, 4 * 16), torch.randn(3, 1, 8), torch.randn(3, 1, 8)
    angles = torch.cat((cos, cos), 2).to(DEVICE), torch.cat((-sin, sin), 2).to(DEVICE)
    weights = (*(torch.rand(2, 16) + 0.5).to(DEVICE), 1e-6) if norm else None
    slots = torch.tensor([4, 0, 2], device=DEVICE)
    results = []
    for ops in (FAST, PLAIN):
        cache = torch.zeros(2, 1, 5, 1, 16, device=DEVICE)
        store = ops.store_heads(2, 1, weights, torch.float32)
        results.append((store(qkv.to(DEVICE), *angles, KVDestination(*cache, slots)), cache))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "pairs", [RotaryPairs(16, 16), RotaryPairs(24, 12), RotaryPairs(16, 8, True), RotaryPairs(24, 24, True)], ids=str
)
def test_angles_are_alike(pairs: RotaryPairs):
    table, positions = torch.randn(9, pairs.rotated, device=DEVICE), torch.tensor([8, 0, 3, 3], device=DEVICE)
    assert all(torch.equal(*each) for each in both("angles", table, positions, pairs))


def test_norms_and_activations_are_alike():
    x, weight = torch.randn(3, 32, device=DEVICE), torch.rand(32, device=DEVICE)
    torch.testing.assert_close(*(ops.rms_norm(weight, 1e-6, x.dtype)(x) for ops in (FAST, PLAIN)))
    for gate in ("silu", "gelu_tanh"):
        torch.testing.assert_close(*(ops.gated(gate)(x) for ops in (FAST, PLAIN)), rtol=1e-5, atol=1e-5)


def test_a_single_row_is_multiplied_with_all_that_is_fused():
    x, weight, bias = (torch.randn(size, device=DEVICE) for size in ((1, 32), (64, 32), (64,)))
    scale = torch.rand(32, device=DEVICE)
    one_row = FAST.one_row(weight, bias)
    assert one_row is not None
    wanted = PLAIN.gated("silu")(PLAIN.rms_norm(scale, 1e-6, x.dtype)(x) @ weight.t() + bias)
    torch.testing.assert_close(one_row(x, norm=(scale, 1e-6), gate="silu"), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("grouped", [False, True])
def test_activations_are_quantised_alike(grouped: bool):
    x, weight = torch.randn(4, 256, device=DEVICE), torch.rand(256, device=DEVICE)
    pairs = [
        both("quantise", x, grouped=grouped),
        both("quantise_normed", x, weight, 1e-6, grouped=grouped),
        both("quantise_gated", x, "silu", grouped=grouped),
        both("quantise_tensor", x),
    ]
    for (values, wanted), (scales, wanted_scales) in pairs:
        torch.testing.assert_close(scales, wanted_scales, rtol=1e-5, atol=1e-8)
        assert float((values != wanted).float().mean()) < 0.07  # of the interpreter's rounding to float8


def test_tokens_are_chosen_alike():
    logits = torch.randn(4, 96, device=DEVICE)
    allowed = torch.randint(-(2**31), 2**31 - 1, (4, 3), dtype=torch.int32, device=DEVICE)
    ours, plain = logits.clone(), logits.clone()
    FAST.forbid_tokens(ours, allowed)
    PLAIN.forbid_tokens(plain, allowed)
    assert torch.equal(ours, plain)
    (largest, _), _ = both("row_max", ours)
    ones = torch.ones(2, 1, device=DEVICE)
    batch = SamplingBatch(
        rows=torch.tensor([3, 1], device=DEVICE), count=2, temperature=ones, top_k=96 * ones.long(), top_p=0.9 * ones.double(),
        min_p=0 * ones, uniform=torch.rand(2, 5, dtype=torch.float64, device=DEVICE), most_k=0, any_top_p=True,
    )  # fmt: skip
    ((tokens, wanted),) = both("sample_rows", ours, largest, batch)
    assert tokens.tolist() == wanted.tolist()


def test_penalties_and_counts_are_alike():
    results = []
    rows, slots = torch.tensor([1, 0], device=DEVICE), torch.tensor([0, 2], device=DEVICE)
    for ops in (FAST, PLAIN):
        logits = torch.linspace(-2, 2, 40, device=DEVICE).view(2, 20).contiguous()
        counts = torch.zeros(3, 20, dtype=torch.int32, device=DEVICE)
        seen = torch.zeros(3, 20, dtype=torch.bool, device=DEVICE)
        ops.count_tokens(counts, seen, torch.tensor([7, 9], device=DEVICE), rows, slots)
        settings = torch.tensor([[0.5, 1.0, 2.0], [1.5, 0.0, 1.0]], device=DEVICE)
        ops.apply_penalties(logits, counts, seen, rows, slots, *(settings[:, i : i + 1] for i in range(3)))
        results.append((logits, counts, seen))
    torch.testing.assert_close(*results)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="there is no GPU")
def test_what_is_read_aside_does_not_wait_for_what_is_queued():
    count = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    assert FAST.aside(lambda: int(count)) == 0  # its stream is there
    queued = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    count += 1
    queued.record()
    assert FAST.aside(lambda: int(count)) == 0
    assert not queued.query()
    assert int(count) == 1
