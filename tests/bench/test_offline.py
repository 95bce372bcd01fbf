"""`sapwood bench offline`: an engine of its own that is asked everything at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from sapwood.bench.data.conversation import Ask
from sapwood.bench.data.lengths import Lengths
from sapwood.bench.data.source import Source
from sapwood.bench.load import Load
from sapwood.bench.measures import measure
from sapwood.bench.offline import EngineTarget
from sapwood.bench.targets.record import Record
from sapwood.bench.targets.target import Sampling
from sapwood.cli.main import main
from sapwood.errors import UnavailableError
from sapwood.generation import Answer, Usage


async def test_answers_are_counted_by_the_engines_usage() -> None:
    asked: list[dict[str, Any]] = []

    async def generate(prompt: str, **options: Any) -> Answer:
        asked.append(options)
        usage = Usage(len(prompt.split()), options["max_tokens"], 1)
        return Answer("text", "", (), (), "length", usage)

    source = Source(inputs=Lengths(5, 9), outputs=Lengths(2, 4))
    target = EngineTarget(generate, Sampling(0.0, ignore_eos=True))
    run = await Load(target, source.open("completions", 1.0, 0), "completions", requests=20).closed(20)
    found = measure(run)
    assert (found.succeeded, found.ttft) == (20, None)
    assert found.output_tokens == sum(options["max_tokens"] for options in asked)
    assert found.e2e is not None and found.e2e.count == 20
    assert all(options["ignore_eos"] is True and options["temperature"] == 0 for options in asked)


async def test_a_request_that_fails_is_noted() -> None:
    async def generate(_: Any, **__: Any) -> Answer:
        raise UnavailableError(grpc.StatusCode.UNAVAILABLE, "gone")

    record = Record()
    await EngineTarget(generate, Sampling()).ask(Ask([1, 2], 3), record)
    assert (record.error, record.message) == ("UNAVAILABLE", "UNAVAILABLE: gone")
    assert record.ended >= record.sent > 0


@pytest.mark.slow
async def test_an_engine_of_its_own_is_measured(dummy_model: Path, sapwood: Any) -> None:
    code, out, err = await sapwood(
        *("bench", "offline", "--model", str(dummy_model), "--set", "load_format=dummy", "--set", "num_pages=512"),
        *(
            "--requests",
            "6",
            "--warm-up",
            "1",
            "--token-ids",
            "10-99",
            "--input-tokens",
            "20",
            "--output-tokens",
            "3-5",
        ),
        *("--json", "-"),
    )
    assert code == 0, err
    found = json.loads(out)
    assert (found["succeeded"], found["input_tokens"], found["failed"]) == (6, 120, 0)
    assert 18 <= found["output_tokens"] <= 30
    assert found["settings"] == {"load_format": "dummy", "num_pages": 512}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "no_such_setting=1"], "no_such_setting"),
        (["--dataset", "sharegpt"], "--data"),
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_what_cannot_be_started_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["bench", "offline", *arguments]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1
