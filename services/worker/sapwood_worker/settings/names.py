"""The names that settings take."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator

from sapwood_common.plugins import part_names

Role = Literal["both", "prefill", "decode"]
DispatchName = Literal["gather", "direct", "direct-float8"]
AllReduceName = Literal["auto", "backend", "one-shot", "two-shot"]
HandoffMover = Literal["auto", "tcp", "shm", "nixl", "mooncake", "cuda"]

LINEAR_METHODS = "sapwood.linear_methods"
"""The group of entry points by which packages bring formats of weights."""
QUANTIZATIONS = ("none", "fp8", "fp8_block", "fp8_tensor", "int8", "int4")


def _is_quantization(name: str) -> str:
    names = part_names(LINEAR_METHODS, dict.fromkeys(QUANTIZATIONS))
    if name not in names:
        raise ValueError(f"{name!r} is none of {', '.join(names)}")
    return name


def _is_speculation(name: str) -> str:
    kind, colon, model = name.partition(":")
    if kind not in ("draft", "eagle") if colon else name not in ("auto", "off", "prefix", "mtp"):
        raise ValueError(f"{name!r} is none of auto, off, prefix, mtp, draft:MODEL and eagle:MODEL")
    if colon and not model:
        raise ValueError(f"{name!r} names no model")
    return name


SpeculateChoice = Annotated[str, AfterValidator(_is_speculation)]
QuantizationName = Annotated[str, AfterValidator(_is_quantization)]
