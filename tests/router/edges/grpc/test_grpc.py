"""Router.Generate over gRPC."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sapwood.v1 import common_pb2, router_pb2
from sapwood_net.pacing.heavy_work import Stint
from sapwood_testing.router.fake_tokenizer import encode

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def text_of(responses) -> str:
    return "".join(response.text for response in responses)


async def test_text_streams_back_with_its_tokens_and_an_account_at_the_end(cluster) -> None:
    responses = await cluster.generate("grüße, 🌲!")
    assert text_of(responses) == "grüße, 🌲!"
    tokens = [token for response in responses for token in response.token_ids]
    assert tokens == [*encode("grüße, 🌲!")[1:], 1]
    last = responses[-1]
    assert last.finish_reason == STOP
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(encode("grüße, 🌲!")), len(tokens))
    assert all(not r.finish_reason and not r.HasField("usage") for r in responses[:-1])
    await cluster.idle()


async def test_each_response_carries_the_tokens_its_text_stands_for(cluster) -> None:
    cluster.workers[0].script.delay = cluster.workers[1].script.delay = 0.005
    for response in await cluster.generate("añb"):
        ids = [token for token in response.token_ids if token >= 3]
        assert bytes(token - 3 for token in ids).decode() == response.text


async def test_a_conversation_of_many_messages_is_read_a_message_a_turn_of_the_loop(cluster, monkeypatch) -> None:
    """5000 took 8 ms in one piece."""
    taken, turn = 0, Stint.turn

    async def counted(stint: Stint) -> None:
        nonlocal taken
        taken += 1
        await turn(stint)

    monkeypatch.setattr(Stint, "turn", counted)
    monkeypatch.setattr("sapwood_net.pacing.heavy_work.PIECE", 0.0)  # however fast it is here, each step is a piece
    turns = [common_pb2.ChatMessage(role="user", content="a")] * 500
    request = router_pb2.RouterGenerateRequest(messages=router_pb2.ChatMessages(messages=turns))
    assert [r async for r in cluster.stub.Generate(request)]
    assert list(cluster.tokenizer.chats[-1].messages) == turns
    assert taken >= 500


async def test_messages_and_tokens_are_prompts_too(cluster) -> None:
    turns = [common_pb2.ChatMessage(role="user", content="hi")]
    request = router_pb2.RouterGenerateRequest(messages=router_pb2.ChatMessages(messages=turns))
    assert text_of([r async for r in cluster.stub.Generate(request)]) == "<user>hi<assistant>"
    request = router_pb2.RouterGenerateRequest(tokens=common_pb2.TokenIds(ids=encode("abc")))
    assert text_of([r async for r in cluster.stub.Generate(request)]) == "abc"


async def test_sampling_settings_reach_the_worker_and_absent_ones_stay_absent(cluster) -> None:
    sampling = common_pb2.SamplingParams(temperature=0, max_tokens=2, seed=7, stop_token_ids=[9])
    responses = await cluster.generate("abcdef", sampling=sampling)
    assert text_of(responses) == "ab"
    assert responses[-1].finish_reason == LENGTH
    assert cluster.calls()[0].request.sampling == sampling


async def test_a_stop_string_ends_the_text_and_the_workers_call(cluster) -> None:
    for worker in cluster.workers:
        worker.script.delay = 0.002
    prompt = "one two STOP" + "x" * 5000
    responses = await cluster.generate(prompt, stop=["STOP", "never"])
    assert text_of(responses) == "one two "
    assert responses[-1].finish_reason == STOP
    assert responses[-1].stop_match == "STOP"
    assert responses[-1].usage.completion_tokens == len("one two STOP")
    await cluster.idle()
    (call,) = cluster.calls()
    assert call.outcome == "cancelled"
    assert call.sent_tokens < 5000


async def test_who_wants_the_answer_whole_gets_one_message_for_each_continuation(cluster) -> None:
    streamed = await cluster.generate("one two", sampling=common_pb2.SamplingParams(logprobs=1))
    (whole,) = await cluster.generate("one two", sampling=common_pb2.SamplingParams(logprobs=1), whole=True)
    assert len(streamed) > 1
    assert whole.text == text_of(streamed) == "one two"
    assert list(whole.token_ids) == [token for part in streamed for token in part.token_ids]
    assert len(whole.logprobs) == len(whole.token_ids)
    assert (whole.finish_reason, whole.usage) == (streamed[-1].finish_reason, streamed[-1].usage)
    two = await cluster.generate("one two", sampling=common_pb2.SamplingParams(n=2), whole=True)
    assert sorted(each.index for each in two) == [0, 1]
    (ids,) = await cluster.generate("one two", detokenize=False, whole=True)
    assert (ids.text, ids.token_ids) == ("", whole.token_ids)


async def test_the_request_id_is_echoed_and_handed_on(cluster) -> None:
    for given, metadata in (("mine-1", None), ("", (("x-request-id", "mine-2"),)), ("", None)):
        call = cluster.stub.Generate(router_pb2.RouterGenerateRequest(request_id=given, text="a"), metadata=metadata)
        echoed = dict(await call.initial_metadata())["x-request-id"]
        assert [r async for r in call]
        assert echoed == (given or (metadata[0][1] if metadata else echoed))
        assert echoed
        assert cluster.tokenizer.request_ids[-1] == echoed
        assert echoed in [seen.request_id for seen in cluster.calls()]


async def test_one_id_may_be_in_use_twice_at_a_time(cluster) -> None:
    both = await asyncio.gather(*(cluster.generate("abc", request_id="same") for _ in range(8)))
    assert {text_of(responses) for responses in both} == {"abc"}
    assert len({call.request.request_id for call in cluster.calls()}) == 8


WRONG = [
    ({}, "prompt"),
    ({"text": ""}, "text"),
    ({"tokens": common_pb2.TokenIds()}, "tokens.ids"),
    ({"messages": router_pb2.ChatMessages()}, "messages.messages"),
    ({"text": "a", "request_id": "bad id"}, "request_id"),
    ({"text": "a", "stop": [""]}, "stop"),
    ({"text": "a", "stop": ["x"] * 17}, "stop"),
    *(
        ({"text": "a", "sampling": common_pb2.SamplingParams(**{name: value})}, f"sampling.{name}")
        for name, value in [
            ("temperature", -1),
            ("temperature", float("nan")),
            ("temperature", float("inf")),
            ("top_k", 0),
            ("top_p", 0),
            ("top_p", 1.5),
            ("min_p", -0.1),
            ("min_p", 2),
            ("max_tokens", 0),
        ]
    ),
]


async def test_a_wrong_field_is_refused_by_name_and_the_service_goes_on(cluster, expect_error) -> None:
    for fields, named in WRONG:
        request = router_pb2.RouterGenerateRequest(**fields)
        assert (await expect_error(cluster.stub.Generate(request).read(), INVALID))[1] == named
    assert text_of(await cluster.generate("ok")) == "ok"


async def test_an_unknown_model_is_not_found(cluster, expect_error) -> None:
    call = cluster.generate("a", model="gpt-99")
    assert (await expect_error(call, grpc.StatusCode.NOT_FOUND))[1] == "model"
    assert text_of(await cluster.generate("a", model="fake")) == "a"


async def test_text_that_is_not_utf8_is_refused_by_name(cluster, expect_error) -> None:
    raw = router_pb2.RouterGenerateRequest(text="abc").SerializeToString().replace(b"abc", b"a\xffc")
    call = cluster.channel.unary_stream("/sapwood.v1.Router/Generate")(raw)
    assert (await expect_error(call.read(), INVALID))[1] == "text"


async def test_errors_of_other_services_name_the_clients_fields(make_cluster, expect_error) -> None:
    async with make_cluster(1) as cluster:
        cluster.workers[0]._context_length = 8  # smaller than it told the router
        assert (await expect_error(cluster.generate("x" * 20), INVALID))[1] == "text"
        turns = [common_pb2.ChatMessage(role=role, content="x") for role in ("user", "system")]
        request = router_pb2.RouterGenerateRequest(messages=router_pb2.ChatMessages(messages=turns))
        _, field = await expect_error(cluster.stub.Generate(request).read(), INVALID)
        assert field == "messages.messages[1].role"


async def test_a_prompt_over_the_context_is_refused_before_a_worker_is_asked(cluster, expect_error) -> None:
    message, field = await expect_error(cluster.generate("x" * 100_000), INVALID)
    assert field == "text"
    assert "100001" in message
    assert not cluster.calls()


async def test_models_and_workers_are_listed(cluster) -> None:
    (model,) = (await cluster.stub.ListModels(router_pb2.ListModelsRequest())).models
    assert (model.id, model.context_length, model.workers) == ("fake", 100_000, 2)
    workers = (await cluster.stub.ListWorkers(router_pb2.ListWorkersRequest())).workers
    assert {w.address for w in workers} == {w.address for w in cluster.workers}
    assert all(w.healthy and w.model == "fake" and w.in_flight == 0 for w in workers)


async def test_health_follows_the_tokenizer_and_the_workers(make_cluster, wait_until) -> None:
    async with make_cluster(2) as cluster:
        health = health_pb2_grpc.HealthStub(cluster.channel)

        async def becomes(serving: bool) -> None:
            wanted = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
            for _ in range(12_000):
                answer = await health.Check(health_pb2.HealthCheckRequest(service="sapwood.v1.Router"))
                if answer.status == wanted:
                    break
                await asyncio.sleep(0.005)
            assert answer.status == wanted
            assert (await cluster.http.get("/health")).status_code == (200 if serving else 503)

        await becomes(True)
        await cluster.workers[0].set_serving(False)
        seen = {worker.address: worker for worker in cluster.router.registry.all()}
        await wait_until(lambda: not seen[cluster.workers[0].address].available)
        await becomes(True)  # one is enough
        await cluster.workers[1].kill()
        await becomes(False)
        reason = (await cluster.http.get("/health")).json()["reason"]
        assert cluster.id_of(cluster.workers[1]) in reason
        await cluster.workers[1].start()
        await becomes(True)
        await cluster.tokenizer.kill()
        await becomes(False)
        await cluster.tokenizer.start()
        await becomes(True)
