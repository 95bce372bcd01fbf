"""Real worker processes (around a runner without a model), some of which compute prompts and some generate, and what is lost on
the way from one to the other."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
import trustme
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from sapwood.cli.main import main
from sapwood.v1 import router_pb2, worker_pb2, worker_pb2_grpc
from sapwood_common.network.channel import open_channel
from sapwood_router.flow.disaggregation import decision, weighing
from sapwood_testing.router.handoff_fleet import (
    PAGE,
    ROLES,
    Front,
    Worker,
    expected,
    front,
    new_prompt,
    started,
    tokens_of,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers() -> AsyncIterator[dict[str, Worker]]:
    made = {
        "prefill": Worker("prefill", "--max-step-tokens", "32"),  # prompts come in chunks
        "decode": Worker("decode"),
        "both": Worker("both", "--host-cache-ratio", "1"),
    }
    async with started(*made.values()):
        yield made


async def test_a_prompt_is_computed_by_one_worker_and_its_pages_are_pulled_by_another(
    workers: dict[str, Worker],
) -> None:
    prefill, decode = workers["prefill"], workers["decode"]
    prompts = [new_prompt() for _ in range(4)]
    pages = sum(len(prompt) // PAGE for prompt in prompts)
    async with front([prefill, decode]) as router:
        for prompt in prompts:
            answer = await router.answer(prompt)
            assert tokens_of(answer) == expected(prompt)
            usage = answer[-1].usage
            assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 20)
        assert router.count("handoffs") == len(prompts)
        assert router.count("resumptions") == 0
        await prefill.reaches("handoff_tickets", lambda count: count == len(prompts))
        # On a busy machine a lease may have ended before its pages were pulled: then they were computed.
        await decode.reaches("pulled_pages", lambda count: 0 < count <= pages)
        pulled = await decode.count("pulled_pages")
        assert pulled == pages or await decode.count("pull_fallbacks") > 0
        assert await decode.count("pulled_bytes") == pulled * PAGE * 8
        assert tokens_of(await router.answer(prompts[0])) == expected(prompts[0])
        await prefill.reaches("handoff_tickets", lambda count: count == len(prompts) + 1)
        assert await decode.count("pulled_pages") == pulled  # it had them all
        await prefill.reaches("handoff_pages", lambda held: held == 0)


async def test_pages_are_pulled_while_the_rest_of_the_prompt_is_computed(workers: dict[str, Worker]) -> None:
    prefill, decode = workers["prefill"], workers["decode"]
    async with front([prefill, decode]) as router:
        for number in range(20):  # on a busy machine the news may come when all is computed
            prompt = [3 + (number * 11 + place * (place + 3)) % 120 for place in range(400)]
            assert tokens_of(await router.answer(prompt)) == expected(prompt)
            early = await decode.count("pulled_early_bytes")
            if early:
                break
        assert 0 < early < await decode.count("pulled_bytes") and early % (PAGE * 8) == 0
        assert router.count("resumptions") == 0
        await prefill.reaches("handoff_pages", lambda held: held == 0)


async def test_log_probabilities_come_from_both_workers_and_the_prompts_once(workers: dict[str, Worker]) -> None:
    prompt = new_prompt()
    async with front([workers["prefill"], workers["decode"]]) as router:
        answer = await router.answer(prompt, logprobs=2, prompt_logprobs=1)
        assert tokens_of(answer) == expected(prompt)
        assert sum(len(response.logprobs) for response in answer) == 20
        assert sum(len(response.prompt_logprobs) for response in answer) == len(prompt) - 1
        assert router.count("handoffs") == 1


async def test_answers_of_one_token_and_prompts_below_a_page_need_no_second_worker(workers: dict[str, Worker]) -> None:
    async with front([workers["prefill"], workers["decode"]]) as router:
        prompt = new_prompt()
        assert tokens_of(await router.answer(prompt, 1)) == expected(prompt, 1)
        assert tokens_of(await router.answer(prompt[:9])) == expected(prompt[:9])
        assert router.count("handoffs") == 0


class Spans(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    """Takes spans over OTLP; keeps their names with their traces."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str, int]] = []

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.found += [(each.trace_id.hex(), each.name, each.start_time_unix_nano) for each in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


async def test_prefill_transfer_and_decode_are_spans_of_one_request(workers: dict[str, Worker]) -> None:
    spans, server = Spans(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(spans, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    pair = [workers["prefill"], workers["decode"]]
    try:
        async with front(pair, trace_endpoint=f"127.0.0.1:{port}") as router:
            prompt = new_prompt()
            assert tokens_of(await router.answer(prompt)) == expected(prompt)
            for part in ("prefill", "transfer", "decode"):
                count = router.router._metrics.registry.get_sample_value(
                    "sapwood_router_pair_seconds_count", {"part": part}
                )
                assert count == 1, part
        # The router has sent all when it has stopped.
        began = {name: when for _, name, when in spans.found}
        assert began["prefill"] <= began["transfer"] <= began["decode"]
        assert len({trace for trace, _, _ in spans.found}) == 1
    finally:
        await server.stop(None)


@pytest.mark.slow
@pytest.mark.parametrize("mover", ["tcp", "shm"])
async def test_pages_pass_over_tls_where_workers_have_certificates(mover: str, tmp_path: Path) -> None:
    authority = trustme.CA()
    ca, cert, key = (tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem"))
    authority.cert_pem.write_to_path(str(ca))
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(str(key))
    issued.cert_chain_pems[0].write_to_path(str(cert))
    flags = ("--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(ca))
    prefill, decode = Worker("prefill", *flags), Worker("decode", "--handoff-mover", mover, *flags)
    credentials = grpc.ssl_channel_credentials(ca.read_bytes(), key.read_bytes(), cert.read_bytes())
    async with (
        started(prefill, decode),
        open_channel(prefill.address, credentials=credentials) as there,
        open_channel(decode.address, credentials=credentials) as here,
    ):
        for number in range(20):  # on a busy machine a lease that nobody renews may end before its pages were pulled
            prompt = new_prompt()
            asked = worker_pb2.WorkerGenerateRequest(request_id=f"p{number}", token_ids=prompt, hand_off=True)
            asked.sampling.seed, asked.sampling.max_tokens = 7, 20
            got = [each async for each in worker_pb2_grpc.WorkerStub(there).Generate(asked, timeout=60)]
            ticket, first = got[-1].ticket, tokens_of(got)
            ticket.source = f"127.0.0.1{ticket.source}"
            rest = worker_pb2.WorkerGenerateRequest(
                request_id=f"d{number}", token_ids=prompt + first, output_tokens=1, ticket=ticket
            )
            rest.sampling.seed, rest.sampling.max_tokens = 7, 19
            answer = [each async for each in worker_pb2_grpc.WorkerStub(here).Generate(rest, timeout=60)]
            assert first + tokens_of(answer) == expected(prompt)
            if await decode.count("pulled_pages"):
                break
        assert await decode.count("pulled_pages") == len(prompt) // PAGE


async def test_explain_route_names_both_workers_of_a_pair(workers: dict[str, Worker]) -> None:
    prefill, decode = workers["prefill"], workers["decode"]
    async with front([decode, prefill]) as router:
        explained = await router.explain(new_prompt())
        assert explained.disaggregated
        assert (explained.chosen, explained.decode_chosen) == (prefill.address, decode.address)
        excluded = {candidate.address: candidate.excluded for candidate in explained.candidates}
        assert excluded == {decode.address: "its role is decode", prefill.address: ""}
        listed = (await router.stub.ListWorkers(router_pb2.ListWorkersRequest())).workers
        assert {worker.address: ROLES[worker.role] for worker in listed} == {
            prefill.address: "prefill",
            decode.address: "decode",
        }


@pytest.mark.parametrize("roles", [("prefill",), ("decode",), ("prefill", "both"), ("decode", "both")])
async def test_workers_of_any_role_serve_where_there_is_no_pair(
    workers: dict[str, Worker], roles: tuple[str, ...]
) -> None:
    prompt = new_prompt()
    async with front([workers[role] for role in roles]) as router:
        assert tokens_of(await router.answer(prompt)) == expected(prompt)
        assert router.count("handoffs") == 0
        explained = await router.explain(prompt)
        assert not explained.disaggregated and explained.disaggregation.endswith("worker can be asked")
        assert explained.chosen == workers[roles[-1]].address  # who does both is asked first


@pytest.mark.parametrize(
    ("disaggregate", "why"), [("always", "the prompt fills no page"), ("never", "the router does not")]
)
async def test_the_command_line_says_why_a_prompt_is_not_handed_off_where_there_are_roles(
    workers: dict[str, Worker], capsys: pytest.CaptureFixture[str], disaggregate: str, why: str
) -> None:
    async def explained(*among: str) -> str:
        async with front([workers[role] for role in among], disaggregate=disaggregate) as router:
            command = ["router", "route", "explain", "hi", "--address", f"127.0.0.1:{router.router.grpc_port}"]
            assert await asyncio.to_thread(main, command) == 0
        return capsys.readouterr().out

    assert f"it does all of it: {why}\n" in await explained("prefill", "decode")
    assert "it does all of it" not in await explained("both")


async def test_auto_measures_hand_overs_where_they_could_pay_and_then_weighs(
    workers: dict[str, Worker], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision, "LEARN_SECONDS", 0.0)  # a hand-over is measured after the other, without a pause
    pair = [workers["prefill"], workers["decode"]]
    async with front(pair, disaggregate="auto") as router:
        first = await router.explain(new_prompt())
        assert not first.disaggregated and not first.estimates
        assert first.disaggregation == "costs are not measured yet"
        prompt = new_prompt()
        assert tokens_of(await router.answer(prompt)) == expected(prompt)
        assert router.count("handoffs") == 0
        # The router believes that prompts take the prefill worker's time, and that the decode worker generates for somebody.
        busy = {pair[0].address: 0.9, pair[1].address: 0.0}
        monkeypatch.setattr(weighing, "prefilling", lambda worker, costs: busy[worker.address])
        seen = {worker.address: worker for worker in router.router.registry.available("fake")}
        seen[pair[1].address].lease(1).prefilled()
        for count in range(8):
            prompt = new_prompt()
            assert "to measure that" in (await router.explain(prompt)).disaggregation
            assert tokens_of(await router.answer(prompt)) == expected(prompt)
            assert router.count("handoffs") == count + 1
        asked = new_prompt()
        explained = await router.explain(asked)
        ways = [(way.worker, way.decode_worker) for way in explained.estimates]
        prefill, decode = (worker.address for worker in pair)
        assert sorted(ways) == sorted([(prefill, ""), (decode, ""), (prefill, decode)])
        assert all(way.prefill_seconds > 0 and way.generate_seconds > 0 for way in explained.estimates)
        assert [way.transfer_seconds > 0 for way in explained.estimates] == [bool(paired) for _, paired in ways]
        command = ["router", "route", "explain", "what would this cost? " * 4]
        address = f"127.0.0.1:{router.router.grpc_port}"
        assert await asyncio.to_thread(main, [*command, "--address", address]) == 0
        assert re.search(rf"{prefill} +{decode}( +[0-9.]+){{5}}\n", capsys.readouterr().out)
        assert tokens_of(await router.answer(asked)) == expected(asked)
        weighed = [
            router.router._metrics.registry.get_sample_value(
                "sapwood_router_disaggregation_weighed_total", {"choice": choice}
            )
            for choice in ("pair", "alone")
        ]
        assert sum(count or 0 for count in weighed) == 9


async def test_never_passes_over_what_workers_are_for(workers: dict[str, Worker]) -> None:
    pair = workers["prefill"], workers["decode"]
    before = [await worker.count("prompt_tokens") for worker in pair]
    async with front(pair, disaggregate="never", policy="round_robin") as router:
        for prompt in (new_prompt(), new_prompt()):
            assert tokens_of(await router.answer(prompt)) == expected(prompt)
        assert router.count("handoffs") == 0
    for worker, count in zip(pair, before, strict=True):
        assert await worker.count("prompt_tokens") > count


async def test_whoever_comes_with_a_ticket_that_nobody_renewed_computes(workers: dict[str, Worker]) -> None:
    prefill, decode = workers["prefill"], workers["decode"]
    prompt = new_prompt()
    expired = await prefill.count("handoff_expired")
    pulled, fallbacks = await decode.count("pulled_pages"), await decode.count("pull_fallbacks")
    async with open_channel(prefill.address) as there, open_channel(decode.address) as here:
        request = worker_pb2.WorkerGenerateRequest(request_id="handed-off", token_ids=prompt, hand_off=True)
        request.sampling.seed, request.sampling.max_tokens = 7, 20
        got = [response async for response in worker_pb2_grpc.WorkerStub(there).Generate(request, timeout=60)]
        ticket = got[-1].ticket
        assert len(ticket.page_hashes) == len(prompt) // PAGE
        await prefill.reaches("handoff_expired", lambda count: count > expired)
        assert await prefill.count("handoff_pages") == 0
        ticket.source = f"127.0.0.1{ticket.source}"
        first = tokens_of(got)
        late = worker_pb2.WorkerGenerateRequest(
            request_id="late", token_ids=prompt + first, output_tokens=1, ticket=ticket
        )
        late.sampling.seed, late.sampling.max_tokens = 7, 19
        rest = [response async for response in worker_pb2_grpc.WorkerStub(here).Generate(late, timeout=60)]
    assert first + tokens_of(rest) == expected(prompt)
    await decode.reaches("pull_fallbacks", lambda count: count > fallbacks)
    assert await decode.count("pulled_pages") == pulled


@pytest.mark.parametrize("lost", ["decode", "prefill"])
async def test_a_worker_killed_while_the_stream_runs_changes_no_token(workers: dict[str, Worker], lost: str) -> None:
    prompt = new_prompt()
    async with front(list(workers.values())) as router:
        tokens: list[int] = []
        async for response in router.stream(prompt, 150):
            if len(tokens) < 5 <= len(tokens) + len(response.token_ids):
                await workers[lost].kill()
            tokens += response.token_ids
        assert tokens == expected(prompt, 150)
        assert router.count("handoffs") >= 1
        await workers[lost].start()
        await router.available(3)
        again = new_prompt()
        assert tokens_of(await router.answer(again)) == expected(again)


async def _role_is(router: Front, worker: Worker, role: str) -> None:
    """Waits until the router knows."""
    async with asyncio.timeout(60):
        while True:
            listed = (await router.stub.ListWorkers(router_pb2.ListWorkersRequest())).workers
            if {each.address: ROLES[each.role] for each in listed}[worker.address] == role:
                return
            await asyncio.sleep(0.01)


async def _set_role(worker: Worker, role: str) -> None:
    assert await asyncio.to_thread(main, ["worker", "role", role, "--worker", worker.address]) == 0


async def test_roles_change_with_work_in_flight_and_no_token_does(workers: dict[str, Worker]) -> None:
    changing, other = workers["both"], workers["decode"]
    async with front([changing, other]) as router:
        prompt, before = new_prompt(), await other.count("pulled_pages")
        assert tokens_of(await router.answer(prompt)) == expected(prompt)
        assert router.count("handoffs") == 0
        await _set_role(changing, "prefill")
        await _role_is(router, changing, "prefill")
        tokens: list[int] = []
        async for response in router.stream(new := new_prompt(), 150):
            # Its ticket's lease is renewed over the change.
            if len(tokens) < 5 <= len(tokens) + len(response.token_ids):
                await _set_role(changing, "decode")
                await _set_role(other, "prefill")
                await _role_is(router, changing, "decode")
                await _role_is(router, other, "prefill")
            tokens += response.token_ids
        assert tokens == expected(new, 150)
        assert router.count("handoffs") == 1 and router.count("resumptions") == 0
        await other.reaches("pulled_pages", lambda count: count > before)
        assert tokens_of(await router.answer(back := new_prompt())) == expected(back)
        assert router.count("handoffs") == 2
        await changing.reaches("pulled_pages", lambda count: count > 0)
        changing.send_to_scheduler(signal.SIGKILL)  # the next one is what this one was made
        await router.available(1)
        await router.available(2)
        await _role_is(router, changing, "decode")
        pulled = await changing.count("pulled_pages")
        assert tokens_of(await router.answer(again := new_prompt())) == expected(again)
        await changing.reaches("pulled_pages", lambda count: count > pulled)
        await _set_role(changing, "both")
        await _set_role(other, "decode")
