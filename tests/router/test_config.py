"""Settings that make no sense are refused at the start, not found out by the first requests."""

from __future__ import annotations

import pytest

from sapwood_common.errors import ConfigError
from sapwood_common.settings.config import build_parser, given_settings, load_config
from sapwood_router.config import RouterConfig


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--request-timeout", "inf"), "--request-timeout"),  # no event loop can wait for that
        (("--queue-wait", "nan"), "--queue-wait"),
        (("--worker-silence", "0.3"), "--worker-silence"),  # every worker would be lost again and again
        (("--heartbeat-ms", "2000"), "--worker-silence"),
    ],
)
def test_they_are_named(flags: tuple[str, ...], named: str) -> None:
    given = given_settings(RouterConfig, build_parser(RouterConfig, "router", "text").parse_args(flags))
    with pytest.raises(ConfigError) as caught:
        load_config(RouterConfig, given)
    assert named in str(caught.value)


def test_a_slow_heartbeat_and_a_patient_router_are_fine() -> None:
    assert RouterConfig(heartbeat_ms=2000, worker_silence=4).worker_silence == 4
