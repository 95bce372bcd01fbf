"""The stand-ins of stored layers are what the formats' own library reads, to the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from sapwood_testing.models import quantised_layers as layouts

compressors = pytest.importorskip("compressed_tensors.compressors", reason="compressed-tensors is not installed")
quantization = pytest.importorskip("compressed_tensors.quantization")

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
FLOAT4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": torch.float8_e4m3fn,
}
MX = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}


@pytest.mark.parametrize(
    ("layout", "kind", "weights"),
    [
        (layouts.pack_quantized, "pack-quantized", INT4),
        (partial(layouts.pack_quantized, sym=False), "pack-quantized", INT4 | {"symmetric": False}),
        (partial(layouts.pack_quantized, bits=8, group=128), "pack-quantized", INT8),
        (layouts.int8, "int-quantized", INT8),
        (partial(layouts.nvfp4, kind="compressed-tensors"), "nvfp4-pack-quantized", FLOAT4),
        (layouts.mxfp4, "mxfp4-pack-quantized", MX),
    ],
)
def test_layers_are_read_by_the_library_of_their_format(
    layout: Callable[..., layouts.Stored], kind: str, weights: dict[str, object]
) -> None:
    torch.manual_seed(0)
    stored, numbers = layout(torch.randn(32, 128))
    compressor = compressors.BaseCompressor.get_value_from_registry(kind)
    scheme = quantization.QuantizationScheme(
        targets=["Linear"], weights=quantization.QuantizationArgs(**weights), format=kind
    )
    got = compressor.decompress(stored, scheme)["weight"]
    # The library's numbers are in 16 bits.
    torch.testing.assert_close(got.float(), numbers.to(got.dtype).float(), rtol=0.01, atol=0.001)
