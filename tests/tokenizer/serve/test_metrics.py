from prometheus_client import generate_latest

from sapwood_common.telemetry.metrics import MetricSet
from sapwood_tokenizer.serve.metrics import add_metrics


def test_every_series_is_there_from_the_start_also_of_a_model_without_pictures() -> None:
    metrics = MetricSet()
    add_metrics(metrics, dict, lambda: 0, dict, dict, dict)
    page = generate_latest(metrics.registry).decode()
    for outcome in ("decoded", "found", "refused"):
        assert f'sapwood_tokenizer_pictures_total{{outcome="{outcome}"}} 0.0' in page
    for stage in ("fetch", "decode"):
        assert f'sapwood_tokenizer_picture_seconds_total{{stage="{stage}"}} 0.0' in page
