"""Prometheus metrics: made in an injected registry, with labels whose values are bounded, and served over HTTP.

A label takes only values that it knows; anything else is counted under ``other``, so that no client can make series. Values not
known beforehand are fit to be shown (``shown_text.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from sapwood_common.errors import ConfigError
from sapwood_common.telemetry.metrics_thread import serve_on_port, serve_on_socket
from sapwood_common.telemetry.series import Counter, Gauge, Histogram, Series
from sapwood_common.telemetry.shown_text import shown
from sapwood_net.sockets.unix_socket import is_unix

OTHER = "other"
_MOST_OF_LABEL = 256
"""Characters of a label's value."""

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Buckets from a decode step to a long generation."""

SeriesT = TypeVar("SeriesT", bound=Series)


class Label(Protocol):
    """The values that a label may take."""

    def bound(self, value: str) -> str:
        """``value`` if it is one of them, else ``other``."""
        ...

    def describe(self) -> str:
        """The label's text in the documentation."""
        ...


class OneOf:
    """Implements :class:`Label` for known values."""

    def __init__(self, *values: str, shown: str | None = None) -> None:
        self._values = frozenset(values)
        self._shown = shown or ", ".join(values)

    def bound(self, value: str) -> str:
        return value if value in self._values else OTHER

    def describe(self) -> str:
        return self._shown


