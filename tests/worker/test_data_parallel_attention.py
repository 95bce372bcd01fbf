"""Real workers whose ranks have requests of their own: they answer as one process does, and tell what each rank got."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from sapwood.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from sapwood_common.models.model_files import packaged_path
from sapwood_testing.models.upcycled import upcycle
from sapwood_testing.ports import port_of_its_own
from sapwood_testing.worker.latent_twin import write_demo_twin
from sapwood_testing.worker.split_models import SHAPE
from sapwood_testing.worker.worker_process import started_worker

WIDE = ("--stored-weights", "widen")
"""Experts are stored in float32: what they are compared with is multiplied in float32 as well."""
TIGHT = (
    "--num-pages",
    "16",
    "--max-running",
    "5",
    "--conservativeness",
    "0",
    "--host-cache-ratio",
    "3",
    "--threads",
    "1",
)
"""Pages for little more than one request: others go back to the queue, and find their prompts in the second tier."""


class Worker:
    """A worker that listens.

    Args:
        stub: For its calls.
        metrics: Where its metrics are.
    """

    def __init__(self, stub: Any, metrics: str) -> None:
        self.stub, self._metrics = stub, metrics

    def samples(self, name: str) -> list[Any]:
        """A metric's samples."""
        with urllib.request.urlopen(self._metrics) as page:
            families = list(text_string_to_metric_families(page.read().decode()))
        samples = [sample for family in families for sample in family.samples]
        return [each for each in samples if each.name == f"sapwood_worker_{name}"]

    def count(self, name: str) -> float:
        """A metric without labels."""
        [sample] = self.samples(name)
        return float(sample.value)

    def by(self, label: str, name: str) -> dict[str, float]:
        """A metric by one of its labels."""
        return {each.labels[label]: each.value for each in self.samples(name) if label in each.labels}

    def by_rank(self, name: str) -> list[float]:
        """A metric of each rank."""
        return list(self.by("rank", f"rank_{name}").values())

    def host_hits(self) -> int:
        """Tokens found in the second tier."""
        tiers = self.stub.GetCacheStats(worker_pb2.GetCacheStatsRequest()).tiers
        return next(int(each.hit_tokens) for each in tiers if each.tier == worker_pb2.CACHE_TIER_HOST)

    def expert_moves(self) -> int:
        """Experts that were copied from rank to rank."""
        return int(self.stub.GetExpertLoad(worker_pb2.GetExpertLoadRequest()).moves)

    @contextlib.contextmanager
    def handed_off(self, prompts: list[list[int]]) -> Iterator[list[Any]]:
        """Tickets for prompts, all at once; their leases are renewed, as a router does, until the end."""
        given: list[bytes] = []
        over = threading.Event()

        def messages() -> Iterator[worker_pb2.SessionRequest]:
            while not over.wait(0.2):
                yield worker_pb2.SessionRequest(renew_handoffs=given)

        def ask(number: int) -> Any:
            sampling = common_pb2.SamplingParams(temperature=0, ignore_eos=True)
            request = worker_pb2.WorkerGenerateRequest(
                request_id=f"r{number}", token_ids=prompts[number], sampling=sampling, hand_off=True
            )
            *_, last = self.stub.Generate(request)
            given.append(last.ticket.transfer_id)
            last.ticket.source = f"127.0.0.1{last.ticket.source}"
            return last.ticket

        session = self.stub.Session(messages())
        try:
            with ThreadPoolExecutor(len(prompts)) as executor:
                yield list(executor.map(ask, range(len(prompts))))
        finally:
            over.set()
            session.cancel()

    def answers(self, prompts: list[list[int]], tickets: Sequence[Any] = ()) -> list[tuple[list[int], list[float]]]:
        """The tokens and log probabilities of prompts, all at once, in each of several ways."""
        samplings = [
            common_pb2.SamplingParams(temperature=0, logprobs=2),
            common_pb2.SamplingParams(temperature=0.8, seed=5, top_p=0.9),
            common_pb2.SamplingParams(temperature=0, presence_penalty=0.5, repetition_penalty=1.2),
            # Of all 262 144 tokens, rounding would choose the neighbour of the one that was drawn: of 526 draws of the latent
            # twin 3 differed, of tokens with 1e-5 to 1.5e-4. Their logits differed by 3e-4, as elsewhere, which moved the
            # boundary between the two by 3e-6 to 1.6e-5; the number drawn was 1e-6 to 1.5e-5 from it.
            common_pb2.SamplingParams(temperature=0.7, seed=9, top_k=50),
        ]

        def ask(number: int) -> tuple[list[int], list[float]]:
            kind = number % len(samplings)
            sampling = common_pb2.SamplingParams()
            sampling.CopyFrom(samplings[kind])
            sampling.max_tokens = 24
            request = worker_pb2.WorkerGenerateRequest(
                request_id=f"r{number}",
                token_ids=prompts[number],
                sampling=sampling,
                ticket=tickets[number] if tickets else None,
            )
            tokens: list[int] = []
            logprobs: list[float] = []
            for response in self.stub.Generate(request):
                tokens += response.token_ids
                logprobs += [each.logprob for each in response.logprobs]
            return tokens, logprobs

        with ThreadPoolExecutor(len(prompts)) as executor:
            return list(executor.map(ask, range(len(prompts))))


