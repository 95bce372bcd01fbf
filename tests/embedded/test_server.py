"""A cluster that a program starts for others."""

from __future__ import annotations

import io
import os
import signal
import threading
from pathlib import Path
from typing import Any

import openai
import pytest

import sapwood
from sapwood.errors import UnavailableError

pytestmark = pytest.mark.slow

GREEDY = {"max_tokens": 6, "temperature": 0}
SETTINGS = {"load_format": "dummy", "num_pages": 1024, "threads": 1, "worker_silence": 30, "resume_grace": 60}


def test_a_server_answers_what_the_engine_does_and_restarts_lost_workers(
    engine: Any, tiny: Path, children: Any, until: Any
) -> None:
    logs = io.StringIO()
    with sapwood.Server(str(tiny), workers=2, logs=logs, **SETTINGS) as server, server.client() as client:
        expected = engine.generate("abc", **GREEDY)
        assert client.generate("abc", **GREEDY).answer().token_ids == expected.token_ids
        seeded: dict[str, Any] = {"max_tokens": 8, "temperature": 1.5, "seed": 7}
        assert client.generate("abc", **seeded).answer().token_ids == engine.generate("abc", **seeded).token_ids
        with openai.OpenAI(base_url=server.openai_base_url, api_key="none") as other:
            answer = other.completions.create(model="tiny", prompt="abc", **GREEDY)
        assert answer.choices[0].text == expected.text
        before = {worker.address for worker in client.list_workers() if worker.healthy}
        assert before == set(server.workers) and len(before) == 2
        killed = next(pid for pid, module in children().items() if module == "sapwood_worker" and _of(pid, server))
        os.kill(killed, signal.SIGKILL)
        until(lambda: "is started again" in logs.getvalue())
        until(lambda: {worker.address for worker in client.list_workers() if worker.healthy} == before)
        assert client.generate("abc", **GREEDY).answer().token_ids == expected.token_ids
    assert "drained" in logs.getvalue()
    with pytest.raises(UnavailableError, match="closed"):
        assert server.grpc_address


def test_leaving_the_block_lets_running_requests_finish(tiny: Path, until: Any) -> None:
    found: list[Any] = []
    with sapwood.Server(str(tiny), workers=1, **SETTINGS) as server:
        client = server.client()
        asked = client.generate("abc", max_tokens=300, temperature=0, ignore_eos=True)
        asking = threading.Thread(target=lambda: found.append(asked.answer()))
        asking.start()
        until(lambda: any(worker.running_requests for worker in client.list_workers()))
    asking.join()
    client.close()
    assert found[0].usage.completion_tokens == 300


def _of(pid: int, server: Any) -> bool:
    """Whether a process is not the engine's, which listens on Unix sockets."""
    return b"unix:" not in Path(f"/proc/{pid}/cmdline").read_bytes()
