"""What outsiders may say is shown on one line, cut, and without credentials: in logs, labels and traces."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Callable

import pytest
from prometheus_client import generate_latest

from sapwood_common.telemetry.logs import setup_logging
from sapwood_common.telemetry.metrics import AtMost, MetricSet, OneOf
from sapwood_common.telemetry.shown_text import LongText, shown

FORGED = "m\r\n12:00:00.000 INFO    router [-] key alice revoked\x1b[2J\x00\u2028\u202e\x85\ud800"
URL = "http://alice:p@ss:word@10.0.0.7:8000/v1"


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Logs a message in a format and returns what was written."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(root, "level", root.level)

    def log(log_format: str, message: str, *values: object, error: Exception | None = None) -> str:
        written = io.StringIO()
        monkeypatch.setattr(sys, "stderr", written)
        setup_logging("router", "info", log_format)  # type: ignore[arg-type]
        logging.getLogger("test").warning(message, *values, exc_info=error)
        return written.getvalue()

    return log


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize("value", [FORGED, [FORGED], ValueError(FORGED)])
def test_a_value_with_line_feeds_and_controls_stays_on_its_line(
    logged: Callable[..., str], log_format: str, value: object
) -> None:
    line = logged(log_format, "model=%s end", value)
    assert line.count("\n") == 1
    assert line.removesuffix("\n").isprintable()
    assert "alice revoked" in line
    assert "end" in line


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_formatted_message_with_line_feeds_stays_on_its_line(logged: Callable[..., str], log_format: str) -> None:
    line = logged(log_format, f"model={FORGED} 100% end")
    assert line.count("\n") == 1
    assert line.removesuffix("\n").isprintable()


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_three_megabytes_of_a_value_are_a_short_line_with_what_follows(
    logged: Callable[..., str], log_format: str
) -> None:
    line = logged(log_format, "model=%s worker=%s status=%s", "x" * 3_000_000, ["y" * 3_000_000], "OK")
    assert len(line) < 4096
    assert "status=OK" in line
    assert len(logged(log_format, "x" * 3_000_000)) < 20_000
    assert len(logged(log_format, "%s", LongText("x" * 10_000))) > 10_000


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_an_exceptions_lines_cannot_be_taken_for_lines_of_the_log(logged: Callable[..., str], log_format: str) -> None:
    try:
        raise ValueError(FORGED + "z" * 3_000_000)
    except ValueError as error:
        written = logged(log_format, "it failed", error=error)
    assert len(written) < 50_000
    if log_format == "json":
        assert "Traceback" in json.loads(written)["exception"]
        assert written.count("\n") == 1
    else:
        first, *others = written.removesuffix("\n").split("\n")
        assert first.endswith("it failed")
        assert others
        assert all(line.startswith("    | ") and line.isprintable() for line in others)


def test_numbers_are_formatted_as_numbers(logged: Callable[..., str]) -> None:
    numpy = pytest.importorskip("numpy")
    assert "a 3 1.5 007 None" in logged("text", "a %d %.1f %03d %s", numpy.int64(3), 1.5, 7, None)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_credentials_of_urls_are_in_no_line(logged: Callable[..., str], log_format: str) -> None:
    line = logged(log_format, "worker %s: %s", URL, OSError(f"cannot reach {URL}"))
    assert "alice" not in line
    assert "word" not in line
    assert line.count("http://***@10.0.0.7:8000/v1") == 2


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("s3://key:secret@bucket/a@b", "s3://***@bucket/a@b"),
        ("http://alice:p'w@host/", "http://***@host/"),
        ("a\u061cb\U000e0041", "a\\u061cb\\ue0041"),
        ("http://host/a@b?mail=c@d", "http://host/a@b?mail=c@d"),
        ("http://[::1]:80/", "http://[::1]:80/"),
        ("über 模型 😀", "über 模型 😀"),
        ("a\tb\\", "a\\tb\\"),
    ],
)
def test_only_what_must_not_be_shown_is_changed(text: str, wanted: str) -> None:
    assert shown(text, 100) == wanted


def test_of_a_long_text_the_middle_is_left_out() -> None:
    found = shown("a" * 50 + "b" * 50, 25)
    assert found == "a" * 10 + " ... " + "b" * 10
    assert "secret" not in shown("http://alice:" + "secret" * 50 + "@host/" + "c" * 50, 60)


def test_labels_are_cut_escaped_and_have_no_credentials() -> None:
    metrics = MetricSet()
    counter = metrics.counter("requests_total", "Requests.", worker=AtMost(4), kind=OneOf("a"))
    for value in (URL, FORGED, "x" * 3_000_000):
        counter.at(worker=value, kind=value).inc()
    metrics.polled("gauge", "load", "Load.", lambda: [((URL,), 1.0), ((FORGED,), 2.0)], worker=AtMost(4))
    page = generate_latest(metrics.registry).decode()
    assert len(page) < 8192
    assert "alice:p" not in page
    assert 'worker="http://***@10.0.0.7:8000/v1"' in page
    assert all(line.isprintable() for line in page.splitlines())
    assert "\u2028" not in page
    counter.remove(worker=URL, kind=URL)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("worker alice:secret@10.0.0.7:50051 is down", "worker ***@10.0.0.7:50051 is down"),
        ("alice:sec@ret@host:1", "***@host:1"),
        ("--workers='alice:secret@host:1'", "--workers='***@host:1'"),
        ("(alice:secret@host)", "(***@host)"),
        ("url=http://alice:s@h:1,bob:secret@h2", "url=http://***@h2"),
        ("a@b.example wrote: hello", "a@b.example wrote: hello"),
        ('{"to":"a@b.example"}', '{"to":"a@b.example"}'),
        ("12:30 @ home", "12:30 @ home"),
    ],
)
def test_passwords_before_hosts_without_a_scheme_are_hidden(said: str, expected: str) -> None:
    assert shown(said, 1000) == expected
    assert "secret" not in shown(said, 1000)


@pytest.mark.parametrize("piece", ["a:", "@", "a@", "a:b@", "a:,", "://", "=:@,"])
def test_hiding_passwords_takes_time_in_proportion_to_the_text(piece: str) -> None:
    shown(piece * 300_000, 2_000_000)  # quadratic time would take hours
