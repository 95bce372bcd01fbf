"""KV events of a real worker are decoded by the classes that vLLM and SGLang decode their own with."""

from __future__ import annotations

import ast
import enum
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional, Union

import grpc
import msgspec
import pytest
import zmq

from sapwood.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from sapwood_common.contract.page_hash import hash_pages
from sapwood_testing.worker.worker_process import started_worker

pytestmark = [pytest.mark.slow, pytest.mark.clients, pytest.mark.timeout(900)]

SOURCES = {
    "vllm==0.33.0": "vllm/distributed/kv_events.py",
    "sglang==0.5.23": "sglang/srt/disaggregation/kv_events.py",
}
PROMPT = list(range(100, 180))
TOPIC = "kv@pod@model"


def struct_definitions(source: str) -> dict[str, Any]:
    """Runs nothing of a module but the definitions of its structs and enums, so that its imports need not be there."""
    known = {"Struct", "Enum"}
    kept: list[ast.stmt] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).split(".")[-1] in known for base in node.bases):
            known.add(node.name)
            kept.append(node)
    names = {"msgspec": msgspec, "enum": enum, "Any": Any, "Optional": Optional, "Union": Union}
    space: dict[str, Any] = names | {"ExternalBlockHash": bytes | int}  # vLLM's name for what a hash may be
    exec(compile(ast.Module(kept, type_ignores=[]), "structs", "exec", dont_inherit=True), space)
    return space


@pytest.fixture(scope="module")
def replay(dummy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[list[bytes]]]:
    """What a worker with three tiers answers on its replay port: a prompt was stored, and the cache flushed."""
    folder = tmp_path_factory.mktemp("worker")
    flags = ["--host-cache-ratio", "2", "--storage", f"file://{folder / 'store'}", "--storage-min-tokens", "16"]
    flags += ["--kv-events-port", "0", "--kv-events-replay-port", "0", "--kv-events-topic", TOPIC]
    flags += [
        "--num-pages",
        "8",
        "--max-running",
        "2",
        "--threads",
        "1",
        "--load-format",
        "dummy",
        "--no-structured-output",
    ]
    with started_worker(dummy_model, folder / "log", *flags) as worker, zmq.Context() as context:
        found = re.search(r"replay on (\S+)", (folder / "log").read_text())
        assert found is not None
        with grpc.insecure_channel(worker.address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            sampling = common_pb2.SamplingParams(max_tokens=2)
            for start in (100, 10, 100):  # there are pages for one prompt only: others are evicted
                prompt = range(start, start + 80)
                request = worker_pb2.WorkerGenerateRequest(request_id="r", token_ids=prompt, sampling=sampling)
                list(stub.Generate(request))
            stub.FlushCache(worker_pb2.FlushCacheRequest())
        with context.socket(zmq.DEALER) as asking:
            asking.linger = 0
            asking.connect(f"tcp://{found[1]}")
            frames: list[list[bytes]] = []
            media: set[str] = set()
            while len(media) < 3:  # the store is written in the background
                frames, media = [], set()
                asking.send_multipart((b"", bytes(8)))
                while (answer := asking.recv_multipart())[-1]:
                    frames.append(answer)
                    media |= {each.get("medium") for each in msgspec.msgpack.decode(answer[-1])[1]} - {None}
            yield frames


@pytest.mark.parametrize("release", SOURCES)
def test_every_batch_is_decoded_by_the_classes_of_a_release(
    fetch_source: Any, show_versions: Any, replay: list[list[bytes]], release: str
) -> None:
    show_versions(release)
    theirs = struct_definitions(fetch_source(release, SOURCES[release]))
    decoder = msgspec.msgpack.Decoder(theirs["KVEventBatch"])
    kinds: set[str] = set()
    tokens: dict[int, list[int]] = {}
    media = set()
    for number, (_, topic, seq, payload) in enumerate(replay, 1):
        assert (topic.decode(), int.from_bytes(seq, "big")) == (TOPIC, number)
        batch = decoder.decode(payload)
        assert getattr(batch, "data_parallel_rank", None) == 0 or getattr(batch, "attn_dp_rank", None) == 0
        for event in batch.events:
            kinds.add(type(event).__name__)
            if isinstance(event, theirs["BlockStored"]):
                assert event.block_size == 16 and event.lora_name is None
                for place, name in enumerate(event.block_hashes):
                    tokens[name] = event.token_ids[16 * place : 16 * place + 16]
                media.add(event.medium)
    assert kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
    names = [int.from_bytes(each[-8:], "big") for each in hash_pages(PROMPT, 16)]
    assert [tokens[name] for name in names] == [PROMPT[start : start + 16] for start in range(0, 80, 16)]
    if (enumeration := theirs.get("StorageMedium")) is not None:
        assert {enumeration(each).name for each in media} == {"GPU", "CPU", "EXTERNAL"}
