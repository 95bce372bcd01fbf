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
        (("--queue-size", "9,wait=nan"), "--queue-size wait"),
        (("--worker-silence", "0.3"), "--worker-silence"),  # every worker would be lost again and again
        (("--worker-silence", "heartbeat_ms=2000"), "--worker-silence"),
    ],
)
def test_settings_that_contradict_each_other_are_named(flags: tuple[str, ...], named: str) -> None:
    given = given_settings(RouterConfig, build_parser(RouterConfig, "router", "text").parse_args(flags))
    with pytest.raises(ConfigError) as caught:
        load_config(RouterConfig, given)
    assert named in str(caught.value)


def test_a_slow_heartbeat_and_a_patient_router_are_fine() -> None:
    assert RouterConfig.model_validate({"worker_silence": "4,heartbeat_ms=2000"}).worker_silence.seconds == 4


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("http://host:8000", "is none of url=..."),
        ("url=ftp://host", "needs url=http://... or url=https://..."),
        ("url=http://", "needs url=http://... or url=https://..."),
        ("url=http://host#m", "needs url=http://... or url=https://..."),
        ("model=m", "needs url=http://... or url=https://..."),
        ("url=http://host,url=http://other", "is none of url=..."),
        ("url=http://host,key=secret", "is none of url=..."),
        ("url=http://host,api-key-env=SURELY_NOT_SET", "SURELY_NOT_SET"),
    ],
)
def test_a_backend_that_cannot_be_asked_is_refused(backend: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(RouterConfig, {"backends": (backend,)})
    assert "--backends" in str(caught.value) and said in str(caught.value)


def test_backends_are_all_the_workers_there_are_unless_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "secret")
    told = ("url=http://a:1/v1/,model=theirs,name=ours,api-key-env=KEY", "url=http://a:1")
    config = RouterConfig(backends=told)
    assert config.named_workers == ("http://a:1/v1#theirs", "http://a:1")
    first, second = config.backends_by_address.values()
    assert (first.base, first.name, first.authorization) == ("http://a:1/v1", "ours", "Bearer secret")
    assert second.base == "http://a:1/v1" and "secret" not in repr(config.backends_by_address)
    assert RouterConfig(backends=told, workers=("b:1",)).named_workers[0] == "b:1"
    with pytest.raises(ConfigError, match="named twice"):
        load_config(RouterConfig, {"backends": (told[1], told[1])})
