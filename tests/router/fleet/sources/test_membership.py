"""Workers that are added, drained and removed while the router runs, by operators, a file, a name, or themselves."""

import asyncio
import re

import grpc
import pytest

from sapwood.cli.main import main
from sapwood.v1 import router_pb2, worker_pb2
from sapwood_router.config import RouterConfig
from sapwood_router.fleet.sources.membership import read_addresses
from sapwood_testing.router.fake_worker import FakeWorker


@pytest.fixture
async def extra():
    worker = FakeWorker()
    await worker.start()
    yield worker
    await worker.kill()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, ("127.0.0.1:50061",)),
        ({"workers_file": "w"}, ()),
        ({"workers_dns": "w:1"}, ()),
        ({"kubernetes_service": "a/w:1"}, ()),
        ({"workers": ()}, ()),
        ({"workers": ("a:1",), "workers_file": "w"}, ("a:1",)),
    ],
)
def test_the_worker_on_this_machine_is_only_meant_where_no_other_is_named(settings, named) -> None:
    assert RouterConfig(**settings).named_workers == named


PROMPT = "a prompt of very many pages, " * 400


def addresses(cluster) -> set[str]:
    return {worker.address for worker in cluster.router.registry.available("fake")}


def countdown(prompt) -> list[int]:
    return list(range(prompt[-1] - 1, 40, -1))


async def test_a_registered_worker_serves_until_its_lease_is_over(cluster, extra, wait_until) -> None:
    for seconds in (1.0, 60.0):  # the later lease counts
        await cluster.stub.RegisterWorker(
            router_pb2.RegisterWorkerRequest(address=extra.address, lease_seconds=seconds)
        )
    await wait_until(lambda: extra.address in addresses(cluster))
    await asyncio.sleep(1.5)
    assert extra.address in addresses(cluster)
    await cluster.stub.RegisterWorker(router_pb2.RegisterWorkerRequest(address=extra.address, lease_seconds=0.1))
    await wait_until(lambda: extra.address not in addresses(cluster))
    await wait_until(lambda: extra.address not in {worker.address for worker in cluster.router.registry.all()})


async def test_a_worker_that_is_configured_too_outlives_its_lease(cluster, wait_until) -> None:
    address = cluster.workers[0].address
    await cluster.stub.RegisterWorker(router_pb2.RegisterWorkerRequest(address=address, lease_seconds=0.1))
    await asyncio.sleep(1.2)
    assert address in addresses(cluster)


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"address": "nowhere"}, "address"), ({"address": "a:1", "lease_seconds": 0}, "lease_seconds")],
)
async def test_a_registration_that_makes_no_sense_is_refused(cluster, expect_error, fields, field) -> None:
    call = cluster.stub.RegisterWorker(router_pb2.RegisterWorkerRequest(**fields))
    assert (await expect_error(call, grpc.StatusCode.INVALID_ARGUMENT))[1] == field


async def test_a_drained_worker_gets_nothing_new_and_finishes_what_it_has(cluster, wait_until) -> None:
    for worker in cluster.workers:
        worker.script.gate = asyncio.Event()
    running = asyncio.ensure_future(cluster.generate("abc"))
    await wait_until(lambda: len(cluster.calls()) == 1)
    busy, other = sorted(cluster.workers, key=lambda worker: -len(worker.calls))
    answer = await cluster.stub.DrainWorker(router_pb2.DrainWorkerRequest(address=busy.address))
    assert answer.in_flight == 1
    other.script.gate.set()
    for _ in range(6):
        await cluster.generate("more")
    assert (len(busy.calls), len(other.calls)) == (1, 6)
    busy.script.gate.set()
    assert "".join(response.text for response in await running) == "abc"
    listed = {w.address: w for w in (await cluster.stub.ListWorkers(router_pb2.ListWorkersRequest())).workers}
    assert listed[busy.address].draining
    await cluster.stub.DrainWorker(router_pb2.DrainWorkerRequest(address=busy.address, undo=True))
    assert busy.address in addresses(cluster)


async def test_what_runs_on_a_removed_worker_goes_on_elsewhere(cluster, wait_until) -> None:
    for worker in cluster.workers:
        worker.script.tokens, worker.script.delay = countdown, 0.01
    request = router_pb2.RouterGenerateRequest()
    request.tokens.ids.extend([2, 90])
    call = cluster.stub.Generate(request)
    tokens = list((await call.read()).token_ids)
    busy = next(worker for worker in cluster.workers if worker.calls)
    await cluster.stub.RemoveWorker(router_pb2.RemoveWorkerRequest(address=busy.address))
    while (response := await call.read()) is not grpc.aio.EOF:
        tokens += response.token_ids
    assert tokens == [*countdown([90]), 1]
    assert len(cluster.router.registry.all()) == 1
    await cluster.idle()


@pytest.mark.parametrize("method", ["DrainWorker", "RemoveWorker"])
async def test_a_worker_that_is_not_there_is_not_found(cluster, expect_error, method) -> None:
    request = getattr(router_pb2, f"{method}Request")(address="1.2.3.4:5")
    await expect_error(getattr(cluster.stub, method)(request), grpc.StatusCode.NOT_FOUND)


async def test_a_file_of_workers_is_followed(make_cluster, extra, wait_until, tmp_path) -> None:
    file = tmp_path / "workers"
    file.write_text("# none yet\n")
    async with make_cluster(1, workers_file=file) as cluster:
        file.write_text(f"\n{extra.address}  # a new one\n")
        await wait_until(lambda: extra.address in addresses(cluster))
        file.unlink()
        await asyncio.sleep(0.8)
        assert extra.address in addresses(cluster)
        file.write_text("")
        await wait_until(lambda: addresses(cluster) == {cluster.workers[0].address})


