"""Which policy decides for which model, and shadows."""

import pytest

from sapwood.v1 import router_pb2
from sapwood_common.errors import UnavailableError
from sapwood_router.config import RouterConfig
from sapwood_router.routing.factory import policy_names
from sapwood_router.routing.policies.base import PromptPages
from sapwood_router.routing.policy_book import PolicyBook
from sapwood_router.routing.worker_view import WorkerView

WORKERS = [WorkerView("w0", requests=1), WorkerView("w1", requests=0)]


async def counted(cluster) -> dict[tuple[str, str], float]:
    from prometheus_client.parser import text_string_to_metric_families

    return {
        (sample.labels["policy"], sample.labels["verdict"]): sample.value
        for family in text_string_to_metric_families((await cluster.http.get("/metrics")).text)
        for sample in family.samples
        if sample.name == "sapwood_router_shadow_choices_total"
    }


class Recorder:
    """Chooses always the same, and writes down what it is told."""

    def __init__(self, name: str, choice: str) -> None:
        self.name, self.choice, self.told = name, choice, []
        self.remembers = self.reads_events = name == "cache_aware"

    def choose(self, workers, prompt):
        from sapwood_router.routing.policies.base import Choice

        return Choice(self.choice, self.name)

    def placed(self, address, page_size, prompt):
        self.told.append(("placed", address))

    def finished(self, address, page_size, prompt, new_tokens):
        self.told.append(("finished", address))

    def failed(self, address, page_size, prompt):
        self.told.append(("failed", address))

    def explain(self, workers, prompt):
        return {}

    def reset(self, address, num_pages):
        self.told.append(("reset", address))


def test_each_model_has_its_policy_and_what_remembers_is_one_for_all() -> None:
    made: list[Recorder] = []
    seen: list[tuple[str, bool]] = []

    def make(name):
        made.append(Recorder(name, "w0" if name == "cache_aware" else "w1"))
        return made[-1]

    book = PolicyBook(
        "round_robin",
        {"m": "cache_aware"},
        ["cache_aware", "random", "random"],
        make,
        lambda *told: seen.append(told),
    )
    assert [book.name_of(model) for model in ("m", "n", "o")] == ["cache_aware", "round_robin", "round_robin"]
    assert book.of("m").choose(WORKERS, PromptPages([])).reason == "cache_aware"
    assert seen == [("random", False)]
    assert book.of("n").choose(WORKERS, PromptPages([])).reason == "round_robin"
    assert seen[1:] == [("cache_aware", False), ("random", True)]
    assert book.of("n") is book.of("n")
    assert book.of("o").live is not book.of("n").live
    assert sum(policy.name == "cache_aware" for policy in made) == 1
    book.of("o").placed("w1", 16, PromptPages([]))
    book.of("m").finished("w0", 16, PromptPages([]), [])
    book.of("n").failed("w2", 16, PromptPages([]))
    book.reset("w0", 5)
    (remembers,) = [policy for policy in made if policy.name == "cache_aware"]
    assert remembers.told == [("placed", "w1"), ("finished", "w0"), ("failed", "w2"), ("reset", "w0")]


def test_what_is_no_policy_is_refused() -> None:
    for wrong in ("m", "=random", "m=best"):
        with pytest.raises(ValueError, match="MODEL=POLICY"):
            RouterConfig(model_policies=(wrong,))
    assert RouterConfig(model_policies=("a=b=random",)).policies_of_models == {"a=b": "random"}


async def test_a_models_policy_decides_and_a_shadow_sees_every_selection(make_cluster) -> None:
    settings = {"model_policies": ("fake=round_robin",), "shadow_policies": ("consistent_hash", "least_load")}
    async with make_cluster(2, **settings) as cluster:
        text, session = "abc", (("x-session-id", "one"),)
        for _ in range(6):
            await cluster.generate(text, metadata=session)
        assert [len(worker.calls) for worker in cluster.workers] == [3, 3]
        before = await counted(cluster)
        assert sum(before.values()) == 12
        assert before["consistent_hash", "agree"] == before["consistent_hash", "differ"] == 3
        asked = router_pb2.ExplainRouteRequest(request=router_pb2.RouterGenerateRequest(text=text))
        answer = await cluster.stub.ExplainRoute(asked, metadata=session)
        assert answer.policy == answer.reason == "round_robin"
        assert {shadow.policy for shadow in answer.shadows} == {"consistent_hash", "least_load"}
        assert {shadow.chosen for shadow in answer.shadows} <= {worker.address for worker in cluster.workers}
        assert next(s.reason for s in answer.shadows if s.policy == "consistent_hash") == "session"
        assert await counted(cluster) == before


@pytest.mark.parametrize("policy", policy_names())
async def test_a_router_serves_with_every_policy(make_cluster, policy) -> None:
    async with make_cluster(2, policy=policy) as cluster:
        for text in ("abc", "abc", "another"):
            assert "".join([response.text for response in await cluster.generate(text)]) == text


@pytest.mark.parametrize("fail_after", [0, 3])
async def test_a_worker_is_not_believed_to_hold_a_prompt_that_it_refused_or_failed_at(make_cluster, fail_after) -> None:
    async with make_cluster(2, kv_events=False) as cluster:
        text = "a prompt that is long enough for several pages " * 4
        asked = router_pb2.ExplainRouteRequest(request=router_pb2.RouterGenerateRequest(text=text))
        chosen = (await cluster.stub.ExplainRoute(asked)).chosen
        first, second = sorted(cluster.workers, key=lambda worker: worker.address != chosen)
        first.script.error, first.script.fail_after = UnavailableError("not now"), fail_after
        await cluster.generate(text)
        assert (len(first.calls), len(second.calls)) == (1, 1)
        held = {item.address: item.cached_tokens for item in (await cluster.stub.ExplainRoute(asked)).candidates}
        assert held[first.address] == 0
        assert held[second.address] > 100


async def test_a_package_can_bring_a_policy(plugin, make_cluster):
    plugin(
        "sapwood.policies",
        "last",
        """
        from sapwood_router.routing.policies.base import Choice, Forgetful

        class Last(Forgetful):
            def choose(self, workers, prompt):
                return Choice(max(worker.address for worker in workers), "last")

        def make(parts):
            return Last()
        """,
        "make",
    )
    async with make_cluster(3, policy="last") as cluster:
        for _ in range(3):
            await cluster.http.post("/v1/completions", json={"prompt": "a"})
        last = max(cluster.workers, key=lambda worker: worker.address)
        assert [len(worker.calls) for worker in cluster.workers if worker is not last] == [0, 0]
        assert len(last.calls) == 3
    with pytest.raises(ValueError, match=r"'first' is none of cache_aware, .*last"):
        RouterConfig(policy="first")
