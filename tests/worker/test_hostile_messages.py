"""Messages of every method, whose fields hold what nobody means: no answer says that the worker is at fault."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from sapwood.v1 import worker_pb2, worker_pb2_grpc
from sapwood_testing.hostile_messages import faults, hostile_messages
from sapwood_testing.worker.asking import collect
from sapwood_testing.worker.worker_process import started_worker

METHODS = {each.name: each for each in worker_pb2.DESCRIPTOR.services_by_name["Worker"].methods}
GOOD: dict[str, Message] = {
    "Generate": worker_pb2.WorkerGenerateRequest(request_id="r", token_ids=[1, 2], sampling={"max_tokens": 2}),
    "LoadLora": worker_pb2.LoadLoraRequest(name="l", path="/nowhere"),
    "Embed": worker_pb2.WorkerEmbedRequest(request_id="r", inputs=[{"ids": [1, 2]}]),
}
"""What a message with one strange field is otherwise; of other methods nothing."""
ENDLESS = {"WatchLoad", "SubscribeKvEvents"}
"""They end with the deadline."""
ENDS = {"Drain"}
"""It ends the worker."""
STOPS = {"Pause", "Sleep"}
"""They end with what follows them here."""
FORGED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x85\u2028\u202e]")


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_no_message_is_the_workers_fault(
    tiny_model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")  # a path in a message is a file of this folder
    wrong: list[tuple[str, str, str]] = []
    log, flags = tmp_path / "log", ("--lora-slots", "2", "--host-cache", "1", "--threads", "1")
    with started_worker(tiny_model("llama").path, log, *flags) as worker:
        async with grpc.aio.insecure_channel(worker.address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            for name, method in METHODS.items():
                if name in ENDS:
                    continue
                messages = hostile_messages(method, GOOD.get(name))
                began = time.monotonic()
                rest = {"timeout": 0.1} if name in ENDLESS else {}
                found = await faults(stub, method, messages, rest)
                wrong += [(name, *each) for each in found if name not in ENDLESS or "DEADLINE" not in each[1]]
                if name in STOPS:
                    await stub.Resume(worker_pb2.ResumeRequest())
                    await stub.WakeUp(worker_pb2.WakeUpRequest())
                tokens, _ = await collect(stub, GOOD["Generate"])  # type: ignore[arg-type]
                assert tokens, f"nothing is computed after {name}"
                print(f"{name}: {len(messages)} messages in {time.monotonic() - began:.1f} s")
    said = log.read_text()
    print(said[-3000:])
    assert not wrong, wrong[:5]
    assert "Traceback" not in said
    assert not FORGED.search(said.replace("\n", ""))
