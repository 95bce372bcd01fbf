"""Converts between protobuf and the reports on the KV cache's tiers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sapwood.v1 import worker_pb2
from sapwood_common.errors import InvalidArgumentError
from sapwood_worker.records.tier_report import TierName, TierReport

_TIERS: dict[TierName, worker_pb2.CacheTier] = {
    "device": worker_pb2.CACHE_TIER_DEVICE,
    "host": worker_pb2.CACHE_TIER_HOST,
    "storage": worker_pb2.CACHE_TIER_STORAGE,
}


def to_tier_stats(reports: Sequence[TierReport]) -> list[worker_pb2.CacheTierStats]:
    """The reports as messages."""
    messages = []
    for report in reports:
        fields = msgspec.structs.asdict(report)
        messages.append(worker_pb2.CacheTierStats(**fields | {"tier": _TIERS[report.tier]}))
    return messages


def to_tier_names(request: worker_pb2.ClearCacheRequest) -> list[str]:
    """The tiers to clear, in order; ``all`` for all that there are.

    Raises:
        InvalidArgumentError: A tier is unspecified or unknown.
    """
    names = {value: name for name, value in _TIERS.items()}
    for tier in request.tiers:
        if tier not in names:
            raise InvalidArgumentError(f"{tier} is not a tier", field="tiers")
    return [names[tier] for tier in dict.fromkeys(request.tiers)] or ["all"]
