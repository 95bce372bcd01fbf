"""Which workers a request may go to, and why not to the others."""

import pytest

from sapwood_common.errors import InvalidArgumentError, UnavailableError
from sapwood_router.fleet.circuit_breaker import BreakerSettings, CircuitBreaker
from sapwood_router.fleet.eligibility import Demand, eligible
from sapwood_router.fleet.served_model import ServedModel
from sapwood_router.fleet.worker import Worker

DEMAND = Demand("m", 100, "prompt")


def worker(name: str, **settings: object) -> Worker:
    """One that takes requests; ``settings`` are attributes of its own or of what it serves."""
    made = Worker(name, CircuitBreaker(BreakerSettings(), lambda: 0.0), lambda: 0.0)
    served = {"model": "m", "context_length": 1000, "embedding_size": 8} | settings
    made.available, made.problem = True, None
    for attribute in settings.keys() & set(Worker.__slots__):
        setattr(made, attribute, served.pop(attribute))
    made.model = ServedModel(vocab_size=9, page_size=16, num_pages=9, epoch=1, **served)  # type: ignore[arg-type]
    return made


def tripped(made: Worker) -> Worker:
    for _ in range(5):
        made.breaker.fault()
    return made


USUAL = worker("usual")
CASES = [
    (worker("w", available=False, problem="nothing heard"), DEMAND, "nothing heard"),
    (worker("w", available=False), DEMAND, "not available"),
    (worker("w", draining=True), DEMAND, "drained by an operator"),
    (worker("w", leaving=True), DEMAND, "no longer named by any source"),
    (tripped(worker("w")), DEMAND, "circuit breaker open"),
    (worker("w"), Demand("m", 100, "prompt", refused_by={"w"}), "answered this request with an error"),
    (worker("w", context_length=99), DEMAND, "its context holds 99 tokens"),
    (worker("w", context_length=99), Demand("m", 100, "input", embeds=True), "its context holds 99 tokens"),
    (worker("w", embedding_size=0), Demand("m", 100, "input", embeds=True), "makes no embeddings"),
    (worker("w", most_requests=0), DEMAND, "has as many requests as it is given"),
    (worker("w", step_seconds=60.0), DEMAND, "has been at one step for 60 s"),
    (worker("w"), Demand("other", 100, "prompt"), "serves m"),
]


@pytest.mark.parametrize(("one", "demand", "reason"), CASES, ids=[reason for _, _, reason in CASES])
def test_who_is_not_has_a_reason(one: Worker, demand: Demand, reason: str) -> None:
    other = worker("other")
    other.model = ServedModel(demand.model, 1000, 9, 16, 9, 1, embedding_size=8)
    found = eligible([one, other], demand)
    assert found.workers == [other]
    assert found.excluded == {one: reason}


@pytest.mark.parametrize(
    ("one", "demand"),
    [
        (worker("w", context_length=100), DEMAND),
        (worker("w", embedding_size=0), DEMAND),
        (worker("w", context_length=99, embedded_tokens=50), Demand("m", 100, "input", embeds=True)),
        (worker("w", context_length=99), Demand("m", 0, "input", embeds=True)),
        (worker("w", step_seconds=9.9), DEMAND),
        (worker("w"), Demand("m", 100, "prompt", refused_by={"another"})),
    ],
)
def test_who_is_has_none(one: Worker, demand: Demand) -> None:
    found = eligible([one, USUAL], demand)
    assert (found.workers, found.excluded) == ([one, USUAL], {})


def test_where_all_are_full_or_at_a_long_step_it_is_they() -> None:
    full, hangs = worker("full", most_requests=0), worker("hangs", step_seconds=60.0)
    assert eligible([full, hangs], DEMAND).workers == [hangs]
    assert eligible([full], DEMAND).workers == [full]
    busy = worker("busy", most_requests=0, step_seconds=60.0)
    assert eligible([full, busy], DEMAND).workers == [full]
    assert eligible([busy], DEMAND).workers == [busy]


def test_a_prompt_that_only_a_full_worker_has_the_context_for_waits_for_it() -> None:
    full, short = worker("full", most_requests=0), worker("short", context_length=50)
    found = eligible([full, short], DEMAND)
    assert found.workers == [full]
    assert found.excluded == {short: "its context holds 50 tokens"}


def test_where_there_is_none_the_error_says_why() -> None:
    long, short = worker("long", context_length=90), worker("short", context_length=50)
    for demand in (DEMAND, Demand("m", 100, "input[3]", embeds=True)):
        with pytest.raises(InvalidArgumentError, match="prompt is too long: 100 tokens > 90 maximum") as caught:
            eligible([short, long], demand)
        assert caught.value.field == demand.field
    with pytest.raises(InvalidArgumentError, match="model 'm' makes no embeddings") as caught:
        eligible([worker("w", embedding_size=0)], Demand("m", 1, "input", embeds=True))
    assert caught.value.field == "model"
    for workers in ([], [worker("w", draining=True)]):
        with pytest.raises(UnavailableError, match="no worker is available for model 'm'") as missing:
            eligible(workers, DEMAND)
        assert missing.value.retry_after