@contextlib.contextmanager
def started(model: Path, log: Path, *flags: str) -> Iterator[Worker]:
    """A worker."""
    with started_worker(model, log, *flags) as found, grpc.insecure_channel(found.address) as channel:
        yield Worker(worker_pb2_grpc.WorkerStub(channel), found.metrics)


def split(ranks: int, *, experts: bool) -> list[str]:
    flags = ["--tensor-parallel", str(ranks), "--data-parallel-attention"]
    return [*flags, "--expert-parallel"] if experts else flags


def near(found: list[tuple[list[int], list[float]]], expected: list[tuple[list[int], list[float]]]) -> None:
    for (tokens, logprobs), (theirs, their_logprobs) in zip(found, expected, strict=True):
        assert tokens == theirs
        assert logprobs == pytest.approx(their_logprobs, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "sums", "dispatch"),
    [
        ("deepseek-v3", 2, "one-shot", "gather"),
        ("qwen3-moe", 4, "backend", "gather"),
        ("deepseek-v3", 4, "backend", "direct"),
    ],
)
def test_processes_with_requests_of_their_own_answer_as_one(
    tiny_model: Any, tmp_path: Path, name: str, ranks: int, sums: str, dispatch: str
) -> None:
    path = tiny_model(name, **SHAPE).path
    shared = [3 + 7 * place % 90 for place in range(48)]
    prompts = [
        shared[: 16 * (number % 4)] + [3 + (11 * number + place) % 90 for place in range(9)] for number in range(12)
    ]
    flags = ("--num-pages", "16", "--max-running", "5", "--host-cache-ratio", "3", "--threads", "1")
    flags += ("--no-structured-output",)
    with started(path, tmp_path / "log", *flags) as one:
        expected = one.answers(prompts)
    flags += ("--all-reduce", sums, "--expert-dispatch", dispatch)
    with started(path, tmp_path / "log-ranks", *flags, *split(ranks, experts=True)) as worker:
        info = worker.stub.GetModelInfo(worker_pb2.GetModelInfoRequest())
        assert (info.attention_ranks, info.num_pages, info.max_running) == (ranks, ranks * 16, ranks * 5)
        near(worker.answers(prompts), expected)
        requests = worker.by_rank("requests_total")
        assert len(requests) == ranks and sum(requests) == 12 and min(requests) > 0
        # A single request leaves all ranks but one idle.
        near(worker.answers(prompts[:1]), expected[:1])
        assert [method for method, count in worker.by("method", "all_reduces_total").items() if count] == [sums]
        load = worker.stub.GetExpertLoad(worker_pb2.GetExpertLoadRequest())
        chosen = json.loads((path / "config.json").read_text())["num_experts_per_tok"]
        everywhere = sum(load.tokens) / chosen * 2 * (ranks - 1) * 48 * 4  # rows of 48 float32
        assert load.exchanged_bytes == everywhere if dispatch == "gather" else 0 < load.exchanged_bytes < everywhere


@pytest.mark.slow
def test_each_rank_publishes_the_kv_events_of_its_own_cache(tiny_model: Any, tmp_path: Path) -> None:
    path, replay_port = tiny_model("deepseek-v3", **SHAPE).path, port_of_its_own()
    flags = ("--num-pages", "64", "--threads", "1", "--no-structured-output", *split(2, experts=True))
    flags += ("--kv-events-port", "0", "--kv-events-replay-port", str(replay_port))
    prompts = [[3 + each] * 40 for each in range(6)]
    stored: list[set[int]] = [set(), set()]
    with started(path, tmp_path / "log", *flags) as worker, zmq.Context() as context:
        worker.answers(prompts)
        for rank, tokens in enumerate(stored):
            with context.socket(zmq.DEALER) as asking:
                asking.connect(f"tcp://127.0.0.1:{replay_port + rank}")
                asking.send_multipart((b"", bytes(8)))
                while payload := asking.recv_multipart()[-1]:
                    _, events, data_parallel_rank = msgspec.msgpack.decode(payload)
                    assert data_parallel_rank == rank
                    for event in events:
                        tokens.update(event.get("token_ids", ()))
                asking.linger = 0
    prompted = set(range(3, 9))  # each prompt repeats a token of its own
    assert prompted & stored[0] and prompted & stored[1]
    assert prompted <= stored[0] | stored[1]


