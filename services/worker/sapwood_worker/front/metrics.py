"""The worker's metrics, and the measurements and traces of each generation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

from sapwood_common.telemetry.metrics import AtMost, MetricSet, OneOf
from sapwood_common.telemetry.shown_text import shown
from sapwood_common.telemetry.tracing import Span, Tracing
from sapwood_worker.ipc.liveness import Liveness
from sapwood_worker.records.expert_load import ExpertLoad
from sapwood_worker.records.load import Load, LoadTime, LoraLoads, LoraUse, StepTime
from sapwood_worker.records.model_info import APART, OVERLAPPED, SUM_METHODS, SUM_SIZES, SumChoices
from sapwood_worker.records.output import RequestOutput
from sapwood_worker.records.pictures import PictureUse

_RANKS = 8
_EXPERTS = 512
_DRAFTERS = OneOf("prefix", "draft", "eagle", "mtp")
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


_MOST_LORAS = 256
_MOST_TEXT = 8192


class Text:
    """A label that is only ever read, not stored: a text of bounded length."""

    def bound(self, value: str) -> str:
        return shown(value, _MOST_TEXT)

    def describe(self) -> str:
        return "a list"


class LoraFigures(Protocol):
    """What there is to measure of a worker's adapters; :class:`~sapwood_worker.front.loras.Loras` has it."""

    slots: int
    read_total: int
    failed_total: int
    loads: Callable[[], LoraLoads | None]

    @property
    def host_bytes(self) -> int: ...

    def known(self) -> Sequence[object]: ...

    def uses(self) -> Mapping[str, LoraUse]: ...


def _used(load: Load) -> float:
    return (load.used_pages - load.evictable_pages) / load.num_pages if load.num_pages else 0.0


def _ran(use: LoraUse) -> int:
    return use.running


def _waited(use: LoraUse) -> int:
    return use.waiting


