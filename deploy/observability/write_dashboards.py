"""Writes grafana/dashboards/*.json: a dashboard is a list of panels here, and pages of JSON there. Beside them the alert rules
once more, as the Prometheus operator wants them.

python deploy/observability/write_dashboards.py            writes them
python deploy/observability/write_dashboards.py --check    exits 1 if they are not up to date
"""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
TARGET = _HERE / "grafana" / "dashboards"
RULES = _HERE.parent / "k8s" / "components" / "prometheus-operator" / "rules.yaml"
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3


@dataclass(frozen=True)
class Panel:
    """A graph: its queries by legend."""

    title: str
    unit: str
    queries: dict[str, str]


def quantiles(metric: str, by: str = "") -> dict[str, str]:
    """p50, p95 and p99 of a histogram."""
    legend = f" {{{{{by}}}}}" if by else ""
    inner = f"sum by (le{', ' + by if by else ''}) (rate({metric}_bucket[$__rate_interval]))"
    return {f"p{q * 100:.0f}{legend}": f"histogram_quantile({q}, {inner})" for q in (0.5, 0.95, 0.99)}


def p95(metric: str, by: str) -> dict[str, str]:
    """p95 of a histogram, by a label."""
    return {f"{{{{{by}}}}}": f"histogram_quantile(0.95, sum by (le, {by}) (rate({metric}_bucket[$__rate_interval])))"}


def rate(metric: str, by: str, selector: str = "") -> dict[str, str]:
    """Events a second by a label."""
    return {f"{{{{{by}}}}}": f"sum by ({by}) (rate({metric}{selector}[$__rate_interval]))"}


def share(part: str, whole: str, by: str = "") -> str:
    """One rate over another."""
    grouped = f"sum by ({by}) " if by else "sum"
    return f"{grouped}(rate({part}[$__rate_interval])) / {grouped}(rate({whole}[$__rate_interval]))"


