"""Groups over two hosts and the lower tiers: each host has parts of a page, stores and other workers see it whole."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sapwood.v1 import common_pb2, worker_pb2
from sapwood_testing.namespace import Namespace
from sapwood_testing.worker.split_models import SHAPE
from sapwood_testing.worker.worker_stub import two_hosts, worker

FLAGS = ("--num-pages", "24", "--max-running", "2", "--no-structured-output")
OVER_HOSTS = {
    "tensor": ("--tensor-parallel", "2"),
    "pipeline": ("--pipeline-parallel", "2"),
    "both": ("--tensor-parallel", "2", "--pipeline-parallel", "2"),
    "requests of their own": ("--tensor-parallel", "2", "--data-parallel-attention"),
}


@contextlib.contextmanager
def group(kind: str, path: Path, log: Path, inside: Namespace, *flags: str) -> Iterator[Any]:
    """A stub of a worker over two hosts, of which the first is ``inside``; ``one``: of a worker of one process there."""
    if kind == "one":
        with worker(path, log, "--host", inside.host, *FLAGS, *flags, inside=inside) as stub:
            yield stub
    else:
        with two_hosts(path, log, inside, *FLAGS, *OVER_HOSTS[kind], *flags) as stub:
            yield stub


def ask(stub: Any, document: int, **fields: Any) -> tuple[list[int], Any]:
    """A document's continuation, and the last response."""
    prompt = [3 + (document * 31 + place * 7) % 90 for place in range(130)]
    sampling = common_pb2.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    request = worker_pb2.WorkerGenerateRequest(request_id=f"r{document}", token_ids=prompt, sampling=sampling, **fields)
    responses = list(stub.Generate(request))
    return [token for response in responses for token in response.token_ids], responses[-1]


def of_store(stub: Any) -> Any:
    tiers = stub.GetCacheStats(worker_pb2.GetCacheStatsRequest()).tiers
    return next(each for each in tiers if each.tier == worker_pb2.CACHE_TIER_STORAGE)


@pytest.mark.slow
def test_what_two_hosts_store_is_read_by_others_and_the_other_way_round(
    tiny_model: Any, make_namespace: Any, tmp_path: Path
) -> None:
    path = tiny_model("llama", **SHAPE).path
    url = f"file://{tmp_path}/store?size_gb=1"
    flags = ("--host-cache-ratio", "1", "--storage-min-tokens", "16", "--storage-prefetch", "wait_complete")
    inside, expected = make_namespace(), dict[int, list[int]]()
    for document, kind in enumerate(["one", *OVER_HOSTS, "one"]):
        while_it_runs = kind == "both"
        given = () if while_it_runs else ("--storage", url)
        with group(kind, path, tmp_path / f"log-{document}", inside, *flags, *given) as stub:
            if while_it_runs:
                stub.AttachStorage(worker_pb2.AttachStorageRequest(url=url))
            for earlier, tokens in expected.items():
                assert ask(stub, earlier)[0] == tokens
            assert of_store(stub).hit_tokens == len(expected) * 128
            assert of_store(stub).rejected_pages == 0
            expected[document], _ = ask(stub, document)
            while of_store(stub).bytes_in == 0:
                time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds",
    [("tensor", "one"), ("one", "both"), ("pipeline", "requests of their own"), ("requests of their own", "tensor")],
)
def test_a_prompt_is_handed_off_by_two_hosts_and_to_two(
    tiny_model: Any, make_namespace: Any, tmp_path: Path, kinds: tuple[str, str]
) -> None:
    path = tiny_model("llama", **SHAPE).path
    inside = make_namespace()
    with (
        group(kinds[0], path, tmp_path / "log-0", inside, "--role", "prefill") as prefill,
        group(kinds[1], path, tmp_path / "log-1", inside, "--role", "decode") as decode,
    ):
        expected, _ = ask(prefill, 0)
        first, last = ask(prefill, 0, hand_off=True)
        assert first == expected[:1]
        ticket = last.ticket
        ticket.source = f"{inside.host}{ticket.source}"
        tokens, last = ask(decode, 0, ticket=ticket)
        assert tokens == expected
        assert last.usage.cached_tokens == 128