class WorkerMetrics:
    """The worker's metrics.

    Args:
        metrics: The registry that they are made in.
    """

    def __init__(self, metrics: MetricSet) -> None:
        self._metrics = metrics
        self.requests = metrics.counter(
            "sapwood_worker_requests_total",
            "Generations that ended, by outcome.",
            outcome=OneOf("stop", "length", "handoff", "failed", "aborted"),
        )
        self.queue = metrics.histogram(
            "sapwood_worker_queue_seconds", "From a request's arrival to the first step that computes it."
        )
        self.first_token = metrics.histogram(
            "sapwood_worker_time_to_first_token_seconds", "From a request's arrival to its first token."
        )
        self._step = metrics.histogram(
            "sapwood_worker_step_seconds",
            "Duration of a step: of prompt chunks only (prefill), of decodes only (decode), or of both (mixed).",
            buckets=_STEP_SECONDS,
            kind=OneOf("prefill", "decode", "mixed"),
        )
        self._tokens = metrics.counter(
            "sapwood_worker_step_tokens_total", "Tokens computed.", kind=OneOf("prefill", "decode")
        )
        self._spared = metrics.counter(
            "sapwood_worker_shared_prefix_tokens_total",
            "Cached tokens that attention did not read for a request, because it read them in the same step for another one with "
            "the same prefix.",
            was="sapwood_worker_spared_tokens_total",
        )

    def step(self, step: StepTime) -> None:
        """Counts a step."""
        kind = "decode" if not step.prefill_tokens else "mixed" if step.decode_tokens else "prefill"
        self._step.at(kind=kind).observe(step.seconds)
        self._tokens.at(kind="prefill").inc(step.prefill_tokens)
        self._tokens.at(kind="decode").inc(step.decode_tokens)
        self._spared.at().inc(step.spared_tokens)

    def watch(self, load: Callable[[], Load]) -> None:
        """Adds the metrics that read the load at each scrape."""
        requests = {
            "running_requests": "Requests in the batch.",
            "waiting_requests": "Requests in the queue.",
            "queued_tokens": "Prompt tokens still to compute, of all requests.",
        }
        pages = {
            "used_pages": "Pages of the KV cache that requests or the prefix cache hold.",
            "evictable_pages": "Pages of the KV cache that only the prefix cache holds.",
            "window_pages": "Pages of layers with a window.",
            "used_window_pages": "Pages of layers with a window that requests or the prefix cache hold.",
            "state_slots": "Slots for snapshots of states, of layers that keep a state.",
            "used_state_slots": "Slots for snapshots of states that running requests or the prefix cache hold.",
        }
        counters = {
            "prompt_tokens": "Prompt tokens of requests that have run.",
            "passed_window_pages": "Pages that have slid out of the windows of running requests: freed, or left to the prefix "
            "cache.",
            "evicted_states": "Snapshots of states that have given way to others.",
            "part_page_tokens": "Prompt tokens found in cached pages that are not full or differ behind them, and copied.",
            "prefix_page_tokens": "Of a model with states, prompt tokens whose pages were cached.",
            "prefix_state_tokens": "How many of these a cached state covered too, so that they were not computed.",
            "forced_tokens": "Tokens of output that a grammar forced: they cost no step of their own.",
        }
        self._follow("gauge", load, requests)
        self._metrics.polled(
            "gauge", "sapwood_worker_pages", "Pages of the KV cache.", _reading(lambda: load().num_pages)
        )
        self._follow("gauge", load, pages)
        self._follow("counter", load, counters)
        for_gateways: dict[str, tuple[str, Callable[[], float]]] = {
            "num_requests_running": ("Requests in the batch", lambda: load().running_requests),
            "num_requests_waiting": ("Requests in the queue", lambda: load().waiting_requests),
            "kv_cache_usage_perc": ("Share of the KV cache's pages that requests hold, 0 to 1", lambda: _used(load())),
        }
        for name, (text, read) in for_gateways.items():
            self._metrics.polled("gauge", f"vllm:{name}", f"{text}, as vLLM tells gateways.", _reading(read))
        self._metrics.polled(
            "counter",
            "sapwood_worker_drafted_tokens_total",
            "Tokens that were drafted and checked in a step, by what drafted them and whether the model chose them too.",
            lambda: [
                ((_drafter(load()), "accepted"), load().accepted_tokens),
                ((_drafter(load()), "rejected"), load().drafted_tokens - load().accepted_tokens),
            ],
            drafter=_DRAFTERS,
            outcome=OneOf("accepted", "rejected"),
        )
        self._metrics.polled(
            "counter",
            "sapwood_worker_drafts_total",
            "Drafts that were checked: each brings its request a token and those that were accepted.",
            lambda: [((_drafter(load()),), load().drafts)],
            drafter=_DRAFTERS,
        )
        self._metrics.polled(
            "counter",
            "sapwood_worker_cache_hit_tokens_total",
            "Prompt tokens found in the cache, by where; those of a store (storage) are fetched into the host's memory and "
            "are found there then.",
            lambda: [
                (("device",), load().device_hit_tokens),
                (("host",), load().host_hit_tokens),
                (("storage",), load().storage_hit_tokens),
            ],
            tier=OneOf("device", "host", "storage"),
        )
        self._watch_store(load)
        self._watch_transfers(load)
        self._watch_ranks(load)

    def watch_liveness(self, liveness: Liveness) -> None:
        """Adds the metrics that read the liveness at each scrape."""
        readings: dict[str, tuple[str, Callable[[], float]]] = {
            "scheduler_frozen_seconds": (
                "Seconds since the scheduler process's last sign of life; 0 while it runs.",
                lambda: liveness.frozen,
            ),
            "current_step_seconds": ("Seconds since the scheduler's current step began.", lambda: liveness.step),
            "loop_lag_seconds": (
                "Delay of callbacks in the gRPC front's event loop: the recent maximum, halved every 10 s.",
                lambda: liveness.lag.recent,
            ),
        }
        for name, (text, read) in readings.items():
            self._metrics.polled("gauge", f"sapwood_worker_{name}", text, _reading(read))
        ranks = OneOf(*map(str, range(_RANKS)), shown=f"0 to {_RANKS - 1}")
        self._metrics.polled(
            "gauge",
            "sapwood_worker_rank_frozen_seconds",
            "Seconds since each rank's last sign of life; 0 while it runs.",
            lambda: [((str(rank),), seconds) for rank, seconds in enumerate(liveness.silent)],
            rank=ranks,
        )
        self._metrics.polled(
            "gauge",
            "sapwood_worker_rank_resident_bytes",
            "The host's memory that each rank's process has in use, what ranks share included.",
            lambda: [((str(rank),), size) for rank, size in enumerate(liveness.resident)],
            rank=ranks,
        )
        self._metrics.polled(
            "counter",
            "sapwood_worker_rank_losses_total",
            "How often a rank has died, hung or failed, after which all ranks were started again.",
            lambda: [((str(rank),), liveness.losses[rank]) for rank in sorted({0, *liveness.losses})],
            rank=ranks,
        )

    def watch_experts(self, load: Callable[[], ExpertLoad], tile_sizes: Callable[[], int]) -> None:
        """Adds the metrics of a mixture of experts, which read its load and its tuning at each scrape."""
        self._metrics.polled(
            "gauge",
            "sapwood_worker_expert_tile_sizes",
            "Batch sizes for which the tiles of experts' products were measured, on a GPU; 0: they go by a model.",
            lambda: [((), tile_sizes())],
        )
        self._metrics.polled(
            "counter",
            "sapwood_worker_expert_tokens_total",
            f"Tokens that have gone to each expert, summed over the layers; the first {_EXPERTS} are told apart.",
            lambda: _by_expert(load().tokens),
            expert=OneOf(*map(str, range(_EXPERTS)), "others", shown=f"0 to {_EXPERTS - 1}, others"),
        )
        self._metrics.polled(
            "gauge",
            "sapwood_worker_expert_balance",
            "The tokens that a layer's experts have on average, divided by those of its busiest, as the mean over the layers: "
            "1 if all have the same; 0 without experts.",
            lambda: [((), load().balance)],
        )
        self._metrics.polled(
            "gauge",
            "sapwood_worker_expert_rank_balance",
            "How evenly ranks with whole experts were used lately: a layer's mean tokens a rank, divided by those of its busiest "
            "rank, as the mean over the layers. 1: all have the same; 0: ranks have no whole experts.",
            lambda: [((), 0.0 if (places := load().places) is None else places.balance)],
        )
        self._metrics.polled(
            "counter",
            "sapwood_worker_expert_moves_total",
            "Experts that were copied from rank to rank, so that ranks have equally much to compute.",
            lambda: [((), 0.0 if (places := load().places) is None else float(places.moves))],
        )
        self._metrics.polled(
            "counter",
            "sapwood_worker_expert_exchanged_bytes_total",
            "Bytes that ranks with whole experts have exchanged: tokens' vectors and experts' sums, counted as two-shot sums "
            "move them. With direct dispatch the bytes that the device counted.",
            lambda: [((), 0.0 if (places := load().places) is None else float(places.exchanged_bytes))],
        )

    def watch_loras(self, loras: LoraFigures) -> None:
        """Adds the metrics of adapters, which are read at each scrape."""

        def running(name: str) -> list[tuple[tuple[str, ...], float]]:
            uses = loras.uses()
            return [((lora,), float(getattr(use, name))) for lora, use in sorted(uses.items())]

        def requests() -> list[tuple[tuple[str, ...], float]]:
            if not loras.slots:
                return []
            uses = loras.uses()
            names = [",".join(sorted(lora for lora, use in uses.items() if count(use))) for count in (_ran, _waited)]
            return [((str(loras.slots), *names), time.time())]

        self._metrics.polled(
            "gauge",
            "vllm:lora_requests_info",
            "Which adapters have requests that run, and that wait, as vLLM tells gateways. The value is the time in seconds "
            "since 1970.",
            requests,
            max_lora=Text(),
            running_lora_adapters=Text(),
            waiting_lora_adapters=Text(),
        )
        for state in ("running", "waiting"):
            self._metrics.polled(
                "gauge",
                f"sapwood_worker_lora_{state}_requests",
                f"Requests with each adapter that are {state}.",
                partial(running, state),
                lora=AtMost(_MOST_LORAS),
            )
        self._metrics.polled(
            "gauge",
            "sapwood_worker_lora_slots",
            "Slots of the device for adapters: used by running requests, or unused.",
            lambda: (
                []
                if (loads := loras.loads()) is None
                else [(("used",), float(len(loads.slots) - loads.unused)), (("unused",), float(loads.unused))]
            ),
            state=OneOf("used", "unused"),
        )
        figures: dict[str, tuple[Literal["gauge", "counter"], str, Callable[[], float]]] = {
            "host_bytes": ("gauge", "Bytes of adapters in the host's memory.", lambda: loras.host_bytes),
            "known": ("gauge", "Adapters that requests may name.", lambda: len(loras.known())),
            "slot_loads_total": (
                "counter",
                "How often an adapter was put into a slot of the device.",
                lambda: 0 if (loads := loras.loads()) is None else loads.loads,
            ),
            "slot_claims_total": (
                "counter",
                "How often a slot was taken from an adapter with running requests, for one that had waited.",
                lambda: 0 if (loads := loras.loads()) is None else loads.claims,
            ),
        }
        for name, (kind, text, read) in figures.items():
            self._metrics.polled(kind, f"sapwood_worker_lora_{name}", text, _reading(read))
        self._metrics.polled(
            "counter",
            "sapwood_worker_lora_reads_total",
            "Adapters that were read into the host's memory, by outcome.",
            lambda: [(("read",), float(loras.read_total)), (("failed",), float(loras.failed_total))],
            outcome=OneOf("read", "failed"),
        )

    def watch_pictures(self, use: Callable[[], PictureUse]) -> None:
        """Adds the metrics of pictures, which are read at each scrape."""
        self._metrics.polled(
            "counter",
            "sapwood_worker_pictures_total",
            "Pictures and videos that steps needed: they went through the tower (encoded), or their encoding was kept on the "
            "device or in the host's memory.",
            lambda: [(("encoded",), use().encoded), (("device",), use().device), (("host",), use().host)],
            outcome=OneOf("encoded", "device", "host"),
        )
        self._metrics.polled(
            "counter",
            "sapwood_worker_picture_tokens_total",
            "Tokens of pictures and videos that went through the tower.",
            lambda: [((), use().tokens)],
        )
        self._metrics.polled(
            "counter",
            "sapwood_worker_picture_seconds_total",
            "Seconds that the tower took; on a GPU, those of launching it.",
            lambda: [((), use().seconds)],
        )
        self._metrics.polled(
            "gauge",
            "sapwood_worker_picture_bytes",
            "Bytes of encodings of pictures that are kept, by where.",
            lambda: [(("device",), use().device_bytes), (("host",), use().host_bytes)],
            tier=OneOf("device", "host"),
        )

    def watch_sums(self, counts: Callable[[], dict[str, int]], choices: Callable[[], SumChoices]) -> None:
        """Adds the metrics of sums over the ranks of a layer, which read their counts and how they were chosen at each scrape."""
        self._metrics.polled(
            "counter",
            "sapwood_worker_all_reduces_total",
            "All-reduces over the ranks of a layer, by method. The backend's inside CUDA graphs are counted at capture only.",
            lambda: [((method,), count) for method, count in counts().items() if method in SUM_METHODS],
            method=OneOf(*SUM_METHODS),
        )
        self._metrics.polled(
            "counter",
            "sapwood_worker_overlapped_all_reduces_total",
            "All-reduces that ran while the next chunk of a product or of experts was computed.",
            lambda: [((), counts().get(OVERLAPPED, 0))],
        )
        self._metrics.polled(
            "gauge",
            "sapwood_worker_all_reduce_seconds",
            "Seconds of an all-reduce in the trial at the start, by method and bytes; the fastest method is used. apart: the "
            "best sum, then residual and norm, which +norm replaces where it is faster.",
            lambda: [((each.method, str(each.num_bytes)), each.seconds) for each in choices().times],
            method=OneOf(*SUM_METHODS, APART),
            bytes=OneOf(*map(str, SUM_SIZES)),
        )
        self._metrics.polled(
            "gauge",
            "sapwood_worker_all_reduce_refused",
            "1 for a method that is not used because its sums were wrong in the trial at the start; the log and sapwood worker "
            "info say where. overlapped: sums in parallel with products.",
            lambda: [((name,), 1.0) for name, _ in choices().refused],
            method=OneOf(*SUM_METHODS[1:], OVERLAPPED),
        )

    def _watch_ranks(self, load: Callable[[], Load]) -> None:
        described = {
            "requests": (
                "counter",
                "_total",
                "Requests that each rank has received, where ranks have requests of their own.",
            ),
            "running": ("gauge", "_requests", "Requests in each rank's batch, where ranks have requests of their own."),
            "step_tokens": ("gauge", "", "Cost of a rank's step, as the number of prompt tokens that take as long."),
        }
        for figure, (kind, suffix, text) in described.items():
            self._metrics.polled(
                kind,
                f"sapwood_worker_rank_{figure}{suffix}",
                text,
                partial(_by_rank, load, figure),
                rank=OneOf(*map(str, range(_RANKS)), shown=f"0 to {_RANKS - 1}"),
            )

    def _watch_store(self, load: Callable[[], Load]) -> None:
        self._metrics.polled(
            "counter",
            "sapwood_worker_store_bytes_total",
            "KV cache read from the store that workers share, or written to it.",
            lambda: [(("read",), load().store_read_bytes), (("written",), load().store_written_bytes)],
            direction=OneOf("read", "written"),
        )
        self._metrics.polled(
            "counter",
            "sapwood_worker_store_errors_total",
            "Calls to the store that failed or took too long (call), pages read that were not what they should be (rejected), "
            "pages not written (dropped).",
            lambda: [
                (("call",), load().store_failures),
                (("rejected",), load().store_rejected_pages),
                (("dropped",), load().store_dropped_pages),
            ],
            error=OneOf("call", "rejected", "dropped"),
        )
        self._follow(
            "counter", load, {"store_timeouts": "Requests that stopped waiting for the store before all was there."}
        )

    def _watch_transfers(self, load: Callable[[], Load]) -> None:
        counters = {
            "handoff_tickets": ("kv_transfers_offered", "Prompts whose pages were offered to other workers."),
            "handoff_renewals": ("kv_transfer_renewals", "Renewed leases of offered prompts."),
            "handoff_expired": (
                "kv_transfer_expired",
                "Leases of offered prompts that ended because nobody renewed them.",
            ),
            "pulled_pages": ("kv_transfer_pages", "Pages read from prefill workers."),
            "pulled_bytes": ("kv_transfer_bytes", "Bytes of pages read from prefill workers."),
            "pulled_early_bytes": (
                "kv_transfer_early_bytes",
                "Bytes of pages that came while the prefill worker still computed the rest of the prompt.",
            ),
            "pulled_part_bytes": (
                "kv_transfer_part_bytes",
                "Bytes of pages that came while the prefill worker computed the last layers of these pages.",
            ),
            "pull_failures": ("kv_transfer_failures", "Reads that failed because the prefill worker was gone."),
            "pull_stale_pages": (
                "kv_transfer_stale_pages",
                "Pages that the prefill worker no longer had, or that failed their check: computed instead.",
            ),
            "pull_fallbacks": (
                "kv_transfer_fallbacks",
                "Requests that had to compute pages that another worker had offered.",
            ),
        }
        kept = {
            "handoff_pages": ("kv_transfer_kept_pages", "Pages of the host's memory that are kept for other workers.")
        }
        for kind, end, described in (("counter", "_total", counters), ("gauge", "", kept)):
            for figure, (name, text) in described.items():
                read = _reading(partial(_field, load, figure))
                was = f"sapwood_worker_{figure}{end}"
                self._metrics.polled(kind, f"sapwood_worker_{name}{end}", text, read, was=was)

    def _follow(self, kind: str, load: Callable[[], Load], described: Mapping[str, str]) -> None:
        """Adds metrics that each show a field of the load: the field's name, and what the metric says."""
        for figure, text in described.items():
            name = f"sapwood_worker_{figure}" + ("_total" if kind == "counter" else "")
            self._metrics.polled(kind, name, text, _reading(partial(_field, load, figure)))