class AtMost:
    """Implements :class:`Label` for values not known beforehand, such as addresses: keeps the first ``limit`` different ones."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._seen: set[str] = set()

    def bound(self, value: str) -> str:
        """Also remembers the value while there is room."""
        value = shown(value, _MOST_OF_LABEL)
        if value in self._seen:
            return value
        if len(self._seen) >= self._limit:
            return OTHER
        self._seen.add(value)
        return value

    def forget(self, value: str) -> None:
        """Forgets a value that exists no longer, which makes room for another."""
        self._seen.discard(shown(value, _MOST_OF_LABEL))

    def describe(self) -> str:
        return f"at most {self._limit}"


Labels = Mapping[str, Label]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """A metric as it is documented."""

    name: str
    kind: str
    help: str
    labels: Labels


_MOST_KNOWN = 1024


class Family(Generic[SeriesT]):
    """One metric with all its label values.

    Args:
        make: Makes a series.
        labels: By name.
        empty: Makes the page's metric, without series.
    """

    def __init__(self, make: Callable[[], SeriesT], labels: Labels, empty: Callable[[], Any]) -> None:
        self._make = make
        self._labels = labels
        self._empty = empty
        self._series: dict[tuple[str, ...], SeriesT] = {}
        self._known: dict[tuple[tuple[str, str], ...], SeriesT] = {}
        """Series by what was asked for, so that values are checked once."""
        if not labels:
            self._known[()] = self._series[()] = make()

    def at(self, **values: str) -> SeriesT:
        """The series of these label values; what a label does not know is ``other``."""
        key = tuple(values.items())
        found = self._known.get(key)
        if found is None:
            bounded = self._bounded(values)
            found = self._series.get(bounded) or self._series.setdefault(bounded, self._make())
            # Values that are not known beforehand may be unlimited in number, and long.
            if len(self._known) < _MOST_KNOWN and all(len(value) <= _MOST_OF_LABEL for value in values.values()):
                self._known[key] = found
        return found

    def remove(self, **values: str) -> None:
        """Ends the series of these label values, if there is one."""
        self._known.pop(tuple(values.items()), None)
        bounded = self._bounded(values)
        if OTHER not in bounded:
            self._series.pop(bounded, None)

    def named(self, empty: Callable[[], Any]) -> Family[SeriesT]:
        """The same series as another metric, whose page ``empty`` makes."""
        family = Family(self._make, self._labels, empty)
        family._series = self._series
        return family

    def describe(self) -> Iterable[Any]:
        """The names that the metric takes, for the registry."""
        return (self._empty(),)

    def collect(self) -> Iterable[Any]:
        """All series as they are now, for the registry."""
        page = self._empty()
        for labels, series in tuple(self._series.items()):
            series.add_to(page, labels)
        return (page,)

    def _bounded(self, values: Mapping[str, str]) -> tuple[str, ...]:
        return tuple(label.bound(values[name]) for name, label in self._labels.items())


Reading = tuple[Sequence[str], float]
"""Label values in order, and the value."""


class _Polled(Collector):
    """A metric whose values are read when the page is rendered."""

    def __init__(self, spec: MetricSpec, read: Callable[[], Iterable[Reading]]) -> None:
        self._spec = spec
        self._read = read

    def collect(self) -> Iterable[Any]:
        spec = self._spec
        make = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
        family = make(spec.name, spec.help, labels=list(spec.labels))
        totals: dict[tuple[str, ...], float] = {}
        for values, value in self._read():
            key = tuple(label.bound(text) for label, text in zip(spec.labels.values(), values, strict=True))
            totals[key] = totals.get(key, 0.0) + value
        for key, value in totals.items():
            family.add_metric(list(key), value)
        return (family,)


class MetricSet:
    """Makes the metrics of one service.

    Args:
        registry: Where they are; a fresh one unless given.

    Attributes:
        specs: What was made, in order, for the documentation.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self.specs: list[MetricSpec] = []
        ProcessCollector(registry=self.registry)

    def counter(self, name: str, text: str, *, was: str | None = None, **labels: Label) -> Family[Counter]:
        """A counter; its name ends in ``_total``. ``was`` is its name in the last version, which shows the same series."""
        family = self._add(Counter, "counter", name, text, labels, CounterMetricFamily)
        if was is not None:
            old = _old_name(name)
            self._note(was, "counter", old, labels)
            self.registry.register(family.named(partial(CounterMetricFamily, was, old, labels=tuple(labels))))
        return family

    def gauge(self, name: str, text: str, **labels: Label) -> Family[Gauge]:
        """A gauge."""
        return self._add(Gauge, "gauge", name, text, labels, GaugeMetricFamily)

    def histogram(
        self, name: str, text: str, *, buckets: Sequence[float] = SECONDS, **labels: Label
    ) -> Family[Histogram]:
        """A histogram, in seconds unless ``buckets`` says otherwise."""
        return self._add(partial(Histogram, buckets), "histogram", name, text, labels, HistogramMetricFamily)

    def polled(
        self,
        kind: str,
        name: str,
        text: str,
        read: Callable[[], Iterable[Reading]],
        *,
        was: str | None = None,
        **labels: Label,
    ) -> None:
        """A gauge or counter whose values are read when they are asked for, possibly in another thread.

        Args:
            kind: ``gauge`` or ``counter``.
            name: Its name.
            text: What it says.
            read: Gives label values and value of each series.
            was: Its name in the last version, which shows the same series.
            labels: Its labels.
        """
        for each, meaning in ((name, text), (was, _old_name(name))):
            if each is not None:
                self._note(each, kind, meaning, labels)
                self.registry.register(_Polled(self.specs[-1], read))

    def _add(
        self, make: Callable[[], SeriesT], kind: str, name: str, text: str, labels: Labels, page: Callable[..., Any]
    ) -> Family[SeriesT]:
        self._note(name, kind, text, labels)
        family = Family(make, labels, partial(page, name, text, labels=tuple(labels)))
        self.registry.register(family)
        return family

    def _note(self, name: str, kind: str, text: str, labels: Labels) -> None:
        assert (kind == "counter") == name.endswith("_total"), name
        self.specs.append(MetricSpec(name, kind, text, labels))


def _old_name(name: str) -> str:
    return f"Old name of {name}; the next version does not have it."


def metrics_port(given: int | None, usual: int, service_port: int) -> int:
    """The port of a service's /metrics: as given, else the usual one, else a free one (0) where the service takes one, too."""
    if given is not None:
        return given
    return usual if service_port else 0


class MetricsServer:
    """Serves a registry under ``/metrics`` on a port of its own, in threads.

    Args:
        registry: The metrics to serve.
        host: Address to listen on, or ``unix:PREFIX``.
        port: 0 takes a free one.

    Raises:
        ConfigError: The port cannot be listened on.
    """

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        try:
            start = serve_on_socket if is_unix(host) else serve_on_port
            self._server, self._thread = start(registry, host, port)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port} for metrics: {error.strerror or error}") from error
        self.port = int(self._server.server_port)

    def close(self) -> None:
        """Stops serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
