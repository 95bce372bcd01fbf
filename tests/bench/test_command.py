"""`sapwood bench` as a shell sees it, against a real router: lines, files, Ctrl-C, errors."""

from __future__ import annotations

import asyncio
import io
import json
import re
import signal
import sys
from array import array
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Literal

import pytest

from sapwood.bench.benchmark import Level, LevelResult, Plan, Result
from sapwood.bench.data.source import Source
from sapwood.bench.load import Run
from sapwood.bench.measures import measure
from sapwood.bench.page import render
from sapwood.bench.plots import to_svg
from sapwood.bench.slo import Slo
from sapwood.bench.targets.open_target import Where
from sapwood.bench.targets.record import Record, clock
from sapwood.cli.main import main
from sapwood.cli.measure.bench_view import BenchView

QUICK = ("--requests", "6", "--warm-up", "1", "--input-tokens", "20", "--output-tokens", "4")


async def test_a_sweep_prints_figures_and_writes_them_into_files(served: Any, sapwood: Any, tmp_path: Path) -> None:
    told, lines = tmp_path / "json", tmp_path / "records"
    code, out, err = await sapwood(
        *("bench", "--url", served.url, *QUICK, "--concurrency", "1,3", "--slo", "ttft=60s"),
        *("--json", str(told), "--records", str(lines)),
    )
    assert code == 0, err
    for expected in (
        "concurrency 1: 6 requests",
        "concurrency 3: 6 requests",
        "TTFT",
        "inter-token",
        "100.0% keep ttft",
    ):
        assert expected in out
    assert re.search(r"^ *concurrency 3 +[\d.]+ +[\d.]+ ", out, re.MULTILINE), "the table of the sweep"
    found = json.loads(told.read_text())
    assert [level["load"] for level in found["levels"]] == [{"concurrency": 1}, {"concurrency": 3}]
    assert all(level["succeeded"] == level["good"] == 6 and level["ttft"]["p99"] > 0 for level in found["levels"])
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(records) == 12
    assert all(0 <= each["sent"] <= each["arrivals"][0] <= each["ended"] for each in records)


@pytest.mark.slow
async def test_the_command_draws(served: Any, sapwood: Any, tmp_path: Path) -> None:
    picture, page = tmp_path / "png", tmp_path / "html"
    flags = ("--rate", "50,100", "--plot", str(picture), "--html", str(page))
    code, _, err = await sapwood("bench", "--url", served.url, *QUICK, *flags)
    assert code == 0, err
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert_stands_alone(page.read_text())


def test_a_page_stands_alone() -> None:
    result = Result(Plan(Where("http://h:1"), Source(), (), slo=Slo.parse("ttft=1s")), "<model>")
    assert_stands_alone(render(result, "<svg></svg>"))
    for value in (1, 2):
        run = Run(10.0, open_loop=False)
        for sent in (11.0, 12.0):
            record = Record(due=sent, sent=sent, arrivals=array("d", [sent + 0.1, sent + 0.3]), ended=sent + 0.4)
            record.completion_tokens, record.prompt_tokens = 2, 5
            run.records.append(record)
        run.records.append(
            Record(due=11.0, sent=11.0, ended=11.5, error="HTTP 503", message="<script>alert()</script>")
        )
        result.levels.append(LevelResult(Level("concurrency", value), run, measure(run, result.plan.slo)))
    page = render(result, to_svg(result))
    assert_stands_alone(page)
    for expected in (
        "&lt;model&gt;",
        "concurrency 2: 3 requests",
        "HTTP 503: &lt;script",
        "Inter-token latency",
        "goodput",
    ):
        assert expected in page


def assert_stands_alone(page: str) -> None:
    """A page that loads nothing, whose picture and tables are inside."""

    tags: set[str] = set()

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            tags.add(tag)
            for name, value in attrs:
                # Within the page only; names of XML's vocabularies are not loaded.
                assert name not in ("src", "href", "xlink:href") or (value or "").startswith("#"), (tag, name, value)

    reader = Reader()
    reader.feed(page)
    assert {"svg", "style", "details"} <= tags
    assert not tags & {"script", "link", "img", "iframe"}
    assert "url(http" not in page and "@import" not in page


async def test_json_on_standard_output_is_all_there_is(served: Any, sapwood: Any) -> None:
    code, out, err = await sapwood("bench", "--grpc", served.grpc, *QUICK, "--rate", "100", "--json", "-")
    assert code == 0, err
    (level,) = json.loads(out)["levels"]
    assert level["succeeded"] == 6
    assert level["dispatch_lag"]["count"] == 6


