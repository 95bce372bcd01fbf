"""The tokenizer's metrics; docs/metrics.md lists them. All are read at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sapwood_common.telemetry.metrics import MetricSet, OneOf, Reading
from sapwood_tokenizer.encode.encode_cache import CacheStats

Caches = Callable[[], dict[str, CacheStats]]

#: What becomes of a picture, and what takes time. Every series is there from the start, also of a model that takes none.
PICTURE_OUTCOMES = ("decoded", "found", "refused")
PICTURE_STAGES = ("fetch", "decode")


def add_metrics(
    metrics: MetricSet,
    caches: Caches,
    open_streams: Callable[[], int],
    encoded: Callable[[], dict[str, int]],
    pictures: Callable[[], dict[str, int]],
    picture_seconds: Callable[[], dict[str, float]],
) -> None:
    """Adds the metrics.

    Args:
        metrics: The registry that they are added to.
        caches: Statistics of the encode caches (``exact``, ``prefix``).
        open_streams: Returns how many Detokenize streams are open.
        encoded: Returns how many texts each library has encoded.
        pictures: Returns how many pictures were decoded, found and refused; empty: the model takes none.
        picture_seconds: Returns how long fetching and decoding have taken; empty: the model takes none.
    """

    def polled(kind: str, name: str, text: str, read: Callable[[CacheStats], float]) -> None:
        def readings() -> Iterable[Reading]:
            return [((level,), read(stats)) for level, stats in caches().items()]

        metrics.polled(kind, f"sapwood_tokenizer_{name}", text, readings, cache=OneOf("exact", "prefix"))

    polled("counter", "cache_hits_total", "Texts (exact) or parts of texts (prefix) found.", lambda stats: stats.hits)
    polled("counter", "cache_misses_total", "Texts or parts of texts not found.", lambda stats: stats.misses)
    polled("counter", "cache_evictions_total", "Entries that made room for others.", lambda stats: stats.evictions)
    polled("counter", "cached_tokens_total", "Tokens that were not encoded again.", lambda stats: stats.tokens_reused)
    polled("gauge", "cache_bytes", "Bytes that the cache holds.", lambda stats: stats.bytes)
    metrics.polled(
        "gauge",
        "sapwood_tokenizer_open_streams",
        "Detokenize streams open, in all calls.",
        lambda: [((), open_streams())],
    )
    metrics.polled(
        "counter",
        "sapwood_tokenizer_encoded_texts_total",
        "Texts and parts of texts that a library encoded: none of them was in a cache.",
        lambda: [((library,), count) for library, count in encoded().items()],
        library=OneOf("fastokens", "tokenizers"),
    )
    metrics.polled(
        "counter",
        "sapwood_tokenizer_pictures_total",
        "Pictures in requests: decoded, found among those that were kept, or refused.",
        lambda: [((outcome,), pictures().get(outcome, 0)) for outcome in PICTURE_OUTCOMES],
        outcome=OneOf(*PICTURE_OUTCOMES),
    )
    metrics.polled(
        "counter",
        "sapwood_tokenizer_picture_seconds_total",
        "Seconds that pictures took to be fetched over https, and to be decoded and resized, the wait for a process included.",
        lambda: [((stage,), picture_seconds().get(stage, 0.0)) for stage in PICTURE_STAGES],
        stage=OneOf(*PICTURE_STAGES),
    )
