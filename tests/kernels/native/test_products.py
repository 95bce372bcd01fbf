"""Products with GGUF's blocks against the numbers that the gguf package reads in them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from sapwood_kernels import reference
from sapwood_kernels.native.build import compile_libraries, find_compiler, library_name
from sapwood_kernels.native.products import TABLES, TYPES, GgufProduct, NativeLibrary, load_library, processor
from sapwood_testing.models.gguf_blocks import HALVES, blocks

whole_numbers = pytest.mark.skipif(processor() != "AVX512", reason="there are no such products for this processor")


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> NativeLibrary:
    installed = load_library()
    if installed is not None:
        return installed
    if find_compiler() is None:
        pytest.skip("no C compiler")
    compile_libraries(folder := tmp_path_factory.mktemp("native"))
    path = folder / library_name(processor())
    if not path.exists():
        pytest.skip(f"nothing is compiled for {path.name}")
    return NativeLibrary(path)


def wide(kind: str, raw: torch.Tensor) -> torch.Tensor:
    values = gguf.dequantize(np.ascontiguousarray(raw.numpy()), gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(np.array(values, np.float32))


def test_all_types_are_tried():
    assert set(HALVES) == set(TYPES | TABLES)


@pytest.mark.parametrize("kind", TYPES | TABLES)
def test_rows_are_to_the_bit_what_the_gguf_package_reads(library, kind):
    raw = blocks(kind, 70, 1536)
    ids = torch.tensor([0, 69, 3, 3, *range(60)])
    assert torch.equal(GgufProduct(library, [(kind, raw)], 1536).rows(ids), wide(kind, raw)[ids])


@pytest.mark.parametrize("kind", TYPES | TABLES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 7, 131])
def test_products_differ_from_the_float32_numbers_only_in_the_order_of_sums(library, kind, tokens):
    raw, x = blocks(kind, 71, 1536), torch.randn(tokens, 1536)
    exact = x.double() @ wide(kind, raw).double().t()
    got = GgufProduct(library, [(kind, raw)], 1536)(x)
    scale = x.double().abs() @ wide(kind, raw).double().abs().t()  # what the sums' terms add up to
    assert ((got - exact).abs() <= 2e-6 * scale).all()


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_matrices_of_several_types_lie_side_by_side(library, tokens):
    parts = [(kind, blocks(kind, rows, 512, rows)) for kind, rows in (("Q5_0", 33), ("Q6_K", 1), ("Q8_0", 64))]
    x = torch.randn(tokens, 512)
    apart = [GgufProduct(library, [part], 512)(x) for part in parts]
    assert torch.equal(GgufProduct(library, parts, 512)(x), torch.cat(apart, 1))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
@pytest.mark.parametrize("tokens", [1, 6, 40])
def test_columns_of_rows_that_lie_apart(library, kind, tokens):
    raw, x = blocks(kind, 40, 1024), torch.randn(tokens, 512)
    _, per_block, block_bytes = TYPES[kind]
    half = raw[:, 512 // per_block * block_bytes :]
    assert torch.equal(
        GgufProduct(library, [(kind, half)], 512)(x), GgufProduct(library, [(kind, half.clone())], 512)(x)
    )


def test_a_row_s_product_is_the_same_in_every_small_batch(library):
    raw, x = blocks("Q5_0", 64, 2048), torch.randn(9, 2048)
    product = GgufProduct(library, [("Q5_0", raw)], 2048)
    together = product(x)
    for count in (2, 3, 8):
        assert torch.equal(product(x[:count]), together[:count])


@whole_numbers
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("tokens", [1, 5, 8, 19, 24, 25])
@pytest.mark.parametrize("gate", [None, "silu"])
def test_three_digits_are_as_near_as_float32(library, kind, tokens, gate):
    """Of 5 to 24 tokens; others are multiplied in float32. Rows are a pair of strips, a strip, and some alone."""
    if gate is not None and tokens > 24:
        pytest.skip("such products have no gate")
    raw, x = blocks(kind, 90, 1536), torch.randn(tokens, 1536)
    x[0, 70:74] *= 1000
    numbers = wide(kind, raw).double().t()
    wanted, scale = x.double() @ numbers, x.double().abs() @ numbers.abs()
    product = GgufProduct(library, [(kind, raw)], 1536, digits=3)
    if gate is None:
        # Of 1920 draws the worst was 1.34e-6, in the row whose largest numbers are a thousand times the others.
        assert ((product(x) - wanted).abs() <= 2e-6 * scale).all()
    else:
        got, exact = product(x * 1e-3, gate=gate), GgufProduct(library, [(kind, raw)], 1536)(x * 1e-3, gate=gate)
        assert (got - exact).norm() <= 1e-5 * exact.norm()  # two products of such a row are multiplied: 3.5e-6 was seen
    if tokens > 4:
        assert torch.equal(product(x[:5]), product(x[: min(tokens, 24)])[:5])


@pytest.mark.parametrize("digits", [2, 3])
def test_codes_of_a_table_are_multiplied_in_float32_whatever_is_allowed(library, digits):
    parts, x = [(kind, blocks(kind, 33, 512)) for kind in ("Q4_0", "IQ4_NL")], torch.randn(7, 512)
    assert torch.equal(GgufProduct(library, parts, 512, digits=digits)(x), GgufProduct(library, parts, 512)(x))


@whole_numbers
def test_three_digits_of_no_numbers_are_none_of_the_others(library):
    raw, x = blocks("Q5_0", 40, 640), torch.randn(7, 640)
    product = GgufProduct(library, [("Q5_0", raw)], 640, digits=3)
    x[1] = 0
    finite = product(x)
    assert finite.isfinite().all() and not finite[1].any()
    x[4, 70], x[5, 3] = torch.nan, torch.inf
    got = product(x)
    assert not got[4].isfinite().any() and not got[5].isfinite().any()
    assert torch.equal(got[[0, 1, 2, 3, 6]], finite[[0, 1, 2, 3, 6]])


def in_whole_numbers(x: torch.Tensor) -> torch.Tensor:
    """What strips.c rounds x to: 16 bits of the largest of each 32 numbers."""
    groups = x.double().unflatten(1, (-1, 32))
    unit = groups.abs().amax(2, keepdim=True) / (127 * 256 + 127)
    return ((groups / unit).round() * unit).flatten(1)


@whole_numbers
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 131])
def test_products_in_whole_numbers_round_x_to_16_bits_and_nothing_else(library, kind, tokens):
    raw, x = blocks(kind, 71, 1536), torch.randn(tokens, 1536)
    numbers = wide(kind, raw).double().t()
    got = GgufProduct(library, [(kind, raw)], 1536, digits=2)(x)
    scale = x.double().abs() @ numbers.abs()
    assert not torch.equal(got, GgufProduct(library, [(kind, raw)], 1536)(x))
    assert ((got - in_whole_numbers(x) @ numbers).abs() <= 2e-6 * scale).all()
    assert ((got - x.double() @ numbers).abs() <= 1e-5 * scale).all()


@whole_numbers
@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K"])
def test_a_row_s_product_in_whole_numbers_is_the_same_in_every_batch(library, kind):
    raw, x = blocks(kind, 64, 2048), torch.randn(40, 2048)
    product = GgufProduct(library, [(kind, raw)], 2048, digits=2)
    together = product(x)
    for count in (0, 1, 2, 3, 5, 8, 9, 30):
        assert torch.equal(product(x[:count]), together[:count])
    weight = torch.rand(2048)
    normed = product(reference.rms_norm(x, weight, 1e-6))
    for count in (1, 8):  # which have the norm in the product
        near = product(x[:count], norm=(weight, 1e-6))
        assert (near - GgufProduct(library, [(kind, raw)], 2048)(x[:count], norm=(weight, 1e-6))).abs().max() > 0
        assert (near - normed[:count]).norm() <= 2e-5 * near.norm()


@whole_numbers
def test_numbers_of_any_size_and_none_stay_in_their_own_token(library):
    raw, x = blocks("Q8_0", 40, 640), torch.randn(7, 640)
    product = GgufProduct(library, [("Q8_0", raw)], 640, digits=2)
    x[1] = 0
    x[2, 32:64] *= 1e12
    x[3] *= 1e-33
    finite = product(x)
    assert finite.isfinite().all() and not finite[1].any()
    assert finite[3].abs().max() < 1e-25
    wanted = x[2].double() @ wide("Q8_0", raw).double().t()
    assert (finite[2] - wanted).abs().max() <= 1e-3 * wanted.abs().max()
    x[4, 70], x[5, 3] = torch.nan, torch.inf
    got = product(x)
    assert not got[4].isfinite().any() and not got[5].isfinite().any()
    others = [0, 1, 2, 3, 6]
    assert torch.equal(got[others], finite[others])


def test_rows_that_are_not_there_and_bytes_of_another_shape_are_refused(library):
    raw = blocks("Q8_0", 8, 64)
    product = GgufProduct(library, [("Q8_0", raw)], 64)
    for row in (8, -1):
        with pytest.raises(IndexError, match="beyond the 8"):
            product.rows(torch.tensor([0, row]))
    with pytest.raises(ValueError, match="rows of 96 numbers in Q8_0"):
        GgufProduct(library, [("Q8_0", raw)], 96)


def test_a_library_that_is_not_there_is_said(monkeypatch, caplog):
    monkeypatch.setattr("sapwood_kernels.native.products.library_name", lambda capability: "sapwood.none.so")
    assert load_library() is None
    assert "GGUF weights are widened as they are loaded" in caplog.text and "hatch_build.py makes it" in caplog.text
