"""Products whose rows do not depend on each other, to the bit: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from sapwood_kernels import reference

pytest.importorskip("triton", reason="Triton is not installed")
fixed_order = pytest.importorskip("sapwood_kernels.triton_fixed_order")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # the interpreter has no products of bfloat16
GATES = {"silu": reference.silu_mul, "gelu_tanh": reference.gelu_tanh_mul}
LIMIT = 0.004 if DEVICE == "cuda" else 1e-5


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(DTYPE)


def drawn_for_bits(*shape: int) -> torch.Tensor:
    """Numbers whose bits are compared: on a CPU sixteenths, whose products and sums are exact. The interpreter calls numpy,
    and the order in which some processors' numpy adds up depends on the tile's shape."""
    return drawn(*shape) if DEVICE == "cuda" else torch.randint(-32, 33, shape) / 16


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize(("count", "inputs"), [(1, 512), (33, 200)])
def test_products_are_those_of_plain_torch(count: int, inputs: int, gate: str | None, adds: bool) -> None:
    torch.manual_seed(count)
    weight, bias = drawn(152, inputs) / inputs**0.5, drawn(152)
    x = drawn(count, 2 * inputs)[:, inputs:]  # rows that lie apart
    expected = x.float() @ weight.float().t() + bias.float()
    if gate is not None:
        expected = GATES[gate](expected)
    total = drawn(count, expected.shape[1]) if adds else None
    if total is not None:
        expected += total.float()
    product = fixed_order.FixedOrderProduct(weight, bias, 4)
    got = product(x, gate=gate, add_to=total)
    assert total is None or got is total
    assert (got.float() - expected).norm() < LIMIT * expected.norm()
    assert not product._ended.any(), "the next launch could not count"


@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(128, 576), (192, 1100)]
    if DEVICE == "cpu"
    else [(4096, 4096), (4096, 14336), (28672, 4096), (6144, 4096), (1000, 1100)],
)
def test_a_row_is_the_same_to_the_bit_beside_any_others(outputs: int, inputs: int, gate: str | None) -> None:
    torch.manual_seed(outputs)
    weight = drawn_for_bits(outputs, inputs)
    x = drawn_for_bits(300 if DEVICE == "cpu" else 3000, inputs)
    product = fixed_order.FixedOrderProduct(weight, None, 132)
    assert fixed_order.shares_of(outputs, inputs) > 1 or outputs > 7000
    wanted = product(x, gate=gate, dtype=torch.float32)
    for count in (1, 2, 7, 17, 40, 64, 65, 100, 129, 256):
        begin = count % 5
        got = product(x[begin : begin + count], gate=gate, dtype=torch.float32)
        assert torch.equal(got, wanted[begin : begin + count]), f"{count} rows"


@pytest.mark.parametrize("apart", [True, False])
def test_shares_of_programs_of_their_own_add_up_to_the_same_bits(apart: bool) -> None:
    torch.manual_seed(3)
    weight, x = drawn_for_bits(128, 700), drawn_for_bits(40, 700)
    wanted = fixed_order.FixedOrderProduct(weight, None, 4, tile=fixed_order.Tile(16, 64, 4, 3), apart=not apart)(x)
    got = fixed_order.FixedOrderProduct(weight, None, 4, tile=fixed_order.Tile(64, 128, 4, 3, 128), apart=apart)(x)
    assert torch.equal(got, wanted)
