"""The line of each request shows what it was told to, and never what anybody said unless it was told to."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

LOGGER = "sapwood_router.observe.observer"
SECRET = "the secret prompt"


async def lines(make_cluster: Any, caplog: pytest.LogCaptureFixture, **settings: Any) -> list[str]:
    """What is logged of a completion with a sampling setting, and of a chat."""
    caplog.set_level("INFO", LOGGER)
    async with make_cluster(1, **settings) as cluster:
        completion = {"prompt": SECRET, "temperature": 0.5, "stop": ["\n\n"], "max_tokens": 40}
        chat = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 40}
        for path, body in (("completions", completion), ("chat/completions", chat)):
            answer = await cluster.http.post(f"/v1/{path}", json={"model": "fake", **body})
            assert answer.status_code == 200, answer.text
        await cluster.idle()
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


async def test_a_line_tells_counts_and_times_and_nothing_that_was_said(make_cluster, caplog) -> None:
    found = await lines(make_cluster, caplog)
    assert len(found) == 2
    assert all(
        re.search(r"request=\S+ model=fake .* status=OK duration=[\d.]+ms ttft=[\d.]+ms$", line) for line in found
    )
    assert SECRET not in caplog.text


async def test_parameters_are_what_was_asked_but_not_what_was_said(make_cluster, caplog) -> None:
    first, _ = await lines(make_cluster, caplog, log_requests="parameters")
    told = json.loads(first.partition(" parameters=")[2])
    assert (told["sampling"]["temperature"], told["sampling"]["max_tokens"], told["stop"]) == (0.5, 40, 1)
    assert "secret" not in caplog.text


async def test_content_is_prompt_and_answer_on_one_line(make_cluster, caplog) -> None:
    first, second = await lines(make_cluster, caplog, log_requests="content")
    prompt, answer = re.search(r"prompt_content=(.*) answer=(.*)$", first).groups()
    assert json.loads(prompt) == SECRET
    assert json.loads(answer)["text"] == SECRET  # the fake worker says it again
    assert SECRET in second
    assert "\n" not in first + second


async def test_off_is_silence(make_cluster, caplog) -> None:
    assert await lines(make_cluster, caplog, log_requests="off") == []
