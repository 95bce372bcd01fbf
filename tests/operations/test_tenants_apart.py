"""Two tenants see nothing of each other: in no kind of request, in no tier of the KV cache.

Alice asks; then others ask the same thing in every way there is, each with a key of their own, while what Alice left lies in
one tier of a real worker's cache. What the worker counts (tokens found in each tier, tokens computed, steps), and the tokenizer
(texts found), is what they count for a text that nobody ever sent, so the time that it takes says nothing either (it is printed:
``pytest -rP``). That there was something to be seen Alice shows by asking again.
"""

from __future__ import annotations

import itertools
import random
import re
import statistics
import string
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import pytest

from sapwood.v1 import common_pb2, router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
from sapwood_common.tenants.api_keys import hash_key, make_key

LENGTH, PAGE = 330, 16
CACHED = LENGTH // PAGE * PAGE
"""Tokens that anybody who shares a text does not compute: of the lower tiers its pages, of the device all but the last token."""
LAYERS, HEAD_DIM = 2, 16
TOKEN_BYTES = LAYERS * 2 * HEAD_DIM * 4
"""Of a token in the cache: keys and values of one head, float32."""
WORKER = ("--threads", "1", "--num-pages", "2048", "--max-step-tokens", "64", "--host-cache-ratio", "2")
STORE = ("--storage-min-tokens", "16", "--storage-prefetch", "wait_complete")
TIERS = {
    "device": (),
    "host": (worker_pb2.CACHE_TIER_DEVICE,),
    "storage": (worker_pb2.CACHE_TIER_DEVICE, worker_pb2.CACHE_TIER_HOST),
}
"""The tier that the text lies in, and those that are cleared for it."""


class Work(NamedTuple):
    """What a request cost the worker, and what it and the tokenizer were spared."""

    tokens: int
    steps: int
    device: int
    host: int
    storage: int
    texts: int


class Service:
    """The cluster, and requests of every kind; each returns the cached tokens that its answer tells of, if it tells of any."""

    def __init__(self, cluster: Any, keys: dict[str, str]) -> None:
        self.keys = keys
        self._cluster = cluster
        self._http = httpx.Client(base_url=f"http://{cluster.http}/v1", timeout=120, trust_env=False)
        self._router, self._worker = grpc.insecure_channel(cluster.grpc), grpc.insecure_channel(cluster.worker)
        self._stub = router_pb2_grpc.RouterStub(self._router)
        self.worker = worker_pb2_grpc.WorkerStub(self._worker)
        self._letters = random.Random(7)
        self._firsts = iter(string.ascii_letters + string.digits + string.punctuation)
        self.times: dict[str, list[float]] = {}
        """Seconds that requests took, by what was asked."""

    def close(self) -> None:
        self._http.close()
        self._router.close()
        self._worker.close()

    def new_text(self) -> str:
        """One that was never sent, not even its first token."""
        return next(self._firsts) + "".join(self._letters.choices(string.ascii_letters, k=LENGTH - 1))

    def _post(self, path: str, name: str, **body: Any) -> Any:
        headers = {"authorization": f"Bearer {self.keys[name]}", "x-tenant": "alice"}
        answer = self._http.post(path, json={"model": "tiny", **body}, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]

    def _metadata(self, name: str) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.keys[name]}"), ("x-tenant", "alice"))

    def _generate(self, name: str, sampling: common_pb2.SamplingParams | None = None, **prompt: Any) -> int:
        sampling = sampling or common_pb2.SamplingParams(max_tokens=1)
        request = router_pb2.RouterGenerateRequest(sampling=sampling, **prompt)
        *_, last = self._stub.Generate(request, metadata=self._metadata(name), timeout=120)
        assert last.usage.prompt_tokens == LENGTH
        return int(last.usage.cached_tokens)

    def chat(self, name: str, text: str) -> int:
        usage = self._post("/chat/completions", name, messages=[{"role": "user", "content": text}], max_tokens=1)
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    def completion(self, name: str, text: str) -> int:
        usage = self._post("/completions", name, prompt=text, max_tokens=1)
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    def score(self, name: str, text: str) -> int:
        usage = self._post("/completions", name, prompt=text, max_tokens=0, echo=True, logprobs=1)
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    def embedding(self, name: str, text: str) -> int:
        assert self._post("/embeddings", name, input=text)["prompt_tokens"] == LENGTH
        return 0

    def message(self, name: str, text: str) -> int:
        usage = self._post("/messages", name, messages=[{"role": "user", "content": text}], max_tokens=1)
        return int(usage["cache_read_input_tokens"])

    def response(self, name: str, text: str) -> int:
        usage = self._post("/responses", name, input=text, max_output_tokens=1)
        return int(usage["input_tokens_details"]["cached_tokens"])

    def grpc_text(self, name: str, text: str) -> int:
        return self._generate(name, text=text)

    def grpc_messages(self, name: str, text: str) -> int:
        turn = common_pb2.ChatMessage(role="user", content=text)
        return self._generate(name, messages=router_pb2.ChatMessages(messages=[turn]))

    def grpc_score(self, name: str, text: str) -> int:
        return self._generate(name, common_pb2.SamplingParams(max_tokens=1, prompt_logprobs=1), text=text)

    def grpc_embed(self, name: str, text: str) -> int:
        request = router_pb2.RouterEmbedRequest(input=[router_pb2.EmbedInput(text=text)])
        self._stub.Embed(request, metadata=self._metadata(name), timeout=120)
        return 0

    def work(self, what: str, ask: Callable[[], int]) -> tuple[int, Work]:
        """What a request answers, and what it costs worker and tokenizer, which do nothing else."""
        before = self._counts()
        started = time.perf_counter()
        cached = ask()
        self.times.setdefault(what, []).append(time.perf_counter() - started)
        return cached, Work(*(after - was for after, was in zip(self._counts(), before, strict=True)))

    def _counts(self) -> list[int]:
        shown = {service: self._cluster.metrics(service) for service in ("worker", "tokenizer")}

        def total(name: str, labels: str = "", service: str = "worker") -> int:
            text = shown[service]
            return round(sum(map(float, re.findall(rf"^{name}{{[^}}]*{labels}[^}}]*}} (\S+)$", text, re.MULTILINE))))

        hits = [total("sapwood_worker_cache_hit_tokens_total", f'tier="{tier}"') for tier in TIERS]
        steps = total("sapwood_worker_step_seconds_count", 'kind="prefill"')  # there are also those that only copy
        texts = total("sapwood_tokenizer_cache_hits_total", service="tokenizer")
        return [total("sapwood_worker_step_tokens_total"), steps, *hits, texts]

    def written(self) -> list[int]:
        """Bytes that were copied to the two lower tiers so far."""
        _, *lower = self.worker.GetCacheStats(worker_pb2.GetCacheStatsRequest(), timeout=60).tiers
        return [tier.bytes_in for tier in lower]

    def written_since(self, before: list[int]) -> bool:
        """Whether a whole text has been copied to both."""
        return all(now - was >= CACHED * TOKEN_BYTES for now, was in zip(self.written(), before, strict=True))


