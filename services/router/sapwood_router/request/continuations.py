"""Several continuations of one prompt: each is a run of its own, so each is routed, resumed and detokenized by itself.

The prompt is prefilled once all the same: the runs go to the worker that has the first one's prefix.
"""

from __future__ import annotations

from msgspec.structs import replace

from sapwood_common.contract.sampling import SamplingParams
from sapwood_router.request.context import FieldNames
from sapwood_router.request.validation import check_n

_UINT64 = 2**64


def continuations(sampling: SamplingParams, count: int, fields: FieldNames) -> list[SamplingParams]:
    """The settings of each: the seed is the first one's, and counts up.

    Raises:
        InvalidArgumentError: ``count`` is out of range.
    """
    check_n(count, fields)
    if count == 1:
        return [sampling]
    return [replace(sampling, seed=(sampling.seed + index) % _UINT64) for index in range(count)]