async def test_a_load_without_one_answer_is_exit_code_1(raw_server: Any, sapwood: Any) -> None:
    looked_at = iter(range(2))  # the requests that find out how many tokens a word comes to
    answer = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1}}\n\ndata: [DONE]\n\n'

    async def handler(_: bytes, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        good = next(looked_at, None) is not None
        writer.write(b"HTTP/1.1 200 OK\r\n" if good else b"HTTP/1.1 500 Oops\r\n")
        writer.write(b"connection: close\r\n\r\n")
        writer.write(answer if good else b'{"error": "out of tokens"}')

    url = await raw_server(handler)
    flags = ("--warm-up", "0", "--requests", "3", "--concurrency", "1", "--model", "m")
    code, out, _ = await sapwood("bench", "--url", url, *flags)
    assert code == 1
    assert "0 succeeded, 3 FAILED" in out
    assert re.search(r"failed +3 x HTTP 500: out of tokens", out)


class Gate(asyncio.Event):
    """One that counts who waits at it."""

    waiting = 0

    async def wait(self) -> Literal[True]:
        self.waiting += 1
        try:
            return await super().wait()
        finally:
            self.waiting -= 1


async def test_ctrl_c_prints_what_was_measured(served: Any, tmp_path: Path) -> None:
    gate = Gate()
    gate.set()
    for worker in served.workers:
        worker.script.gate = gate
    flags = ("--url", served.url, "--concurrency", "2", "--requests", "100000", "--warm-up", "0")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sapwood.cli.main", "bench", *flags, "--json", str(tmp_path / "json")),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )

    def finished() -> int:
        return sum(call.outcome == "finished" for worker in served.workers for call in worker.calls)

    try:
        async with asyncio.timeout(120):
            while finished() < 4:  # two that look at the server, two of the load
                await asyncio.sleep(0.001)
            gate.clear()
            while gate.waiting < 2:  # both clients wait for answers that do not come
                await asyncio.sleep(0.001)
            process.send_signal(signal.SIGINT)
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 130, err.decode()
    assert "interrupted" in out.decode()
    found = json.loads((tmp_path / "json").read_text())
    assert found["interrupted"] is True
    (level,) = found["levels"]
    assert level["interrupted"] == 2
    assert level["succeeded"] == level["requests"] - 2 >= 2
    assert level["failures"] == {}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--url", "localhost"], 2, "is no URL"),
        (["--dataset", "sharegpt"], 2, "name it with --data"),
        (["--dataset", "file", "--data", "/nowhere"], 2, "cannot read /nowhere"),
        (["--trace", "/nowhere"], 2, "cannot read /nowhere"),
        (["--schema", "/nowhere"], 2, "cannot read /nowhere"),
        (["--grpc", "127.0.0.1:1", "--body", "{}", "--body", '{"a": 1}'], 2, "--body is for --url"),
        (["--api", "chat", "--token-ids", "1-5"], 2, "--token-ids"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    assert main(["bench", *arguments]) == code
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rate", "0"],
        ["--concurrency", "1,x"],
        ["--concurrency", "1", "--rate", "1"],
        ["--slo", "ttft"],
        ["--body", "[]"],
        ["--seconds", "inf"],
    ],
)
def test_flags_that_say_nothing_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments])
    assert caught.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_a_server_that_is_not_there_is_exit_code_3(capsys: pytest.CaptureFixture[str], unused_tcp_port: int) -> None:
    assert main(["bench", "--url", f"http://127.0.0.1:{unused_tcp_port}"]) == 3
    assert str(unused_tcp_port) in capsys.readouterr().err


def test_the_help_shows_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    shown = capsys.readouterr().out
    for expected in ("examples:", "--concurrency 1,4,16", "--slo", "which server", "exit codes"):
        assert expected in shown


def test_the_live_view_draws_over_what_it_drew_before() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    run = Run(clock(), open_loop=False)
    for failed in (False, True):
        record = Record(due=1.0, sent=1.0, arrivals=array("d", [1.1, 1.3]), ended=2.0, completion_tokens=2)
        record.error = "timeout" if failed else ""
        run.records.append(record)
        run.ended.append(record)
    run.failures = 1
    for stream, expected in ((Terminal(), ["\x1b[6A\x1b[J"] * 2), (io.StringIO(), [])):
        view = BenchView(stream)
        view.show(Level("rate", 2.5), run)
        view.show(Level("rate", 2.5), run)
        view.clear()
        assert re.findall(r"\x1b\[\d+A\x1b\[J", stream.getvalue()) == expected
        assert ("2 sent, 0 under way, 1 done, 1 failed" in stream.getvalue()) == bool(expected)
        assert ("TTFT 100 ms (p50)" in stream.getvalue()) == bool(expected)
