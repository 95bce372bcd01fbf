"""What flags of SGLang's server and of ``vllm serve`` are called here; all of SGLang's are in ``sglang_flags.toml``."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

_FILE = Path(__file__).with_name("sglang_flags.toml")
_MORE = {
    "block-size": "--worker-page-size",
    "data-parallel-size": "--workers",
    "dp": "--workers",
    "enforce-eager": "--no-worker-cuda-graphs",
    "gpu-memory-utilization": "--worker-memory-fraction",
    "guided-decoding-backend": "--worker-structured-output",
    "max-model-len": "--worker-context-length",
    "max-num-batched-tokens": "--worker-max-step-tokens",
    "max-num-seqs": "--worker-max-running",
    "no-enable-prefix-caching": "--no-worker-prefix-cache",
    "pipeline-parallel-size": "--worker-pipeline-parallel",
    "pp": "--worker-pipeline-parallel",
    "seed": "--random-seed",
    "tensor-parallel-size": "--tensor-parallel",
    "tp": "--tensor-parallel",
}
"""Flags of ``vllm serve``, and short forms of SGLang's."""


@dataclass(frozen=True, slots=True)
class Counterpart:
    """What stands for some flags of SGLang's.

    Attributes:
        flags: Their names, without dashes.
        ours: Our flags as ``sapwood up`` has them; empty: there is none.
        why: What to know; says why there is none.
    """

    flags: tuple[str, ...]
    ours: tuple[str, ...]
    why: str


def of_sglang() -> list[Counterpart]:
    """All flags of SGLang's server, by what they are about."""
    rows = tomllib.loads(_FILE.read_text("utf-8"))["of"]
    return [
        Counterpart(tuple(row["flags"].split()), tuple(row.get("ours", "").split()), row.get("why", "")) for row in rows
    ]


def flag_of_others(name: str) -> tuple[str, ...]:
    """Our flags for what ``vllm serve`` or SGLang's server calls ``name``; empty: none, or the name is not known."""
    if name in _MORE:
        return (_MORE[name],)
    return next((row.ours for row in of_sglang() if name in row.flags), ())


def reason_without(name: str) -> str:
    """Why there is no flag here for one of SGLang's; empty: there is one, or the name is not known."""
    return next((row.why for row in of_sglang() if name in row.flags and not row.ours), "")
