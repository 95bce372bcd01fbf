"""`--random-seed`: requests without a seed get the same ones after each start."""

from sapwood.v1 import common_pb2, router_pb2

HI = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": HI, "n": 2},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"model": "fake", "messages": HI, "max_tokens": 8},
    "/generate": {"text": ["hi", "ho"]},
}


async def seeds_of(make_cluster, **settings) -> list[int]:
    """The seeds that workers got, in order: one request of each API, then one that explains its route, and one more."""
    async with make_cluster(workers=1, **settings) as one:
        for path, body in BODIES.items():
            answer = await one.http.post(path, json=body)
            assert answer.status_code == 200, answer.text
        asked = router_pb2.RouterGenerateRequest(text="hello")
        await one.stub.ExplainRoute(router_pb2.ExplainRouteRequest(request=asked))
        async for _ in one.stub.Generate(asked):
            pass
        return [call.request.sampling.seed for call in one.calls()]


async def test_requests_repeated_in_order_get_their_seeds_again(make_cluster) -> None:
    first, again, other = [await seeds_of(make_cluster, random_seed=seed) for seed in (7, 7, 8)]
    assert sorted(first) == sorted(again)  # the parts of one request may reach the worker in any order
    assert first[0] == again[0]
    assert first[-1] == again[-1]
    assert len(set(first)) == len(first) == 8
    assert not {*first} & {*other}


async def test_without_it_seeds_are_random(make_cluster) -> None:
    first, again = [await seeds_of(make_cluster) for _ in range(2)]
    assert len({*first, *again}) == 16


async def test_a_seed_of_ones_own_is_kept(make_cluster) -> None:
    async with make_cluster(workers=1, random_seed=7) as one:
        asked = router_pb2.RouterGenerateRequest(text="hello", sampling=common_pb2.SamplingParams(seed=3))
        for _ in range(2):
            async for _ in one.stub.Generate(asked):
                pass
        assert [call.request.sampling.seed for call in one.calls()] == [3, 3]