def _reading(read: Callable[[], float]) -> Callable[[], list[tuple[tuple[str, ...], float]]]:
    return lambda: [((), read())]


def _field(load: Callable[[], Load], name: str) -> float:
    return float(getattr(load(), name))


def _drafter(load: Load) -> str:
    return load.drafter or "prefix"


def _by_rank(load: Callable[[], Load], name: str) -> list[tuple[tuple[str, ...], float]]:
    return [((str(rank),), float(getattr(each, name))) for rank, each in enumerate(load().ranks)]


def _by_expert(tokens: tuple[int, ...]) -> list[tuple[tuple[str], float]]:
    found = [((str(expert),), float(count)) for expert, count in enumerate(tokens[:_EXPERTS])]
    others = sum(tokens[_EXPERTS:])
    return [*found, (("others",), float(others))] if others else found


# The front's measurements and traces of each generation: time in the queue, to the first token, and to the end.


@dataclass(slots=True)
class _Times:
    """When things happened to one generation, in seconds on ``time.monotonic``'s clock; ``last``: its latest output."""

    span: Span | None
    arrived: float
    started: float | None = None
    first: float | None = None
    last: RequestOutput | None = None
    loads: list[LoadTime] = field(default_factory=list)


class EngineObserver:
    """Counts, times and traces what the engine reports, on the event loop.

    Args:
        metrics: The worker's.
        tracing: Where spans go; only requests that name a trace context have any.
    """

    def __init__(self, metrics: WorkerMetrics, tracing: Tracing | None = None) -> None:
        self._metrics = metrics
        self._tracing = tracing or Tracing()
        self._running: dict[int, _Times] = {}
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def submitted(self, serial: int, request_id: str, traceparent: str | None) -> None:
        """A generation was handed to the scheduler."""
        span = None
        if self._tracing.on and traceparent is not None:
            span = self._tracing.start(
                "worker generate", parent=traceparent, kind="server", attributes={"sapwood.request_id": request_id}
            )
        self._running[serial] = _Times(span, time.monotonic())

    def steps(self, steps: Sequence[StepTime]) -> None:
        """Steps ended."""
        for step in steps:
            self._metrics.step(step)
            for serial in step.started:
                if (times := self._running.get(serial)) is not None:
                    times.started = step.at
                    self._metrics.queue.at().observe(max(0.0, step.at - times.arrived))
            for load in step.loads:
                if (times := self._running.get(load.serial)) is not None:
                    times.loads.append(load)

    def outputs(self, outputs: Sequence[RequestOutput]) -> None:
        """Generations got outputs."""
        for output in outputs:
            if (times := self._running.get(output.serial)) is None:
                continue
            times.last = output
            if times.first is None and output.token_ids:
                times.first = time.monotonic()
                self._metrics.first_token.at().observe(times.first - times.arrived)

    def closed(self, serial: int, *, active: bool) -> None:
        """A generation ended. ``active``: the scheduler was not done with it, so it was aborted."""
        times = self._running.pop(serial)
        last = times.last
        finish = last.finish_reason if last is not None else None
        outcome = "aborted" if active else finish if finish in ("stop", "length", "handoff") else "failed"
        self._metrics.requests.at(outcome=outcome).inc()
        if times.span is not None:
            self._end_span(times, times.span, outcome)

    def _end_span(self, times: _Times, span: Span, outcome: str) -> None:
        now = time.monotonic()
        bounds = [("queue", times.arrived, times.started), ("prefill", times.started, times.first)]
        bounds.append(("decode", times.first, now))
        for name, begin, end in bounds:
            if begin is not None:
                part = self._tracing.start(name, parent=span.traceparent, at_ns=self._unix_ns(begin))
                part.end(at_ns=self._unix_ns(now if end is None else end))
        for load in times.loads:
            attributes = {"sapwood.cache.tier": load.tier, "sapwood.cache.pages": load.pages}
            part = self._tracing.start(
                "cache load", parent=span.traceparent, attributes=attributes, at_ns=self._unix_ns(load.began)
            )
            part.end(at_ns=self._unix_ns(load.ended))
        if times.last is not None:
            span.set("gen_ai.usage.input_tokens", times.last.prompt_tokens)
            span.set("gen_ai.usage.output_tokens", times.last.completion_tokens)
            span.set("gen_ai.usage.cache_read.input_tokens", times.last.cached_tokens)
            span.set("sapwood.drafted_tokens", times.last.drafted_tokens)
            span.set("sapwood.accepted_tokens", times.last.accepted_tokens)
        span.set("sapwood.outcome", outcome)
        if outcome == "failed":
            span.set("error.type", outcome)
        span.end(error=outcome if outcome == "failed" else None)

    def _unix_ns(self, seconds: float) -> int:
        return self._epoch_ns + round(seconds * 1e9)