@pytest.mark.slow
def test_prompts_are_handed_off_from_ranks_to_ranks(tiny_model: Any, tmp_path: Path) -> None:
    path = tiny_model("deepseek-v3", **SHAPE).path
    prompts = [[3 + (7 + each) * place % 90 for place in range(130)] for each in range(8)]
    # Half of a rank's host pages are for transfers: room for all prompts, since on a busy machine one rank may get more of them.
    cache = ("--num-pages", "64", "--host-cache-ratio", "2")
    flags = (*cache, "--max-running", "5", "--threads", "1", "--no-structured-output")
    port, ranks = port_of_its_own(), split(2, experts=True)
    with (
        started(path, tmp_path / "log-0", *flags, *ranks, "--role", "prefill", "--handoff-port", str(port)) as prefill,
        started(path, tmp_path / "log-1", *flags, *ranks, "--role", "decode") as decode,
    ):
        expected = prefill.answers(prompts)
        with prefill.handed_off(prompts) as tickets:
            assert {ticket.source for ticket in tickets} == {f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"}
            near(decode.answers(prompts, tickets), expected)
        assert min(decode.by_rank("requests_total")) > 0
        assert decode.count("pulled_pages_total") == 8 * 8


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "dispatch"), [(2, "gather"), (4, "gather"), (2, "direct")])
def test_experts_move_between_ranks_with_requests_of_their_own(
    tiny_model: Any, tmp_path: Path, ranks: int, dispatch: str
) -> None:
    path = tiny_model("qwen3-moe", **SHAPE).path
    prompts = [[3 + (7 + each) * place % 90 for place in range(40 + each)] for each in range(12)]
    flags = ("--num-pages", "64", "--max-running", "5", "--threads", "1", "--no-structured-output")
    with started(path, tmp_path / "log", *flags) as one:
        expected = one.answers(prompts)
    flags += ("--redundant-experts", "4", "--no-prefix-cache", "--expert-dispatch", dispatch)
    with started(path, tmp_path / "log-ranks", *flags, *split(ranks, experts=True)) as worker:
        until = time.monotonic() + 120
        while not (moves := worker.expert_moves()) and time.monotonic() < until:
            near(worker.answers(prompts), expected)
        assert moves, "nothing has moved"
        near(worker.answers(prompts), expected)
        near(worker.answers(prompts[:1]), expected[:1])  # one rank computes, the others keep pace
        assert min(worker.by_rank("requests_total")) > 0


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_demo_model_in_experts_gives_its_text(plugin: Any, tmp_path: Path, ranks: int) -> None:
    """Experts are equal: whatever the routing, and whichever rank has a request, the text is the dense model's."""
    plugin("sapwood.model_families", "gemma3_sparse", "from sapwood_testing.models.upcycled import FAMILY", "FAMILY")
    path = tmp_path / "equal"
    upcycle(packaged_path("demo-base"), path, experts=4, chosen=2)
    shared = [2, *(1000 + 7 * place for place in range(63))]
    prompts = [[*shared, *(3000 + 11 * number + place for place in range(20 + 6 * number))] for number in range(10)]
    with started(packaged_path("demo-base"), tmp_path / "log", *TIGHT, "--no-structured-output", *WIDE) as one:
        expected = one.answers(prompts)
    with started(path, tmp_path / "log-ranks", *TIGHT, *split(ranks, experts=True)) as worker:
        near(worker.answers(prompts), expected)
        worker.stub.ClearCache(worker_pb2.ClearCacheRequest(tiers=[worker_pb2.CACHE_TIER_DEVICE]))
        near(worker.answers(prompts), expected)
        assert worker.host_hits() > 0
        assert min(worker.by_rank("requests_total")) > 0


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_demo_models_latent_twin_gives_its_text(plugin: Any, tmp_path: Path, ranks: int) -> None:
    twin_source = "from sapwood_testing.worker.latent_twin import TWIN"
    plugin("sapwood.model_families", "gemma3_latent", twin_source, "TWIN")
    path = tmp_path / "twin"
    path.mkdir()
    write_demo_twin(path)
    prompts = [[2, *(3000 + 11 * number + place for place in range(20 + 6 * number))] for number in range(8)]
    flags = (*TIGHT, "--no-structured-output")
    with started(path, tmp_path / "log", *flags) as one:
        expected = one.answers(prompts)
    with started(path, tmp_path / "log-ranks", *flags, *split(ranks, experts=False)) as worker:
        near(worker.answers(prompts), expected)
        assert min(worker.by_rank("requests_total")) > 0
