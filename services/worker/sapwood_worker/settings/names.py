"""The names that settings take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator

from sapwood_common.plugins import part_names

Role = Literal["both", "prefill", "decode"]
DispatchName = Literal["gather", "direct", "direct-float8"]
AllReduceName = Literal["auto", "backend", "one-shot", "two-shot"]
HandoffMover = Literal["auto", "tcp", "shm", "nixl", "mooncake", "cuda"]
KvEventsFormat = Literal["map", "array"]
LanesName = Literal["auto", "always", "off"]
Half = Literal["prefill", "decode"]

LINEAR_METHODS = "sapwood.linear_methods"
"""The group of entry points by which packages bring formats of weights."""
QUANTIZATIONS = ("none", "fp8", "fp8_block", "fp8_tensor", "int8", "int4")
ATTENTION_BACKENDS = "sapwood.attention_backends"
"""The group of entry points by which packages bring what computes attention: each an ``AttentionBackend``."""
OWN_ATTENTION_BACKENDS = ("flashinfer", "triton", "native", "torch")
GRAMMAR_BACKENDS = "sapwood.grammar_backends"
"""The group of entry points by which packages bring what enforces grammars: each a ``MakeBackend``."""
OWN_GRAMMAR_BACKENDS = ("llguidance", "xgrammar")


def attention_of(setting: str) -> dict[Half, str]:
    """The name for each half of attention: ``triton``, or ``prefill=triton,decode=flashinfer``; one left out is ``auto``.

    Raises:
        ValueError: The setting is malformed.
    """
    halves: tuple[Half, ...] = get_args(Half)
    if not {"=", ","} & set(setting):
        return dict.fromkeys(halves, setting)
    given = {half: name for half, _, name in (each.partition("=") for each in setting.split(","))}
    if not given.keys() <= set(halves) or not all(given.values()) or len(given) <= setting.count(","):
        raise ValueError(f"{setting!r}: write NAME, or prefill=NAME,decode=NAME")
    return {half: given.get(half, "auto") for half in halves}


def _known(name: str, group: str, own: Iterable[str]) -> str:
    names = part_names(group, dict.fromkeys(own))
    if name not in names:
        raise ValueError(f"{name!r} is none of {', '.join(names)}")
    return name


def _is_quantization(name: str) -> str:
    return _known(name, LINEAR_METHODS, QUANTIZATIONS)


def _is_grammar_backend(name: str) -> str:
    return _known(name, GRAMMAR_BACKENDS, OWN_GRAMMAR_BACKENDS)


def _is_attention(setting: str) -> str:
    for name in attention_of(setting).values():
        _known(name, ATTENTION_BACKENDS, ("auto", *OWN_ATTENTION_BACKENDS))
    return setting


def _is_speculation(name: str) -> str:
    kind, colon, model = name.partition(":")
    if kind not in ("draft", "eagle") if colon else name not in ("auto", "off", "prefix", "mtp"):
        raise ValueError(f"{name!r} is none of auto, off, prefix, mtp, draft:MODEL and eagle:MODEL")
    if colon and not model:
        raise ValueError(f"{name!r} names no model")
    return name


SpeculateChoice = Annotated[str, AfterValidator(_is_speculation)]
QuantizationName = Annotated[str, AfterValidator(_is_quantization)]
AttentionSetting = Annotated[str, AfterValidator(_is_attention)]
GrammarBackendName = Annotated[str, AfterValidator(_is_grammar_backend)]