KINDS = {
    kind.__name__: kind
    for kind in (
        *(Service.chat, Service.completion, Service.score, Service.embedding, Service.message, Service.response),
        *(Service.grpc_text, Service.grpc_messages, Service.grpc_score, Service.grpc_embed),
    )
}


@pytest.fixture(scope="module")
def tiny_model(small_model: Path) -> Path:
    """A random Llama whose tokens are bytes; its template says what the conversation's one message says."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=1, head_dim=HEAD_DIM, max_position_embeddings=1024, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(small_model)
    (small_model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return small_model


@pytest.fixture(scope="module")
def service(tiny_model: Path, module_services: Callable[..., Any], tmp_path_factory: Any) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("tenants")
    keys = {name: make_key() for name in ("alice", "nobody", *KINDS)}
    (folder / "keys").write_text("".join(f"{name} {hash_key(key)}\n" for name, key in keys.items()))
    cluster = module_services(
        # Without a step's limit of time the number of steps does not depend on measured times.
        model_worker=(
            *WORKER,
            *STORE,
            "--step-ms",
            "0",
            "--storage",
            f"file://{folder}/store",
            "--served-model-name",
            "tiny",
        ),
        router=("--api-keys", str(folder / "keys")),
        model=tiny_model,
    )
    cluster.wait_ready()
    running = Service(cluster, keys)
    yield running
    running.close()
    for what, times in running.times.items():
        print(f"{what:44} {statistics.median(times) * 1000:6.1f} ms, {len(times)} times")


@pytest.fixture(scope="module")
def unseen(service: Service) -> dict[str, Work]:
    """What each kind of request costs for a text that nobody ever sent."""
    return {
        name: service.work("what nobody asked", lambda: kind(service, "nobody", service.new_text()))[1]  # noqa: B023
        for name, kind in KINDS.items()
        for _ in range(3)
    }


# All kinds from the device; from the tiers below, which know no kind, one of each sort now and the others as slow tests.
@pytest.mark.parametrize(
    ("tier", "first"),
    [
        pytest.param(tier, first, marks=() if tier == "device" or first in ("chat", "embedding") else pytest.mark.slow)
        for tier, first in itertools.product(TIERS, KINDS)
    ],
)
def test_what_one_tenant_asked_is_as_new_for_another_as_what_nobody_asked(
    service: Service, unseen: dict[str, Work], tier: str, first: str
) -> None:
    text = service.new_text()
    before = service.written()
    KINDS[first](service, "alice", text)
    while not service.written_since(before):
        time.sleep(0.01)  # it is copied by and by
    if TIERS[tier]:
        service.worker.ClearCache(worker_pb2.ClearCacheRequest(tiers=TIERS[tier]), timeout=60)
    for name, kind in KINDS.items():  # each has a tenant of its own: what that caches is for nobody else
        cached, work = service.work(f"what another asked, in {tier}", lambda: kind(service, name, text))  # noqa: B023
        assert (cached, work) == (0, unseen[name]), name
        assert work.tokens >= LENGTH
        assert work[2:] == (0, 0, 0, 0)
    cached, work = service.work(f"what alice asked herself, in {tier}", lambda: service.grpc_text("alice", text))
    spared = LENGTH - 1 if tier == "device" else CACHED
    assert cached == spared, "there was nothing to be seen"
    assert work.tokens == unseen["grpc_text"].tokens - spared
    assert work._asdict()[tier] == spared
    assert work.texts == 1