DASHBOARDS: dict[str, list[Panel]] = {
    "overview": [
        Panel("Requests by status", "reqps", rate("sapwood_router_requests_total", "code")),
        Panel("Time to first token", "s", quantiles("sapwood_router_time_to_first_token_seconds")),
        Panel("Time between tokens", "s", quantiles("sapwood_router_inter_token_seconds")),
        Panel(
            "Requests under way, and of these waiting for a worker with room",
            "short",
            {
                "{{instance}}": "sapwood_router_running_requests",
                "{{instance}} waiting": "sapwood_router_queued_requests",
            },
        ),
        Panel(
            "Tokens a second",
            "short",
            {
                "prompt": "sum(rate(sapwood_router_prompt_tokens_total[$__rate_interval]))",
                "generated": "sum(rate(sapwood_router_completion_tokens_total[$__rate_interval]))",
            },
        ),
        Panel("Duration of requests", "s", quantiles("sapwood_router_request_seconds")),
        Panel(
            "Workers that can take requests",
            "short",
            {"{{instance}}": "sapwood_router_available_workers"},
        ),
        Panel("Services up", "short", {"{{job}}": 'sum by (job) (up{job=~"router|tokenizer|worker"})'}),
        Panel("Memory", "bytes", {"{{job}} {{instance}}": "process_resident_memory_bytes"}),
    ],
    "router": [
        Panel(
            "Requests on each worker",
            "short",
            {"{{worker}}": "sum by (worker) (sapwood_router_worker_in_flight_requests)"},
        ),
        Panel("Why workers were chosen", "reqps", rate("sapwood_router_selections_total", "reason")),
        Panel(
            "Further tries, resumed streams, lost workers",
            "reqps",
            {
                "tries after {{code}}": "sum by (code) (rate(sapwood_router_retries_total[$__rate_interval]))",
                "resumed": "sum(rate(sapwood_router_resumptions_total[$__rate_interval]))",
                "lost {{worker}}": "sum by (worker) (rate(sapwood_router_worker_losses_total[$__rate_interval]))",
            },
        ),
        Panel(
            "Circuit breakers (0: closed, 1: half-open, 2: open)",
            "short",
            {"{{worker}}": "max by (worker) (sapwood_router_worker_breaker_state)"},
        ),
        Panel(
            "Time in each stage, p95",
            "s",
            {
                **p95("sapwood_router_stage_seconds", "stage"),
            },
        ),
        Panel(
            "Prompt tokens on their way",
            "short",
            {"{{worker}}": "sum by (worker) (sapwood_router_worker_pending_tokens)"},
        ),
        Panel(
            "Prompts handed from worker to worker, and what cost least",
            "reqps",
            {
                "handed over": "sum(rate(sapwood_router_kv_transfers_total[$__rate_interval]))",
                **rate("sapwood_router_disaggregation_weighed_total", "choice"),
            },
        ),
        Panel(
            "Parts of handed-over requests, p95",
            "s",
            {
                **p95("sapwood_router_pair_seconds", "part"),
            },
        ),
        Panel(
            "Handed-over pages: read, stale, computed after all",
            "short",
            {
                "bytes read {{instance}}": "rate(sapwood_worker_kv_transfer_bytes_total[$__rate_interval])",
                "of these early {{instance}}": "rate(sapwood_worker_kv_transfer_early_bytes_total[$__rate_interval])",
                "stale {{instance}}": "rate(sapwood_worker_kv_transfer_stale_pages_total[$__rate_interval])",
                "requests that computed {{instance}}": "rate(sapwood_worker_kv_transfer_fallbacks_total[$__rate_interval])",
                "leases that ended unasked {{instance}}": "rate(sapwood_worker_kv_transfer_expired_total[$__rate_interval])",
            },
        ),
        Panel("gRPC calls", "reqps", rate("sapwood_rpc_calls_total", "method")),
        Panel(
            "gRPC calls, p95",
            "s",
            {
                **p95("sapwood_rpc_seconds", "method"),
            },
        ),
        Panel("CPU", "percentunit", {"{{job}} {{instance}}": "rate(process_cpu_seconds_total[$__rate_interval])"}),
    ],
    "pictures": [
        Panel("Pictures and videos prepared", "ops", rate("sapwood_tokenizer_pictures_total", "outcome")),
        Panel(
            "Seconds of fetching and decoding, a second", "s", rate("sapwood_tokenizer_picture_seconds_total", "stage")
        ),
        Panel("Pictures that steps needed", "ops", rate("sapwood_worker_pictures_total", "outcome")),
        Panel(
            "Share of pictures whose encoding was kept",
            "percentunit",
            {
                "share": '1 - sum(rate(sapwood_worker_pictures_total{outcome="encoded"}[$__rate_interval])) / '
                "sum(rate(sapwood_worker_pictures_total[$__rate_interval]))"
            },
        ),
        Panel(
            "Tokens of pictures that a second of the tower encodes",
            "short",
            {"tokens": share("sapwood_worker_picture_tokens_total", "sapwood_worker_picture_seconds_total")},
        ),
        Panel("Encodings that are kept", "bytes", {"{{instance}} {{tier}}": "sapwood_worker_picture_bytes"}),
    ],
    "cache": [
        Panel(
            "Share of prompt tokens found cached",
            "percentunit",
            {
                "{{tier}}": "sum by (tier) (rate(sapwood_worker_cache_hit_tokens_total[$__rate_interval]))"
                " / scalar(sum(rate(sapwood_worker_prompt_tokens_total[$__rate_interval])))",
                "as routed": share("sapwood_router_cached_tokens_total", "sapwood_router_prompt_tokens_total"),
            },
        ),
        Panel(
            "Pages held by running requests",
            "percentunit",
            {"{{instance}}": "(sapwood_worker_used_pages - sapwood_worker_evictable_pages) / sapwood_worker_pages"},
        ),
        Panel(
            "Pages held by the prefix cache",
            "percentunit",
            {"{{instance}}": "sapwood_worker_evictable_pages / sapwood_worker_pages"},
        ),
        Panel("Requests in the batch", "short", {"{{instance}}": "sapwood_worker_running_requests"}),
        Panel("Requests in the queue", "short", {"{{instance}}": "sapwood_worker_waiting_requests"}),
        Panel("Time in the queue", "s", quantiles("sapwood_worker_queue_seconds")),
        Panel(
            "Duration of steps, p95",
            "s",
            {
                **p95("sapwood_worker_step_seconds", "kind"),
            },
        ),
        Panel("Tokens computed", "short", rate("sapwood_worker_step_tokens_total", "kind")),
        Panel("Store that workers share", "Bps", rate("sapwood_worker_store_bytes_total", "direction")),
        Panel(
            "Store: errors, and requests that no longer waited",
            "short",
            {
                **rate("sapwood_worker_store_errors_total", "error"),
                "timeouts": "sum(rate(sapwood_worker_store_timeouts_total[$__rate_interval]))",
            },
        ),
        Panel(
            "Tokenizer: texts found encoded",
            "percentunit",
            {
                "{{cache}}": "sum by (cache) (rate(sapwood_tokenizer_cache_hits_total[$__rate_interval])) / ("
                "sum by (cache) (rate(sapwood_tokenizer_cache_hits_total[$__rate_interval]))"
                " + sum by (cache) (rate(sapwood_tokenizer_cache_misses_total[$__rate_interval])))"
            },
        ),
    ],
}


def dashboard(name: str, panels: list[Panel]) -> dict[str, Any]:
    """Grafana's JSON."""
    return {
        "uid": f"sapwood-{name}",
        "title": f"Sapwood: {name}",
        "tags": ["sapwood"],
        "schemaVersion": 41,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "panels": [_panel(index, panel) for index, panel in enumerate(panels)],
    }


def _panel(index: int, panel: Panel) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "prometheus"}
    row, column = divmod(index, _COLUMNS)
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": source,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": source, "expr": query, "legendFormat": legend}
            for number, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def operator_rules() -> str:
    """prometheus/alerts.yml as a PrometheusRule."""
    alerts = (_HERE / "prometheus" / "alerts.yml").read_text()
    groups = alerts[alerts.index("groups:") :]
    head = "# Written by deploy/observability/write_dashboards.py from prometheus/alerts.yml.\n"
    kind = "apiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\nmetadata:\n  name: sapwood\nspec:\n"
    return head + kind + textwrap.indent(groups, "  ")


def main() -> None:
    """Writes the dashboards and rules, or checks them."""
    texts = {
        TARGET / f"{name}.json": json.dumps(dashboard(name, panels), indent=1) + "\n"
        for name, panels in DASHBOARDS.items()
    }
    stale = []
    for path, text in {**texts, RULES: operator_rules()}.items():
        if not path.is_file() or path.read_text() != text:
            stale.append(path.name)
            if "--check" not in sys.argv[1:]:
                path.write_text(text)
    if stale and "--check" in sys.argv[1:]:
        sys.exit(f"not up to date: {', '.join(stale)}: make docs")


if __name__ == "__main__":
    main()