def test_a_workers_file_may_have_comments_and_blanks() -> None:
    assert read_addresses("a:1\n\n  b:2 # two\n#c:3\n") == ["a:1", "b:2"]


async def test_every_address_behind_a_name_is_a_worker(make_cluster, extra, wait_until) -> None:
    async with make_cluster(1, workers_dns=f"localhost:{extra.port}", workers_dns_interval=0.1) as cluster:
        await wait_until(lambda: f"127.0.0.1:{extra.port}" in addresses(cluster))


async def test_a_choice_is_explained(cluster) -> None:
    await cluster.generate(PROMPT, sampling={"max_tokens": 1})
    holder = next(worker for worker in cluster.workers if worker.calls)
    request = router_pb2.RouterGenerateRequest(text=PROMPT)
    answer = await cluster.stub.ExplainRoute(router_pb2.ExplainRouteRequest(request=request))
    assert (answer.chosen, answer.reason) == (holder.address, "cache_hit")
    assert answer.prompt_tokens == len(PROMPT) + 1
    by_address = {item.address: item for item in answer.candidates}
    other = next(worker.address for worker in cluster.workers if worker is not holder)
    assert by_address[holder.address].cached_tokens == len(PROMPT)
    assert by_address[other].cached_tokens == 0
    assert by_address[holder.address].cost < by_address[other].cost
    await cluster.stub.DrainWorker(router_pb2.DrainWorkerRequest(address=holder.address))
    answer = await cluster.stub.ExplainRoute(router_pb2.ExplainRouteRequest(request=request))
    assert answer.chosen == other
    excluded = {item.address: item.excluded for item in answer.candidates}
    assert excluded == {holder.address: "drained by an operator", other: ""}
    assert len(cluster.calls()) == 1  # nothing was generated for it


async def test_explain_says_what_is_refused_and_names_the_choice_of_what_waits(
    make_cluster, expect_error, wait_until
) -> None:
    async with make_cluster(requests_per_worker=1) as cluster:

        def explained(text: str):
            request = router_pb2.RouterGenerateRequest(text=text)
            return cluster.stub.ExplainRoute(router_pb2.ExplainRouteRequest(request=request))

        lengths = sorted(worker.model.context_length for worker in cluster.router.registry.all())
        message, field = await expect_error(explained("a" * lengths[-1]), grpc.StatusCode.INVALID_ARGUMENT)
        assert (f"context length is {lengths[-1]} tokens" in message, field) == (True, "text")
        gate = asyncio.Event()
        for worker in cluster.workers:
            worker.script.gate = gate
        running = []
        for count in (1, 2):
            running.append(asyncio.ensure_future(cluster.generate(PROMPT)))
            await wait_until(lambda count=count: sum(w.in_flight for w in cluster.router.registry.all()) == count)
            answer = await explained(PROMPT)
            excluded = sorted(item.excluded for item in answer.candidates)
            assert excluded == ["", "has as many requests as it is given" if count == 1 else ""]
        gate.set()
        await asyncio.gather(*running)


async def test_a_workers_report_is_shown_whole(make_cluster, wait_until, capsys) -> None:
    fields = worker_pb2.LoadReport.DESCRIPTOR.fields
    report = worker_pb2.LoadReport(
        **{field.name: "store" if field.name == "storage_id" else 100 + field.number for field in fields}
    )
    async with make_cluster(1) as cluster:
        (worker,) = cluster.router.registry.all()
        cluster.workers[0].report(report)
        await wait_until(lambda: worker.load.running_requests == 101)
        listed = await cluster.stub.ListWorkers(router_pb2.ListWorkersRequest())
        status = await cluster.stub.GetStatus(router_pb2.GetStatusRequest())
        for (shown,) in (listed.workers, status.workers):
            assert shown.load == report
            assert shown.epoch == worker.model.epoch
        address = f"127.0.0.1:{cluster.router.grpc_port}"
        assert await asyncio.to_thread(main, ["router", "workers", "list", "--address", address]) == 0
        names, row = (re.split(r"  +", line) for line in capsys.readouterr().out.splitlines())
        told = dict(zip(names, row, strict=True))
        shares = {
            "PAGES": (report.used_pages - report.evictable_pages) / report.num_pages,
            "HOST": report.host_used_pages / report.host_num_pages,
            "HIT RATE": report.cached_tokens / report.prompt_tokens,
            "FROM HOST": report.host_hit_tokens / report.prompt_tokens,
            "FROM STORE": report.storage_hit_tokens / report.prompt_tokens,
        }
        assert {name: told[name] for name in shares} == {name: f"{share:.0%}" for name, share in shares.items()}


async def test_the_command_line_lists_adds_drains_removes_and_explains(cluster, extra, wait_until, capsys) -> None:
    async def run(*words: str) -> str:
        address = f"127.0.0.1:{cluster.router.grpc_port}"
        assert await asyncio.to_thread(main, ["router", *words, "--address", address]) == 0
        return capsys.readouterr().out

    await run("workers", "add", extra.address)
    await wait_until(lambda: extra.address in addresses(cluster))
    listed = await run("workers", "list")
    assert all(worker.address in listed for worker in (*cluster.workers, extra))
    assert "closed" in listed
    assert "0 requests" in await run("workers", "drain", extra.address)
    assert "draining" in await run("workers", "list")
    await run("workers", "drain", extra.address, "--undo")
    await run("workers", "remove", extra.address)
    assert extra.address not in await run("workers", "list")
    shown = await run("route", "explain", "hello")
    assert "-> " in shown
    assert "reason: cache_miss" in shown
