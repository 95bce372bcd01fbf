"""Who goes first where many come at once, on the gRPC port as on the HTTP port."""

from __future__ import annotations

import pytest

from sapwood.v1 import router_pb2
from sapwood_common.errors import UnauthenticatedError, UnimplementedError
from sapwood_common.tenants.api_keys import ApiKeys, hash_key, make_key
from sapwood_net.http2.server.waiting_line import Rank
from sapwood_router.edges.guard import Guard

KEY = make_key()


def of(**fields: str) -> list[tuple[bytes, bytes]]:
    return [
        (f"x-{name}".encode() if name != "authorization" else b"authorization", fields[name].encode())
        for name in fields
    ]


@pytest.fixture
def keys(tmp_path) -> ApiKeys:
    path = tmp_path / "keys"
    path.write_text(f"alice {hash_key(KEY)} priority=5\n")
    return ApiKeys(path)


def test_without_keys_a_callers_word_counts() -> None:
    rank = Guard(None).rank_request
    assert rank(of()) == Rank()
    assert rank(of(tenant="a", priority="7")) == Rank(7, b"a")
    assert rank(of(tenant="a", priority="much")) == Rank(0, b"a")
    assert rank(of(authorization="Bearer b")) == Rank(0, b"Bearer b")


def test_with_keys_the_keys_owner_and_at_most_its_priority_count(keys) -> None:
    rank = Guard(keys).rank_request
    mine = f"Bearer {KEY}"
    assert rank(of(authorization=mine, tenant="bob")) == Rank(0, "alice")
    assert rank(of(authorization=mine, priority="100")) == Rank(5, "alice")
    assert rank(of(authorization=mine, priority="-3")) == Rank(-3, "alice")
    assert rank(of(**{"api-key": KEY, "priority": "100"})) == Rank(5, "alice")
    assert rank(of(**{"api-key": KEY, "authorization": "Bearer other"})) != Rank(0, "alice")
    assert rank(of(priority="100")) == Rank(stranger=True)
    # Anybody who makes keys up has one turn for all of them, and not that of the probes, which have none.
    strangers = {rank(of(authorization=f"Bearer {number}", priority="100")) for number in range(3)}
    assert len(strangers) == 1
    stranger = strangers.pop()
    assert stranger.stranger
    assert stranger.caller is not None


def test_of_a_call_that_was_let_in_its_tenant_is_known(keys) -> None:
    guard = Guard(keys)
    headers = of(authorization=f"Bearer {KEY}", priority="100")
    tenant = guard.let_in("/sapwood.v1.Router/Generate", headers)
    assert tenant is not None
    assert guard.rank(headers, tenant) == Rank(5, "alice") == guard.rank_request(headers)
    assert guard.rank(of(priority="100"), None) == Rank(stranger=True)  # of one that needs no key


@pytest.mark.parametrize(
    "given", [(), ("Bearer wrong",), ("Basic eA==",), (f"Bearer {KEY}", f"Bearer {KEY}"), ("", f"Bearer {KEY}")]
)
def test_without_one_known_key_nobody_is_let_in(keys, given) -> None:
    with pytest.raises(UnauthenticatedError):
        Guard(keys).let_in("/sapwood.v1.Router/Generate", [(b"authorization", each.encode()) for each in given])


def test_operators_methods_are_for_nobody_on_the_public_port(keys) -> None:
    guard = Guard(keys, frozenset({"/sapwood.v1.Router/Generate"}))
    with pytest.raises(UnimplementedError, match="admin-port"):
        guard.let_in("/sapwood.v1.Router/RemoveWorker", of(authorization=f"Bearer {KEY}"))


async def test_of_calls_that_come_at_once_the_most_important_begins_first(cluster, wait_until) -> None:
    count = 64
    await cluster.generate("connected")
    server = cluster.router._server.grpc
    turnstile, held = server._turnstile, True

    def hold() -> None:
        if held:  # every turn, until it is full
            turnstile.enter(hold, Rank(100))

    hold()
    calls = [
        cluster.stub.Generate(
            router_pb2.RouterGenerateRequest(text=f"text {number}", request_id=f"r{number}"),
            metadata=(("x-priority", "7"),) if number == count - 1 else (),
        )
        for number in range(count)
    ]
    await wait_until(lambda: server.waiting == count + 1)
    held = False
    for call in calls:
        assert [response async for response in call]
    begun = cluster.tokenizer.request_ids[-count:]
    assert begun == [f"r{count - 1}", *(f"r{number}" for number in range(count - 1))]
