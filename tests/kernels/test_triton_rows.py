"""The product of few rows against plain torch: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sapwood_kernels import reference

pytest.importorskip("triton", reason="Triton is not installed")
triton_rows = pytest.importorskip("sapwood_kernels.triton_rows")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # the interpreter has no products of bfloat16
GATES = {"silu": reference.silu_mul, "gelu_tanh": reference.gelu_tanh_mul}
LIMIT = 0.004 if DEVICE == "cuda" else 1e-5


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(DTYPE)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize(("count", "shares"), [(1, 1), (3, 4), (16, 3), (33, 1)])
def test_products_are_those_of_all_rows_whatever_shares_them_out(count: int, shares: int, gate: str | None, adds: bool):
    torch.manual_seed(count)
    weight = drawn(128, 320) / 320**0.5
    x = drawn(count, 640)[:, 320:]  # rows that lie apart
    expected = x.float() @ weight.float().t()
    if gate is not None:
        expected = GATES[gate](expected)
    total = drawn(count, expected.shape[1]) if adds else None
    if total is not None:
        expected += total.float()
    ended = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    tile = triton_rows.Tile(32, 64, shares, 4, 3)
    got = triton_rows.product(x, weight, ended, tile, gate=gate, add_to=total)
    assert total is None or got is total
    assert (got.float() - expected).norm() < LIMIT * expected.norm()
    assert not ended.any(), "the next launch could not count"


def test_the_tile_of_a_size_is_used_up_to_its_rows_and_results_may_be_wider(monkeypatch: pytest.MonkeyPatch):
    tiles = ((4, triton_rows.Tile(16, 64, 2, 4, 3)), (16, triton_rows.Tile(64, 128, 1, 4, 3)))
    monkeypatch.setattr(triton_rows, "TILES", {(64, 256): tiles})
    weight = (drawn(64, 256) / 16).to(torch.bfloat16)
    few = triton_rows.few_rows(weight)
    assert few is not None and few[1] == 16
    assert triton_rows.few_rows(weight[:, :128].contiguous()) is None
    assert triton_rows.few_rows(weight.float()) is None
    used = []
    right = triton_rows.product

    def product(x, weight, ended, tile, **others):
        used.append(tile)
        return right(x.to(DTYPE), weight.to(DTYPE), ended, tile, **others)

    monkeypatch.setattr(triton_rows, "product", product)
    for count in (2, 4, 5, 16):
        x = drawn(count, 256).to(torch.bfloat16)
        result = few[0](x, dtype=torch.float32)
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, x.float() @ weight.float().t(), rtol=1e-3, atol=1e-3)
    assert used == [tiles[0][1]] * 2 + [tiles[1][1]] * 2


def test_without_its_gate_a_gates_weight_is_computed_by_as_many_programs(monkeypatch: pytest.MonkeyPatch):
    tile = triton_rows.Tile(16, 64, 1, 4, 3)
    monkeypatch.setattr(triton_rows, "TILES", {(64, 256): ((16, tile),)})
    monkeypatch.setattr(triton_rows, "_GATED", {(64, 256)})
    few = triton_rows.few_rows((drawn(64, 256) / 16).to(torch.bfloat16))
    used = []
    monkeypatch.setattr(triton_rows, "product", lambda *given, gate, **others: used.append((gate, given[3].rows)))
    for gate in (None, "silu"):
        few[0](drawn(3, 256), gate=gate)
    assert used == [(None, 32), ("silu", 16)]


def test_measured_tiles_fit_their_weights_gated_or_not():
    assert set(triton_rows.TILES) >= triton_rows._GATED
    for (rows, columns), tiles in triton_rows.TILES.items():
        assert all(rows // 2 % tile.rows == columns % tile.columns == 0 for _, tile in tiles)
        assert [most for most, _ in tiles] == sorted({most for most, _ in tiles})


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sapwood_kernels import triton_gemv, triton_rows

def show(kernel, words, warps, **constants):
    kinds = dict(x="*bf16", weight="*bf16", residual="*bf16", out="*bf16", bias="*bf16", norm="*fp32", scales="*fp32")
    kinds |= dict(parts="*fp32", ended="*i32", eps="fp32", scale_stride="i32", M="i32", x_stride="i32", N="i32", K="i32")
    signature = {name: "constexpr" if name in constants else kinds[name] for name in kernel.arg_names}
    wide = [[at] for at, name in enumerate(signature) if signature[name].startswith("*") or name in ("x_stride", "N", "K")]
    source = ASTSource(
        kernel, signature=signature, constexprs=constants,
        attrs={tuple(at): [["tt.divisibility", 16]] for at in wide if kernel.arg_names[at[0]] not in constants},
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["ptx"]
    before, after = ptx.split("griddepcontrol.wait", 1)
    print(*[before.count(words), after.count("griddepcontrol.wait"), after.count("cp.async.cg")])

for tile in triton_rows.TILES[14336, 8192][0][1:]:
    show(
        triton_rows._rows_kernel, "prefetch.global.L2", tile.warps, ADDS=False, GATE=1, SHARES=1, BLOCK_M=16, BLOCK_N=tile.rows,
        BLOCK_K=tile.columns, STAGES=tile.stages, PDL=True, AHEAD=512,
    )
show(
    triton_gemv._gemv_kernel, "ld.global", 2, N=7168, K=8192, HAS_NORM=False, HAS_BIAS=False, ADDS=False, GATE=1, SCALED=0,
    BLOCK_N=1, BLOCK_K=512, PDL=True,
)
"""


@pytest.mark.slow
def test_first_weights_are_under_way_before_the_kernel_ahead_has_ended(
    lines_of_compiler: Callable[[str], list[list[str]]],
):
    (early, waits, copies), (loads, gemv_waits, _) = (
        [int(each) for each in line] for line in lines_of_compiler(COMPILED)
    )
    assert early > 0 and waits == 0 and copies > 0
    assert loads > 0 and gemv_waits == 0
