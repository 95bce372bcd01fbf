"""A worker's settings of several parts; the flags' help says what each part does."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from sapwood_common.settings.compound import Compound, Switch
from sapwood_worker.settings.names import DispatchName, GrammarBackendName, HandoffMover, KvEventsFormat, LanesName


class PipelineParallel(Compound):
    """``--pipeline-parallel``."""

    stages: int = Field(default=1, ge=1)
    micro_batches: LanesName = "auto"


class ExpertParallel(Switch):
    """``--expert-parallel``."""

    on: bool = False
    redundant: int = Field(default=0, ge=0)
    dispatch: DispatchName = "gather"


class Sglang(Switch):
    """``--sglang``."""

    on: bool = False
    tokenizer: str = ""


class Kernels(Compound):
    """``--kernels``."""

    path: Path | None = None
    wait: bool = False


class CudaGraphs(Switch):
    """``--cuda-graphs``."""

    on: bool = True
    max_batch: int | None = Field(default=None, ge=1)


class QueuePolicy(Compound):
    """``--policy``."""

    name: Literal["fcfs", "lpm", "dfs-weight", "lof", "priority"] = "fcfs"
    starved_after: int = Field(default=1024, ge=1)


class Watchdog(Compound):
    """``--watchdog-timeout``."""

    seconds: float = Field(default=300.0, gt=0)
    restart: float = Field(default=600.0, gt=0)


class PrefixCaching(Switch):
    """``--prefix-cache``."""

    on: bool = True
    eviction: Literal["lru", "lfu", "fifo", "slru"] = "lru"


class KvEvents(Compound):
    """``--kv-events``."""

    host: str | None = None
    key_folder: Path | None = None
    format: KvEventsFormat = "map"
    topic: str = "kv-events"
    keep: int = Field(default=10_000, ge=1)


class KvTransfer(Compound):
    """``--kv-transfer``."""

    backend: HandoffMover = "auto"
    share: float = Field(default=0.5, gt=0, le=1)


class HostCache(Compound):
    """``--host-cache``."""

    gb: float = Field(default=0.0, ge=0)
    ratio: float = Field(default=0.0, ge=0)
    write: Literal["write_through", "write_through_selective", "write_back"] = "write_through"


class StoragePrefetch(Compound):
    """``--storage-prefetch``."""

    mode: Literal["best_effort", "wait_complete", "timeout"] = "timeout"
    seconds: float = Field(default=1.0, ge=0)
    per_1k: float = Field(default=0.25, ge=0)
    share: float = Field(default=0.5, gt=0, le=1)
    min_tokens: int | None = Field(default=None, ge=1)


class StructuredOutput(Switch):
    """``--structured-output``."""

    on: bool = True
    backend: GrammarBackendName = "llguidance"
    jump_forward: bool = True
    timeout: float = Field(default=10.0, gt=0)
